"""Settings dataclasses: fields read off annotations, their flags and help texts, and the check of their values."""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import math
import numbers
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from megatron_pg.config.removed import add_removed_flags, refusal_of_removed
from megatron_pg.config.rows import TABLES, did_you_mean


@dataclass(frozen=True)
class Interval:
    """The finite numbers above `lower` (from it on, if closed) and up to `upper`; whole ones for an int field."""

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


FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest normal and the largest positive number of float32, in which the loss is computed."""
COUNT = Interval(1, closed=True, metavar="N")
"""An integer from 1 on."""
PYTHON_ONLY = "python only"
"""Mark of a field without a flag."""


class Field:
    """One setting of a dataclass, read off its annotation."""

    def __init__(self, name: str, default: Any, hint: Any) -> None:
        hint, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        hint = next(part for part in parts if part is not NoneType)
        self.name, self.default, self.is_optional = name, default, NoneType in parts
        self.words = get_args(hint) if get_origin(hint) is Literal else None
        self.type: Any = str if self.words else get_origin(hint) or hint
        self.interval = next((note for note in notes if isinstance(note, Interval)), None)
        self.has_flag = PYTHON_ONLY not in notes
        self.flag = flag_of(name) if self.has_flag else name

    @property
    def choices(self) -> tuple[str, ...] | None:
        """Words that it may be, of a `Literal` or of a table of rows."""
        return tuple(TABLES[self.name]) if self.name in TABLES else self.words

    def violation(self, value: Any) -> str | None:
        """Return what is wrong with a value by itself, None where nothing is."""
        is_checked = self.has_flag or self.interval is not None
        if not is_checked or (value is None and self.is_optional):
            return None
        if self.choices is not None:
            valid, expected = value in self.choices, "one of " + ", ".join(self.choices)
        elif self.type is bool:
            valid, expected = isinstance(value, bool), "True or False"
        elif self.type is tuple:
            valid = isinstance(value, tuple) and all(isinstance(part, str) for part in value)
            expected = "a sequence of words"
        elif self.interval is None:
            valid, expected = isinstance(value, str) and bool(value), "a path, such as pkg.mod.fn"
        elif self.type is int:
            valid = isinstance(value, numbers.Integral) and self.interval.contains(value)
            expected = f"an integer {self.interval}"
        else:
            valid, kind = self.interval.contains(value), "a finite number"
            expected = f"{'a number or inf' if self.interval.or_infinite else kind} {self.interval}"
            if valid and not (FLOAT32[0] <= abs(value) <= FLOAT32[1] or value in (0, math.inf)):
                valid, expected = False, f"{expected} that float32 holds"
        if valid:
            return None
        return f"{self.flag} must be {expected}; found {value!r}{self.did_you_mean(value)}"

    def did_you_mean(self, value: Any) -> str:
        """Return what to do instead of a removed word, or a hint at the nearest right one, or ""."""
        if removed := refusal_of_removed(f"{self.flag} {value}"):
            return f"; {removed}"
        other_names = TABLES[self.name].also_known_as if self.name in TABLES else {}
        return did_you_mean(value, self.choices or (), other_names)

    def word(self, text: str) -> str:
        """Parse one of the choices."""
        choices, hint = self.choices or (), self.did_you_mean(text)
        if text in choices or not hint:
            return text  # argparse itself lists the words
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}{hint}")

    def argparse_keywords(self, text: str) -> dict[str, Any]:
        """Return the arguments of `add_argument` for the flag, `text` its help."""
        rows = TABLES[self.name].values() if self.name in TABLES else ()
        text = " ".join([text, *(f"{row.name}: {row.help}." for row in rows)]).replace("%", "%%")
        if self.type is bool:
            return {"action": "store_true", "help": text}
        default = None if self.default in (MISSING, ()) else self.default
        if default is not None:
            text += f" (default: {default})"
        keywords: dict[str, Any] = {"default": default, "help": text}
        if self.choices is not None:
            return keywords | {"type": self.word, "choices": self.choices}
        if self.interval is not None:
            return keywords | {"type": self.type, "metavar": self.interval.metavar}
        return keywords | {"metavar": "PATH"} | ({"nargs": "+"} if self.type is tuple else {})


def flag_of(name: str) -> str:
    """Return the flag that stores to an attribute."""
    return "--" + name.replace("_", "-")


def fields_of(settings: Any) -> dict[str, Field]:
    """Return the fields of a settings dataclass, by name and in order.

    The annotation is bool, `Literal` words, `Annotated[float, Interval(...)]`, `Annotated[int, COUNT]`, a tuple of words,
    or str, an import path or a word of the table of that name (`TABLES`); `| None` allows None.
    """
    if settings not in _fields:
        hints = get_type_hints(settings, include_extras=True)
        fields = [field for field in dataclasses.fields(settings) if field.init]
        _fields[settings] = {f.name: Field(f.name, f.default, hints[f.name]) for f in fields}
    return _fields[settings]


_fields: dict[Any, dict[str, Field]] = {}


class Settings:
    """Base of a frozen dataclass that refuses wrong values. The docstring under a field is its flag's help text.

    A method `conflicts(given)` yields the faults between settings, each valid by itself; `given` has invalid values too.
    """

    def __new__(cls, *_: object, **given: object) -> Self:
        """Refuse removed settings by name, which `__init__` does not have."""
        refuse([text for name in given if (text := refusal_of_removed(flag_of(name)))])
        return object.__new__(cls)

    def __post_init__(self) -> None:
        refuse(self.checked(vars(self))[0])

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> tuple[list[str], Self]:
        """Return the violations of values by field name, and the dataclass with defaults for those wrong or absent."""
        violations, sound = [], object.__new__(cls)
        for field in fields_of(cls).values():
            value = given.get(field.name, field.default)
            violation = field.violation(None if value is MISSING else value)
            if violation is not None:
                violations.append(violation)
                value = field.default
            vars(sound)[field.name] = value
        for base in reversed(cls.__mro__):
            if "conflicts" in vars(base):
                violations += vars(base)["conflicts"](sound, given)
        return violations, sound

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Make the dataclass from parsed arguments; a field whose flag the parser did not define keeps its default."""
        arguments, values = vars(args), {}
        for field in fields_of(cls).values():
            if field.name in arguments or field.default is MISSING:
                value = arguments.get(field.name)
                values[field.name] = tuple(value or ()) if field.type is tuple else value
        return cls(**values)


def add_args(
    parser: argparse.ArgumentParser,
    settings: type[Any],
    *,
    title: str,
    description: str = "",
    unset: tuple[str, ...] = (),
) -> argparse.ArgumentParser:
    """Add one flag for each field of a settings dataclass to a parser, in a group of their own.

    A flag that the parser has already (Megatron's `--calculate-per-token-loss`, a trainer's `--eps-clip`) is left as it
    is: its value lands in the same attribute. Flags of `unset` have no default, which shows if they were given.
    Removed flags are refused with what to do instead.
    """
    add_removed_flags(parser)
    fields = [field for field in fields_of(settings).values() if field.has_flag]
    missing = [field for field in fields if not is_defined(parser, field.name)]
    if missing:
        texts, group = field_docstrings(settings), parser.add_argument_group(title, description)  # type: ignore[arg-type]
        for field in missing:
            keywords = field.argparse_keywords(texts.get(field.name, ""))
            keywords |= {"default": None} if field.name in unset else {}
            group.add_argument(field.flag, **keywords)
    return parser


def is_defined(parser: argparse.ArgumentParser, name: str) -> bool:
    """Return whether the parser has the flag of a field already; refuse one that stores to another attribute."""
    flag = flag_of(name)
    action = parser._option_string_actions.get(flag)
    if action is not None and action.dest != name:
        raise ValueError(
            f"{flag} is already a flag of this parser and stores to {action.dest!r}; expected {name!r}: give that flag another "
            f"name, or dest={name!r}"
        )
    return action is not None


@functools.cache
def field_docstrings(settings: type[Any]) -> dict[str, str]:
    """Return the docstring under each field, on one line; none where there is no source."""
    texts = {}
    for base in settings.__mro__[:-1]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except OSError:
            continue
        for field, text in itertools.pairwise(tree.body[0].body):  # type: ignore[attr-defined]
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def refuse(violations: Sequence[str], *, error: type[Exception] = ValueError) -> None:
    """Raise one error with every violation; return where there is none."""
    if len(violations) == 1:
        raise error(violations[0])
    if violations:
        listed = "".join(f"\n  {number}. {text}" for number, text in enumerate(violations, 1))
        raise error(f"{len(violations)} settings cannot stand:{listed}")
