"""Removed flags and choices, and their replacements."""

import argparse
from typing import Any, NoReturn

_OWN_OBJECTIVE = "pass the objective as a function with --custom-policy-loss-path"
REMOVED_FLAGS: dict[str, str] = {
    "--cp-partition-mode": "context-parallel ranks always hold zigzag chunks. Remove the flag.",
    "--ctpo-clip-c": _OWN_OBJECTIVE,
    "--ctpo-clip-high": _OWN_OBJECTIVE,
    "--ctpo-clip-low": _OWN_OBJECTIVE,
    "--fipo-half-life": _OWN_OBJECTIVE,
    "--fipo-safe-ratio": _OWN_OBJECTIVE,
    "--fipo-weight-high": _OWN_OBJECTIVE,
    "--fipo-weight-low": _OWN_OBJECTIVE,
    "--policy-loss ctpo": _OWN_OBJECTIVE,
    "--policy-loss fipo": _OWN_OBJECTIVE,
}
"""Replacement by flag, or by a flag and its removed choice."""


def refusal_of_removed(flag: str) -> str:
    """Return what replaces a removed flag or choice, or "" for anything else."""
    return f"{flag} was removed: {REMOVED_FLAGS[flag]}" if flag in REMOVED_FLAGS else ""


def add_removed_flags(parser: argparse.ArgumentParser) -> None:
    """Make a parser reject removed flags by name, unless it already has them."""
    for flag in REMOVED_FLAGS:
        if " " not in flag and flag not in parser._option_string_actions:
            hidden: Any = argparse.SUPPRESS
            parser.add_argument(flag, nargs="*", action=_Refused, default=hidden, help=hidden)


class _Refused(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(refusal_of_removed(self.option_strings[0]))
