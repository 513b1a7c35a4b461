"""The command-line flags of ``PolicyLossConfig``."""

from __future__ import annotations

import argparse
import ast
import inspect
from functools import lru_cache
from typing import Any

from megatron_pg.config.policy_loss import FIELD_TYPES, PolicyLossConfig, config_fields
from megatron_pg.config.values import INTERVALS, choices_of, flag_of

PG_LOSS_DIVISOR_HELP = (
    "Short for --loss-aggregation constant --loss-aggregation-divisor L: 1/(N L) sum m x."
)


def add_policy_loss_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of the policy loss, in a group of their own.

    Usable as Megatron's ``extra_args_provider``, which runs after Megatron has added its own flags.
    A flag that the parser has already (Megatron's ``--calculate-per-token-loss``, a trainer's
    ``--eps-clip``) is left as it is: its value lands in the same attribute.

    Raises:
        ValueError: The parser has a flag of the same name that stores to another attribute.
    """
    missing = [name for name in flag_names() if not _is_defined(parser, name)]
    if not missing:
        return parser
    group = parser.add_argument_group(
        "policy loss",
        "r: ratio of new to old policy; A: advantage; m: loss mask; x: per-token loss; sg: no "
        "gradient. Log-ratios are clamped to +-20.",
    )
    for name in missing:
        group.add_argument(flag_of(name), **_argparse_keywords(name))
    return parser


def flag_names() -> tuple[str, ...]:
    """The attribute of every flag, in the order of ``--help``: the fields and a short spelling."""
    names = list(config_fields(with_python_only=False))
    names.insert(names.index("loss_aggregation_divisor") + 1, "pg_loss_divisor")
    return tuple(names)


@lru_cache(maxsize=1)
def field_docstrings() -> dict[str, str]:
    """The docstring under each field of ``PolicyLossConfig``, on one line.

    Python does not keep these, so they are read from the source; without it (a package of compiled
    files only) there are none, and the flags have no help text.
    """
    try:
        body = ast.parse(inspect.getsource(PolicyLossConfig)).body[0]
    except OSError:
        return {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(statements, statements[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _is_defined(parser: argparse.ArgumentParser, name: str) -> bool:
    """Whether the parser has the flag of a field already, whoever defined it."""
    action = parser._option_string_actions.get(flag_of(name))
    if action is not None and action.dest != name:
        raise ValueError(
            f"{flag_of(name)} is already a flag of this parser and stores to {action.dest!r}; "
            f"expected {name!r}: give that flag another name, or dest={name!r}"
        )
    return action is not None


def _argparse_keywords(name: str) -> dict[str, Any]:
    """What ``add_argument`` is told about the flag of a field."""
    if name == "pg_loss_divisor":
        return {"type": float, "metavar": "L", "help": PG_LOSS_DIVISOR_HELP}
    default = getattr(PolicyLossConfig, name)
    help_text = field_docstrings().get(name, "").replace("%", "%%")
    if FIELD_TYPES[name] is bool:
        return {"action": "store_true", "help": help_text}
    if default is not None:
        help_text += f" (default: {default})"
    keywords: dict[str, Any] = {"default": default, "help": help_text}
    if name == "loss_aggregation":
        # None tells validation that the user chose nothing, so that --pg-loss-divisor may.
        keywords["default"] = None
    if name in INTERVALS:
        keywords.update(type=float, metavar="L" if name.endswith("_divisor") else "X")
    elif (choices := choices_of(FIELD_TYPES[name])) is not None:
        keywords["choices"] = choices
    else:
        keywords["metavar"] = "PATH"
    return keywords
