"""From the values of tokens to the (numerator, denominator) pairs that a micro-batch reports: one sum, and one gather."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.loss.checksum import CHECKSUMS
from megatron_pg.loss.weights import MicroBatchWeights
from megatron_pg.step.batch import to_device


@dataclass(frozen=True, eq=False)
class MetricTable:
    """How the pairs of a micro-batch are made of sums over its tokens: everything in one sum, and the pairs in one gather."""

    reported: tuple[str, ...]
    """Numbers of the whole micro-batch, such as the loss, whose denominators add up to 1 over the step."""
    rows: tuple[tuple[str, str | None], ...]
    """(name, kind) of the metrics of tokens; kind None for one whose fields the samples lack, a pair of zeros."""
    is_checked: bool
    """Whether the weights of the loss are known, for the checksum."""
    has_sequences: bool = False
    """Whether a "ratio sum" is over sequences, and not over tokens."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the pairs, in order."""
        checks = CHECKSUMS if self.is_checked else ()
        return (*self.reported, *checks, *(name for name, _ in self.rows))

    @functools.cached_property
    def present(self) -> tuple[tuple[str, str], ...]:
        """The rows that there are values of."""
        return tuple((name, kind) for name, kind in self.rows if kind is not None)

    @property
    def columns(self) -> list[str]:
        """The rows of weights that values are summed with."""
        return (["documents", "tokens"] + ["sequences"] * self.has_sequences) if self.rows else []

    def layout(self, device: torch.device) -> Tensor:
        """Where numerator and denominator of each name lie among what `pairs` adds up, [names, 2] int64."""
        return _layout(self, device)

    def pairs(
        self,
        weights: MicroBatchWeights,
        reported: Iterable[Tensor],
        values: Tensor | None,
        layout: Tensor,
    ) -> Tensor:
        """The pairs [names, 2] float64, detached.

        Args:
            weights: of the micro-batch.
            reported: 0-d each, as the names of `reported`.
            values: [rows, window] float64, as `present`; None without metrics.
            layout: see `layout`.
        """
        parts, of = [], weights.of_tokens
        if values is not None:
            columns = torch.stack([of[name] for name in self.columns], dim=1)
            # [rows, window] @ [window, columns]
            parts += [(values @ columns).flatten(), columns[:, :2].sum(0)]
        if self.is_checked:
            parts.append(weights.checks(weights.checked().sum(1)))
        # A copy: Megatron rescales the returned loss in place, and a view of it with it.
        parts.append(torch.stack([value.detach() for value in reported]).double())
        parts += [weights.share, weights.share.new_zeros(1)]
        return torch.cat(parts)[layout]


@functools.cache
def _layout(table: MetricTable, device: torch.device) -> Tensor:
    columns = table.columns
    made_of: list[object] = [(name, column) for name, _ in table.present for column in columns]
    made_of += [
        *columns[:2],
        *CHECKSUMS[: 3 * table.is_checked],
        *table.reported,
        "share",
        "nothing",
    ]
    place = {name: index for index, name in enumerate(made_of)}
    pairs: list[tuple[object, object]] = [
        (name, "share") for name in (*table.reported, *CHECKSUMS[: 3 * table.is_checked])
    ]
    for name, kind in table.rows:
        if kind is None:
            pairs.append(("nothing", "nothing"))
        elif kind == "mean":
            pairs.append(((name, "documents"), "documents"))
        elif kind == "token mean":
            pairs.append(((name, "tokens"), "tokens"))
        else:
            pairs.append(((name, columns[-1] if kind == "ratio sum" else "tokens"), "share"))
    return to_device(torch.tensor([[place[name] for name in pair] for pair in pairs]), device)
