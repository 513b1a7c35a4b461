"""Tables of rows: everything that a setting chooses by name, each row with its properties beside it.

An aggregation, an objective, a correction is one row, defined beside its formula in `megatron_pg/loss`. Whatever depends
on a property reads the row: the flag's words and help text, required inputs, refusals, metric names, what may go through the
fused head, the tables of the docs. The tables are declared here, below everything that reads them, and filled when
`megatron_pg` is imported.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row has: a name, a text, and what it asks of the samples and of other settings."""

    name: str
    formula: str
    about: str = ""
    """What its letters mean, and its source."""
    inputs: tuple[str, ...] = ()
    """Optional fields of `Sample` that every sample must fill; `ANCHOR` for the one that the ratio is taken against."""
    options: tuple[str, ...] = ()
    """Settings that only rows which name them read: given with another row, they are refused."""
    needs: tuple[str, ...] = ()
    """The options that must be given."""
    flag: str = ""
    """What errors call the row by, a format of `config`; "" for the table's flag with the row's name."""
    when: Callable[[Any], bool] | None = None
    """What must hold of a config for the row to be on, besides that its table's setting, where there is one, names it."""

    sequence_sums: tuple[str, ...] = ()
    """What it needs summed over whole sequences, of "policy" (log r), "clipped_policy" (log r clipped as its token's
    advantage says) and "mismatch" (old_log_prob - rollout_log_prob)."""
    is_sum_over_tokens: bool = False
    """Whether it treats every token by that token's data and the sums over sequences that it asks for alone, so that the
    token's gradient is known as soon as its log-prob, or those of its sequence, are. Asked of objectives and corrections."""

    @property
    def help(self) -> str:
        """Its part of the flag's help text."""
        return f"{self.formula}, {self.about}" if self.about else self.formula

    def refusals(self, config: Any) -> list[str]:
        """What is wrong with a config under which the row is on, beyond `options` and `needs`."""
        return []

    def unread_settings(self, config: Any) -> tuple[str, ...]:
        """Settings with a value of their own that the row does not read under a config, though others of its table do."""
        return ()

    def sums_over_sequences(self) -> tuple[str, ...]:
        """`sequence_sums`, and what follows from other properties."""
        return self.sequence_sums


ANCHOR = "anchor_log_probs"
"""What `Row.inputs` call the log-probs in the denominator of the ratio, which `--ratio-anchor` chooses."""

RowType = TypeVar("RowType", bound=Row)
F = TypeVar("F", bound=Callable[..., Any])


class Table(dict[str, RowType]):
    """Rows by name, in the order in which they were added.

    Args:
        field: the setting that chooses a row, or what the rows are called where each has a flag of its own.
        replaced_by: the setting that, where given, takes the place of any row.
        also_known_as: other names that people give; they lead to a row's name in an error, and choose nothing.
    """

    def __init__(
        self,
        field: str,
        *,
        replaced_by: str | None = None,
        also_known_as: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.field = field
        self.replaced_by = replaced_by
        self.also_known_as = also_known_as
        TABLES[field] = self

    def __setitem__(self, name: str, row: RowType) -> None:
        super().__setitem__(name, row)
        _forget()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        _forget()

    def add(self, *rows: RowType) -> None:
        """Adds rows.

        Raises:
            ValueError: a name is taken.
        """
        for row in rows:
            if row.name in self:
                raise ValueError(f"there is a row {row.name!r} already: give this one another name")
            self[row.name] = row

    def decorator(self, row_type: Callable[..., RowType]) -> Callable[..., Callable[[F], F]]:
        """A decorator `(formula, **properties)` that enters a function as a row, under its own name."""

        def row(formula: str, **properties: Any) -> Callable[[F], F]:
            def enter(function: F) -> F:
                name = function.__name__
                self.add(row_type(name=name, formula=formula, function=function, **properties))
                return function

            return enter

        return row

    def rows_on(self, config: Any) -> list[RowType]:
        """The rows that are on under a config, in the table's order."""
        if self.is_replaced(config):
            return []
        chosen = getattr(config, self.field, None)
        rows = self.values() if chosen is None else [self[chosen]]
        return [row for row in rows if row.when is None or row.when(config)]

    def is_replaced(self, config: Any) -> bool:
        """Whether a function of the user's own takes the place of the rows."""
        return self.replaced_by is not None and getattr(config, self.replaced_by) is not None

    def flag_of_row(self, row: Row, config: Any = None) -> str:
        """The flags that turn a row on, for error messages."""
        return row.flag.format(config=config) or f"--{self.field.replace('_', '-')} {row.name}"

    def switch_of_row(self, row: Row) -> str:
        """The flags that turn a row on, without the value that a config would fill in."""
        return row.flag.partition(" {")[0]


TABLES: dict[str, Table[Any]] = {}
"""Every table, by its field."""
_read_off_rows: list[Any] = []


def read_off_rows(function: F) -> F:
    """A decorator: the function of a config, asked once for each as long as no table changes."""
    cached: Any = functools.lru_cache(maxsize=64)(function)
    _read_off_rows.append(cached)
    return cached  # type: ignore[no-any-return]


def _forget() -> None:
    for cached in _read_off_rows:
        cached.cache_clear()


def did_you_mean(
    word: object, known: Iterable[str], also_known_as: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The hint `; did you mean X?` with the known word nearest to what was given; "" where none is near."""
    text = str(word).lower()
    names = {name.lower(): name for name in known} | dict(also_known_as)
    found = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    return f"; did you mean {names[found[0]]}?" if found else ""
