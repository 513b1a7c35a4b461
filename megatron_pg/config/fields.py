"""Fields of a settings dataclass: the values that each may have, and the faults of those that are given."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_pg.config.rows import TABLES, did_you_mean


@dataclass(frozen=True)
class Interval:
    """The finite numbers above `lower` (or equal to it, if closed) and up to `upper`; whole ones for an int field."""

    lower: float
    upper: float = math.inf
    closed: bool = False
    metavar: str = "X"
    or_infinite: bool = False
    """Infinity is one of the numbers: a bound that is open."""

    def contains(self, value: Any) -> bool:
        """Return whether a value is a number of the interval."""
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return False
        number: Any = value  # compared as it is: an integer may be beyond every float
        above = number >= self.lower if self.closed else number > self.lower
        return bool(above and number <= self.upper and (number < math.inf or self.or_infinite))

    def __str__(self) -> str:
        text = f"{'>=' if self.closed else '>'} {self.lower:g}"
        return text if math.isinf(self.upper) else f"{text} and <= {self.upper:g}"


@dataclass(frozen=True)
class Parsed:
    """A parser of the flag's text, for a field that takes more than a word or a number."""

    parse: Callable[[str], Any]
    """Raises `argparse.ArgumentTypeError`, saying what was expected."""
    metavar: str


FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest normal and the largest positive number of float32, in which the loss is computed."""

COUNT = Interval(1, closed=True, metavar="N")
"""An integer from 1 on."""

PYTHON_ONLY = "python only"
"""Mark of a field without a flag."""

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Field:
    """One setting of a dataclass, read off its annotation."""

    name: str
    default: Any
    type: Any
    """Type of a value: bool, int, float, str or tuple."""
    words: tuple[str, ...] | None
    """Words of a `Literal`."""
    interval: Interval | None
    parsed: Parsed | None
    is_optional: bool
    """None is a value."""
    has_flag: bool

    @property
    def choices(self) -> tuple[str, ...] | None:
        """Words that it may be, of a `Literal` or of a table of rows."""
        return tuple(TABLES[self.name]) if self.name in TABLES else self.words

    @property
    def flag(self) -> str:
        """The flag, `--eps-clip` of `eps_clip`; the bare name where there is none."""
        return flag_of(self.name) if self.has_flag else self.name

    def violation(self, value: Any) -> str | None:
        """Return what is wrong with a value by itself, None where nothing is."""
        if value is None and self.is_optional:
            return None
        if self.choices is not None:
            valid, expected = value in self.choices, "one of " + ", ".join(self.choices)
        elif self.type is bool:
            valid, expected = isinstance(value, bool), "True or False"
        elif self.type is tuple:
            valid = isinstance(value, tuple) and all(isinstance(part, str) for part in value)
            expected = "a sequence of words"
        elif self.interval is None:
            valid, expected = isinstance(value, str) and bool(value), "pkg.mod.fn or pkg.mod:fn"
        else:
            valid = self.interval.contains(value)
            kind = "a number or inf" if self.interval.or_infinite else "a finite number"
            expected = f"{'an integer' if self.type is int else kind} {self.interval}"
            if self.type is int:
                valid = valid and isinstance(value, numbers.Integral)
            elif valid and not (FLOAT32[0] <= abs(value) <= FLOAT32[1] or value in (0, math.inf)):
                valid, expected = False, f"{expected} that float32 holds"
        if valid:
            return None
        return f"{self.flag} must be {expected}; found {value!r}{self.did_you_mean(value)}"

    def did_you_mean(self, value: Any) -> str:
        """Return a hint at the nearest right word, "" where none is near."""
        table = TABLES.get(self.name)
        return did_you_mean(value, self.choices or (), table.also_known_as if table else {})


def flag_of(name: str) -> str:
    """Return the flag that stores to an attribute."""
    return "--" + name.replace("_", "-")


_FIELDS: dict[type[Any], dict[str, Field]] = {}


def fields_of(settings: type[Any]) -> dict[str, Field]:
    """Return the fields of a settings dataclass, by name and in order.

    An annotation says what a field may be: bool, `Literal` words, a word of the table of that name (`TABLES`),
    `Annotated[float, Interval(...)]` or `Annotated[int, COUNT]`, a tuple of words, or an import path (str); `| None`
    allows None.
    """
    if settings not in _FIELDS:
        hints = get_type_hints(settings, include_extras=True)
        fields = [field for field in dataclasses.fields(settings) if field.init]
        _FIELDS[settings] = {field.name: _field(field, hints[field.name]) for field in fields}
    return _FIELDS[settings]


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    hint, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    hint = next(part for part in parts if part is not NoneType)
    words = get_args(hint) if get_origin(hint) is Literal else None
    return Field(
        name=field.name,
        default=field.default,
        type=str if words else get_origin(hint) or hint,
        words=words,
        interval=next((note for note in notes if isinstance(note, Interval)), None),
        parsed=next((note for note in notes if isinstance(note, Parsed)), None),
        is_optional=NoneType in parts,
        has_flag=PYTHON_ONLY not in notes,
    )


def check_fields(settings: type[Settings], values: Mapping[str, Any]) -> tuple[list[str], Settings]:
    """Check every value by itself.

    Args:
        settings: the dataclass.
        values: by field name; a field without one has its default.

    Returns:
        The violations, and the dataclass with a default for each value that is wrong: made without `__post_init__`, so
        that one look finds what is wrong with the others too.
    """
    violations, sound = [], object.__new__(settings)
    for field in fields_of(settings).values():
        value = values.get(field.name, field.default)
        violation = field.violation(None if value is dataclasses.MISSING else value)
        if violation is not None:
            violations.append(violation)
            value = field.default
        vars(sound)[field.name] = value
    return violations, sound


def refuse(violations: Sequence[str], *, error: type[Exception] = ValueError) -> None:
    """Raise one error with every violation; return where there is none."""
    if len(violations) == 1:
        raise error(violations[0])
    if violations:
        listed = "".join(f"\n  {number}. {text}" for number, text in enumerate(violations, 1))
        raise error(f"{len(violations)} settings cannot stand:{listed}")
