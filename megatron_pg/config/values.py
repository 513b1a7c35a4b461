"""Valid values of settings, and the text of errors about invalid ones."""

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest normal and the largest positive number of float32, in which the loss is computed."""


@dataclass(frozen=True)
class Interval:
    """Finite numbers above `lower` (or equal to it if closed) and up to `upper`."""

    lower: float
    upper: float = math.inf
    closed: bool = False
    metavar: str = "X"
    or_infinite: bool = False
    """Whether infinity is valid, for a bound that can be turned off."""

    def contains(self, value: Any) -> bool:
        """Return whether a value is a number in the interval."""
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return False
        number: Any = value  # not converted: an integer may exceed every float
        above = number >= self.lower if self.closed else number > self.lower
        return bool(above and number <= self.upper and (number < math.inf or self.or_infinite))

    def expected(self, value: Any, *, whole: bool) -> str:
        """Return what an invalid value must be, or "" for a valid one."""
        is_right = self.contains(value) and (not whole or isinstance(value, numbers.Integral))
        kind = "a number or inf" if self.or_infinite else "a finite number"
        text = f"{'an integer' if whole else kind} {self}"
        if whole or not is_right:
            return "" if is_right else text
        is_held = FLOAT32[0] <= abs(value) <= FLOAT32[1] or value in (0, math.inf)
        return "" if is_held else f"{text} within float32's range"

    def __str__(self) -> str:
        text = f"{'>=' if self.closed else '>'} {self.lower:g}"
        return text if math.isinf(self.upper) else f"{text} and <= {self.upper:g}"


ABOVE_0, FROM_0 = Interval(0), Interval(0, closed=True)
COUNT = Interval(1, closed=True, metavar="N")
"""An integer of at least 1."""


def expected(value: Any, kind: type[Any], choices: Sequence[str], interval: Interval | None) -> str:
    """Return what a setting's invalid value must be, or "" for a valid one."""
    if choices:
        return "" if value in choices else "one of " + ", ".join(choices)
    if kind is bool:
        return "" if isinstance(value, bool) else "True or False"
    if kind is tuple:
        is_right = isinstance(value, tuple) and all(isinstance(part, str) for part in value)
        return "" if is_right else "a sequence of words"
    if interval is not None:
        return interval.expected(value, whole=kind is int)
    return "" if isinstance(value, str) and value else "a path, such as pkg.mod.fn"


def did_you_mean(
    word: object, known: Iterable[str], also_known_as: Mapping[str, str] | None = None
) -> str:
    """Return `. Did you mean X?` with the known word nearest to `word`, or "" if none is near."""
    names = {name.lower(): name for name in known} | dict(also_known_as or {})
    nearest = difflib.get_close_matches(str(word).lower(), names, n=1, cutoff=0.6)
    return f". Did you mean {names[nearest[0]]}?" if nearest else ""


def flag_of(name: str) -> str:
    """Return the flag that stores to an attribute."""
    return "--" + name.replace("_", "-")


def refuse(violations: Sequence[str], *, error: type[Exception] = ValueError) -> None:
    """Raise one error with all violations, or return if there is none."""
    if len(violations) == 1:
        raise error(violations[0])
    if violations:
        listed = "".join(f"\n  {number}. {text}" for number, text in enumerate(violations, 1))
        raise error(f"{len(violations)} invalid settings:{listed}")
