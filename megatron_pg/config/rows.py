"""Tables of rows: everything that a setting chooses by name, each row with its properties beside it.

An aggregation, an objective, a correction is one row beside its formula in `megatron_pg/loss`, which fills the tables.
Flags, help texts, required inputs, refusals, metric names, the fused head and the tables of the docs read the row.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True)
class Row:
    """A name, its text, and its demands on the samples and on other settings."""

    name: str
    formula: str
    about: str = ""
    """Meaning of the formula's letters, and its source."""
    inputs: tuple[str, ...] = ()
    """Optional fields of `Sample` that every sample must fill; `ANCHOR` is the one in the ratio's denominator."""
    options: tuple[str, ...] = ()
    """Settings that only rows which name them read: with another row they are refused."""
    needs: tuple[str, ...] = ()
    """The options that must be given."""
    flag: str = ""
    """Name of the row in errors, a format of `config`; "" for the table's flag with the row's name."""
    when: Callable[[Any], bool] | None = None
    """Condition on a config for the row to be on, beside its name in the table's setting."""
    sequence_sums: tuple[str, ...] = ()
    """Sums over whole sequences that it needs, of "policy" (log r), "clipped_policy" (log r clipped as its token's
    advantage says) and "mismatch" (old_log_prob - rollout_log_prob)."""
    is_sum_over_tokens: bool = False
    """A token's gradient depends on that token and `sequence_sums` only: the fused head may work
    chunk by chunk."""

    @property
    def help(self) -> str:
        """Part of the flag's help text."""
        return f"{self.formula}, {self.about}" if self.about else self.formula

    def refusals(self, config: Any) -> list[str]:
        """Return the faults of a config with this row, beyond `options` and `needs`."""
        return []

    def unread_settings(self, config: Any) -> tuple[str, ...]:
        """Return the settings that this row does not read under a config, though other rows of its table do."""
        return ()


ANCHOR = "anchor_log_probs"
"""Name in `Row.inputs` of the log-probs that `--ratio-anchor` chooses."""

RowType = TypeVar("RowType", bound=Row)
F = TypeVar("F", bound=Callable[..., Any])


class Table(dict[str, RowType]):
    """Rows by name, in the order in which they were added.

    Args:
        field: the setting that chooses a row, or a name for rows that each have a flag of their own.
        replaced_by: the setting that, where given, takes the place of any row.
        also_known_as: a row's name by a name that people give it, for hints in errors.
    """

    def __init__(
        self,
        field: str,
        *,
        replaced_by: str | None = None,
        also_known_as: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.field, self.replaced_by, self.also_known_as = field, replaced_by, also_known_as
        TABLES[field] = self

    def add(self, *rows: RowType) -> None:
        """Add rows; refuse a name that is taken."""
        for row in rows:
            if row.name in self:
                raise ValueError(f"there is a row {row.name!r} already: give this one another name")
            self[row.name] = row

    def decorator(self, row_type: Callable[..., RowType]) -> Callable[..., Callable[[F], F]]:
        """Return a decorator `(formula, **properties)` that enters a function as a row, under its own name."""

        def of_row(formula: str, **properties: Any) -> Callable[[F], F]:
            def enter(function: F) -> F:
                name = function.__name__
                self.add(row_type(name=name, formula=formula, function=function, **properties))
                return function

            return enter

        return of_row

    def rows_on(self, config: Any) -> list[RowType]:
        """Return the rows that are on under a config, in the table's order."""
        if self.is_replaced(config):
            return []
        chosen = getattr(config, self.field, None)
        rows = self.values() if chosen is None else [self[chosen]]
        return [row for row in rows if row.when is None or row.when(config)]

    def is_replaced(self, config: Any) -> bool:
        """Return whether a function of the user's own takes the place of the rows."""
        return self.replaced_by is not None and getattr(config, self.replaced_by) is not None

    def flag_of_row(self, row: Row, config: Any = None) -> str:
        """Return the flags that turn a row on, for error messages."""
        return row.flag.format(config=config) or f"--{self.field.replace('_', '-')} {row.name}"

    def switch_of_row(self, row: Row) -> str:
        """Return the flags that turn a row on, without a config's value."""
        return row.flag.partition(" {")[0]


TABLES: dict[str, Table[Any]] = {}
"""Every table, by its field."""


def did_you_mean(
    word: object, known: Iterable[str], also_known_as: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return `; did you mean X?` with the known word nearest to `word`, or "" where none is near."""
    names = {name.lower(): name for name in known} | dict(also_known_as)
    nearest = difflib.get_close_matches(str(word).lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[nearest[0]]}?" if nearest else ""
