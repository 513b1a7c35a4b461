"""Flags and words that earlier versions had, and what to do instead."""

import argparse
from typing import Any, NoReturn

_OWN_OBJECTIVE = "give the objective as a function of your own, by --custom-policy-loss-path"
REMOVED_FLAGS: dict[str, str] = {
    "--cp-partition-mode": "context-parallel ranks hold zigzag chunks; leave the flag out",
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
"""What to do instead, by the flag, or by a flag and its removed word."""


def refusal_of_removed(flag: str) -> str:
    """Say what to do instead of a removed flag, or of a flag and its word; "" for any other."""
    return f"{flag} was removed: {REMOVED_FLAGS[flag]}" if flag in REMOVED_FLAGS else ""


def add_removed_flags(parser: argparse.ArgumentParser) -> None:
    """Make a parser refuse removed flags by name, except those that it has already."""
    for flag in REMOVED_FLAGS:
        if " " not in flag and flag not in parser._option_string_actions:
            hidden: Any = argparse.SUPPRESS
            parser.add_argument(flag, nargs="*", action=_Refused, default=hidden, help=hidden)


class _Refused(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(refusal_of_removed(self.option_strings[0]))
