"""Command-line flags of any settings dataclass: its fields, their docstrings and their annotations, read once."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import itertools
import textwrap
from dataclasses import MISSING
from typing import Any

from megatron_pg.config.fields import Field, Settings, fields_of, flag_of
from megatron_pg.config.rows import TABLES


def add_args(
    parser: argparse.ArgumentParser,
    settings: type[Any],
    *,
    title: str,
    description: str = "",
    unset: tuple[str, ...] = (),
) -> argparse.ArgumentParser:
    """Add one flag for each field of a settings dataclass, in a group of their own, and change nothing else.

    The docstring under a field is the flag's help text. A flag that the parser has already (Megatron's
    `--calculate-per-token-loss`, a trainer's `--eps-clip`) is left as it is: its value lands in the same attribute.

    Args:
        parser: any parser; Megatron's, as an `extra_args_provider` gets it.
        settings: the dataclass; see `fields_of` for what its annotations say.
        title: the group's.
        description: the group's.
        unset: fields whose flags have no default, so that it is seen whether they were given.

    Raises:
        ValueError: the parser has a flag of the same name that stores to another attribute.
    """
    fields = [field for field in fields_of(settings).values() if field.has_flag]
    texts = field_docstrings(settings)
    missing = [field for field in fields if not is_defined(parser, field.name)]
    if missing:
        group = parser.add_argument_group(title, description)
        for field in missing:
            keywords = _argparse_keywords(field, texts.get(field.name, ""))
            if field.name in unset:
                keywords["default"] = None
            group.add_argument(field.flag, **keywords)
    return parser


def read_args(settings: type[Settings], args: argparse.Namespace) -> Settings:
    """Make the dataclass from parsed arguments; a field whose flag the parser did not define keeps its default.

    Raises:
        ValueError: the dataclass refuses a value, such as None for a field that must be given.
    """
    arguments, values = vars(args), {}
    for field in fields_of(settings).values():
        if field.name in arguments or field.default is MISSING:
            value = arguments.get(field.name)
            values[field.name] = tuple(value or ()) if field.type is tuple else value
    return settings(**values)


def field_docstrings(settings: type[Any]) -> dict[str, str]:
    """Return the docstring under each field, on one line.

    Python does not keep these, so they are read from the source. A package of compiled files only has none, and its
    flags have no help text.
    """
    texts = {}
    for base in settings.__mro__[:-1]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except OSError:
            continue
        for pair in itertools.pairwise(tree.body[0].body):  # type: ignore[attr-defined]
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return texts


def is_defined(parser: argparse.ArgumentParser, name: str) -> bool:
    """Return whether the parser has the flag of a field already, whoever defined it.

    Raises:
        ValueError: the flag stores to another attribute.
    """
    flag = flag_of(name)
    action = parser._option_string_actions.get(flag)
    if action is not None and action.dest != name:
        raise ValueError(
            f"{flag} is already a flag of this parser and stores to {action.dest!r}; expected {name!r}: give that flag "
            f"another name, or dest={name!r}"
        )
    return action is not None


def _argparse_keywords(field: Field, text: str) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a flag."""
    if field.name in TABLES:
        rows = TABLES[field.name].values()
        text = " ".join([text, *(f"{row.name}: {row.help}." for row in rows)])
    text = text.replace("%", "%%")
    if field.type is bool:
        return {"action": "store_true", "help": text}
    default = None if field.default in (MISSING, ()) else field.default
    if default is not None:
        text += f" (default: {default})"
    keywords: dict[str, Any] = {"default": default, "help": text}
    if field.choices is not None:
        return keywords | {"type": functools.partial(_word, field), "choices": field.choices}
    if field.parsed is not None:
        return keywords | {"type": field.parsed.parse, "metavar": field.parsed.metavar}
    if field.interval is not None:
        return keywords | {"type": field.type, "metavar": field.interval.metavar}
    return keywords | {"metavar": "PATH"} | ({"nargs": "+"} if field.type is tuple else {})


def _word(field: Field, text: str) -> str:
    choices, hint = field.choices or (), field.did_you_mean(text)
    if text in choices or not hint:
        return text  # argparse itself lists the words
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}{hint}")
