"""From the values of tokens to the (numerator, denominator) pairs that a micro-batch reports: one sum, and one gather."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.loss.checksum import CHECKSUMS
from megatron_pg.loss.weights import SCALARS, MicroBatchWeights
from megatron_pg.step.batch import to_device


@dataclass(frozen=True)
class MetricTable:
    """How the pairs of a micro-batch are made of sums over its tokens: sums of all at once, and one gather.

    Equal by value: settings of which a coefficient alone differs, from step to step, share one.
    """

    reported: tuple[str, ...]
    """Numbers of the whole micro-batch, such as the loss, whose denominators add up to 1 over the step."""
    rows: tuple[tuple[str, str | None], ...]
    """(name, kind) of the metrics of tokens; kind None for one whose fields the samples lack, a pair of zeros."""
    has_sequences: bool = False
    """Whether a "ratio sum" is over sequences, and not over tokens."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the pairs, in order."""
        return (*self.reported, *CHECKSUMS, *(name for name, _ in self.rows))

    @functools.cached_property
    def present(self) -> tuple[tuple[str, str], ...]:
        """The rows that there are values of."""
        return tuple((name, kind) for name, kind in self.rows if kind is not None)

    @property
    def columns(self) -> list[str]:
        """The rows of weights that values are summed with."""
        return (["documents", "tokens"] + ["sequences"] * self.has_sequences) if self.rows else []

    def layout(self, device: torch.device) -> Tensor:
        """Where numerator and denominator of each name lie in what `parts` lays end to end, [names, 2] int64."""
        return _layout(self, device)

    def parts(
        self, weights: MicroBatchWeights, reported: Mapping[str, Tensor], values: Tensor | None
    ) -> list[Tensor]:
        """All that the pairs are made of, 1-d float64 each.

        Args:
            weights: of the micro-batch.
            reported: 0-d each, by the names of `reported`.
            values: [rows, window] float64, as `present`; None without metrics.
        """
        found, of = [], weights.of_tokens
        if values is not None:
            columns = torch.stack([of[name] for name in self.columns], dim=1)
            found.append((values @ columns).flatten())
        return [*found, weights.sums()] + [
            reported[name].detach().double().reshape(1) for name in self.reported
        ]

    def pairs(self, weights: MicroBatchWeights, parts: Iterable[Tensor]) -> Tensor:
        """The pairs [names, 2] float64 of `parts`: a copy, as Megatron rescales the returned loss in place."""
        layout = self.layout(weights.scalars.device)
        return torch.cat([*parts, weights.scalars])[layout]


@functools.cache
def _layout(table: MetricTable, device: torch.device) -> Tensor:
    made_of: list[object] = [(name, of) for name, _ in table.present for of in table.columns]
    made_of += [*table.columns[:2], *CHECKSUMS, *table.reported, *SCALARS]
    place = {name: index for index, name in enumerate(made_of)}
    pairs: list[tuple[object, object]] = [(name, "share") for name in table.reported + CHECKSUMS]
    for name, kind in table.rows:
        if kind is None:
            pairs.append(("nothing", "nothing"))
        elif kind == "mean":
            pairs.append(((name, "documents"), "documents"))
        elif kind == "token mean":
            pairs.append(((name, "tokens"), "tokens"))
        else:
            of = table.columns[-1] if kind == "ratio sum" else "tokens"
            pairs.append(((name, of), "share"))
    return to_device(torch.tensor([[place[name] for name in pair] for pair in pairs]), device)
