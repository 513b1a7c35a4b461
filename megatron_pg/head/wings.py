"""The interfaces between the plain head and its wings: a teacher, kept sets, and products that leave no logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megatron_pg.head.factor_gradients import FactorGradients
from megatron_pg.head.vocabulary_shard import Incoming, LogitRows, RowStatistics, VocabularyShard

KeepOnly = Callable[[Tensor, slice, VocabularyShard], None]
"""A function that fills the logits [rows, v/tp] of some rows with minus infinity outside of their kept sets, in place."""
TeacherGradient = Callable[[Tensor, torch.dtype], Tensor]
"""A function of a gradient [rows] to the divergence and a dtype: the gradient [rows, v/tp] to the student's logits, which
must still be there."""


class Chunk(Protocol):
    """The first product of some rows: their logits, or a stand-in for them."""

    def statistics(self) -> RowStatistics:
        """Compute the statistics over the whole vocabulary; every tensor-parallel rank must call."""

    def add_gradient(
        self,
        gradients: FactorGradients,
        statistics: RowStatistics,
        incoming: Incoming,
        more: Tensor | None,
    ) -> None:
        """Overwrite the chunk with the gradient of its logits, and add the two products of that to `gradients`.

        `more`, of a teacher, is added to the gradient, [rows, v/tp] in the dtype of the hidden states.
        """


class FirstProduct(Protocol):
    """A first product that takes the place of hidden states times weight."""

    def padded(self, rows: int) -> int:
        """Return the rows of the buffer that so many rows take up."""

    def first_product(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, place: slice, buffer: Tensor
    ) -> Chunk:
        """Multiply hidden states [rows, hidden], at `place` among all tokens, into the front of `buffer` [padded rows, v/tp]."""


class Teacher(Protocol):
    """A teacher of all tokens of a call."""

    def on(
        self, student: LogitRows, statistics: RowStatistics, rows: slice
    ) -> tuple[Tensor, TeacherGradient]:
        """Return the divergence [rows] from the student's logits of `rows`; every tensor-parallel rank must call."""


class RowSets(Protocol):
    """The kept sets of rows of logits."""

    def logits_in(self, logits: Tensor) -> Tensor:
        """Return the logits of the sets [elements] out of all of them, [tokens, v/tp]."""

    def local_statistics(self, logits: Tensor) -> Tensor:
        """Return the statistics [tokens, 4] of this shard's part of each set."""

    def add_gradient(
        self,
        logits: Tensor,
        statistics: RowStatistics,
        incoming: Incoming,
        row_mask: Tensor | None,
        out: Tensor,
    ) -> None:
        """Add the gradient of the sets' logits to `out` [tokens, v/tp]."""
