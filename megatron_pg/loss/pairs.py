"""From the values of tokens to the (numerator, denominator) pairs that a micro-batch reports."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_pg.loss.checksum import CHECKSUMS
from megatron_pg.loss.weights import COUNTS, Weights
from megatron_pg.step.batch import to_device

Kind = Literal["mean", "token mean", "sum", "ratio sum", "sequence sum", "absent"]
"""Reduction of the values of tokens to a number: a mean over documents or over active tokens, a sum over active tokens or over
sequences, or nothing, where the samples lack the fields that the values are made of."""
NUMERATOR_WEIGHTS = {
    "mean": "document",
    "token mean": "active",
    "sum": "active",
    "ratio sum": "active",
    "sequence sum": "sequence",
}
DENOMINATORS = {"mean": "document", "token mean": "active", "absent": "nothing"}
"""The denominator by kind; that of a sum is the share of the report."""


@dataclass(frozen=True)
class PairTable:
    """The pairs of a micro-batch by name, and the sums over its tokens that they are made of.

    Equal by value: settings of which a coefficient alone differs, from step to step, share one.
    """

    reported: tuple[str, ...]
    """Numbers of the whole micro-batch, such as the loss; their denominators add up to 1 over the step."""
    rows: tuple[tuple[str, Kind], ...]
    """The metrics of tokens by name."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the pairs, in order."""
        return (*self.reported, *CHECKSUMS, *(name for name, _ in self.rows))

    @functools.cached_property
    def present(self) -> tuple[tuple[str, Kind], ...]:
        """The metrics that there are values of."""
        return tuple((name, kind) for name, kind in self.rows if kind != "absent")

    def sums(self, values: Mapping[str, Tensor], weights: Weights, loss_mask: Tensor) -> Tensor:
        """Add up the metrics and their denominators over this rank's window, float64.

        Args:
            values: the metrics in `present`, [window] each, read at active tokens alone.
            weights: the weights of the tokens.
            loss_mask: [window] bool.
        """
        by_name = {
            "document": weights.document,
            "sequence": weights.sequence,
            "active": loss_mask.double(),
        }
        # `where`, since 0 * NaN is NaN. Row by row, so that a compiler writes no row to memory.
        rows = [
            torch.where(loss_mask, values[name].double(), 0.0) * by_name[NUMERATOR_WEIGHTS[kind]]
            for name, kind in self.present
        ]
        return torch.stack([*rows, by_name["document"], by_name["active"]]).sum(1)

    def pairs(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the pairs together, [names, 2] float64.

        Args:
            parts: float64, one after the other: the checksums, the result of `sums`, the terms in the order of `reported`,
                and the counts in the order of `Counts`.
        """
        return torch.cat(list(parts))[_layout(self, parts[0].device)]


def checksums(weights: Weights, positions: Tensor) -> Tensor:
    """Add up this rank's part of the three checksums, [3] float64.

    Args:
        weights: the weights of the tokens.
        positions: [window] float64, the numbers of the tokens' positions.
    """
    identified = weights.identified * positions
    rows = [
        weights.loss * weights.checksum_scale,
        identified * weights.samples_scale,
        identified * weights.ranks_scale,
    ]
    return torch.stack(rows).sum(1) + weights.checksum_offset


@functools.cache
def _layout(table: PairTable, device: torch.device) -> Tensor:
    """Place numerator and denominator of each name in what `PairTable.pairs` lays end to end, [names, 2] int64."""
    names = [name for name, _ in table.present]
    laid = (*CHECKSUMS, *names, "document", "active", *table.reported, *COUNTS)
    place = {name: index for index, name in enumerate(laid)}
    pairs = [(name, "share") for name in (*table.reported, *CHECKSUMS)]
    for name, kind in table.rows:
        numerator = "nothing" if kind == "absent" else name
        pairs.append((numerator, DENOMINATORS.get(kind, "share")))
    return to_device(torch.tensor([[place[name] for name in pair] for pair in pairs]), device)
