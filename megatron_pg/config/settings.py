"""Dataclasses of settings, with flags and checks. Annotations give types and choices."""

import argparse
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import MISSING
from types import NoneType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from megatron_pg.config.removed import add_removed_flags, refusal_of_removed
from megatron_pg.config.tables import ALSO_KNOWN_AS, table_of
from megatron_pg.config.values import Interval, did_you_mean, expected, flag_of, refuse


def setting[T](default: T, *about: str | Interval, flag: bool = True) -> T:
    """Return a dataclass field. `about` has its help text and the range of a number."""
    metadata: dict[str, Any] = {"flag": flag}
    metadata |= {"interval" if isinstance(part, Interval) else "help": part for part in about}
    made: T = dataclasses.field(default=default, metadata=metadata)
    return made


class Field:
    """Field of a dataclass of settings, with its metadata and annotation."""

    def __init__(self, field: "dataclasses.Field[Any]", hint: Any) -> None:
        self.name, self.default = field.name, field.default
        self.is_optional = NoneType in get_args(hint)
        hint = get_args(hint)[0] if self.is_optional else hint
        self.words = get_args(hint) if get_origin(hint) is Literal else ()
        self.type: Any = str if self.words else get_origin(hint) or hint
        self.help = " ".join(field.metadata.get("help", "").split())
        self.interval: Interval | None = field.metadata.get("interval")
        self.has_flag: bool = field.metadata.get("flag", True)
        self.flag = flag_of(field.name) if self.has_flag else field.name

    @property
    def choices(self) -> tuple[str, ...]:
        """The valid words, from a `Literal` or a table. Empty if any value is valid."""
        return tuple(table_of(self.name)) or self.words

    def violation(self, value: Any) -> str:
        """Return what is wrong with a single value, or ""."""
        is_unchecked = not self.has_flag and self.interval is None
        if is_unchecked or (value is None and self.is_optional):
            return ""
        right = expected(value, self.type, self.choices, self.interval)
        hint = right and self.did_you_mean(value)
        return right and f"{self.flag} must be {right}, not {value!r}{hint}"

    def did_you_mean(self, value: Any) -> str:
        """Return the replacement of a removed word, a hint at the nearest one, or ""."""
        if removed := refusal_of_removed(f"{self.flag} {value}"):
            return f". {removed}"
        return did_you_mean(value, self.choices, ALSO_KNOWN_AS.get(self.name))

    def word(self, text: str) -> str:
        """Parse a choice."""
        if text in self.choices or not (hint := self.did_you_mean(text)):
            return text  # argparse itself lists the choices
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(self.choices)}{hint}")

    def argparse_keywords(self) -> dict[str, Any]:
        """Return the arguments of `add_argument` for the flag."""
        rows = table_of(self.name).values()
        text = " ".join([self.help, *(f"{row.name}: {row.help}." for row in rows)])
        text, default = text.replace("%", "%%"), self.default
        if self.type is bool:
            return {"action": "store_true", "help": text}
        default = None if default in (MISSING, ()) else default
        text += f" (default: {default})" * (default is not None)
        keywords: dict[str, Any] = {"default": default, "help": text}
        if self.choices:
            return keywords | {"type": self.word, "choices": self.choices}
        if self.interval is not None:
            return keywords | {"type": self.type, "metavar": self.interval.metavar}
        return keywords | {"metavar": "PATH"} | ({"nargs": "+"} if self.type is tuple else {})


@functools.cache
def fields_of(settings: Any) -> dict[str, Field]:
    """Return the fields of a dataclass of settings by name, in order."""
    hints = get_type_hints(settings)
    return {field.name: Field(field, hints[field.name]) for field in dataclasses.fields(settings)}


class Settings:
    """Base class of frozen dataclasses that report all invalid values in one error.

    A method `conflicts(given)` yields conflicts between settings. `self` has the default instead
    of an invalid value, and `given` has the value.
    """

    def __new__(cls, *_: object, **given: object) -> Self:
        """Reject removed settings by name, which `__init__` does not know."""
        refuse([text for name in given if (text := refusal_of_removed(flag_of(name)))])
        return object.__new__(cls)

    def __post_init__(self) -> None:
        refuse(self.checked(vars(self))[0])

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> tuple[list[str], Self]:
        """Return the violations, and the settings with defaults for missing or invalid values."""
        violations, sound = [], object.__new__(cls)
        for field in fields_of(cls).values():  # type: ignore[arg-type]
            value = given.get(field.name, field.default)
            if violation := field.violation(None if value is MISSING else value):
                violations.append(violation)
            vars(sound)[field.name] = field.default if violation else value
        for base in reversed(cls.__mro__):
            if "conflicts" in vars(base):
                violations += vars(base)["conflicts"](sound, given)
        return violations, sound

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Read the settings from parsed arguments, with defaults for undefined ones."""
        arguments, values = vars(args), {}
        for field in fields_of(cls).values():  # type: ignore[arg-type]
            if field.name in arguments or field.default is MISSING:
                value = arguments.get(field.name)
                values[field.name] = tuple(value or ()) if field.type is tuple else value
        return cls(**values)


def add_args(parser: argparse.ArgumentParser, settings: Any, *group: str) -> None:
    """Add the flags of a dataclass of settings. `group` has a title and a description.

    A flag that the parser already has (Megatron's `--calculate-per-token-loss`) stays unchanged:
    its value is in the same attribute. Errors for removed flags name the replacement.
    """
    add_removed_flags(parser)
    fields = [field for field in fields_of(settings).values() if field.has_flag]
    if missing := [field for field in fields if not is_defined(parser, field.name)]:
        added = parser.add_argument_group(*group)
        for field in missing:
            added.add_argument(field.flag, **field.argparse_keywords())


def is_defined(parser: argparse.ArgumentParser, name: str) -> bool:
    """Return whether the parser has a field's flag.

    Raises:
        ValueError: the flag stores to a different attribute.
    """
    action = parser._option_string_actions.get(flag := flag_of(name))
    if action is not None and action.dest != name:
        raise ValueError(
            f"{flag} already exists in this parser and stores to {action.dest!r}, not to "
            f"{name!r}. Rename that flag or pass dest={name!r}."
        )
    return action is not None
