"""The output layer over the kept tokens of each row alone: as many products of two vectors as there are pairs.

The sizes of the sets, which the host knows, decide which rows take it: a pair of the sparse layer costs what
`_COLUMNS_OF_A_PAIR` columns of a row cost in the dense one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.backend import choose
from megatron_pg.head.factor_gradients import FactorGradients
from megatron_pg.head.from_logits import refuse_second_derivative
from megatron_pg.head.kept import pairs_torch
from megatron_pg.head.kept.sets import KeptPairs, kept_gradient
from megatron_pg.head.output_layer import HeadOptions, OutputLayer
from megatron_pg.head.ragged import Ragged
from megatron_pg.head.rows_torch import combine_statistics
from megatron_pg.head.vocabulary_shard import RowStatistics

_COLUMNS_OF_A_PAIR = 300
"""Measured on an H200: sets of 508 ids cost what 151936 columns cost (docs/kept_set.md)."""
_LEAST_DENSE_ROWS = 256
"""A dense product of fewer rows costs as much: the weight is read as a whole."""


def pair_products(hidden: Tensor) -> ModuleType:
    """Return `pairs_triton` or `pairs_torch`."""
    return choose("kept.pairs_triton", pairs_torch, hidden)


def split_rows(
    kept: Ragged, local_columns: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the rows [sparse] and [dense], int64 on the host, of the two layers; the same on every tensor-parallel rank.

    Rows without a set are dense. So are the rows that cost less there, if they do so together.
    """
    columns = local_columns * (1 if group is None else dist.get_world_size(group))
    sizes, limit = kept.sizes, columns / _COLUMNS_OF_A_PAIR
    is_dense = sizes > limit
    if int(sizes[is_dense].sum()) < limit * max(int(is_dense.sum()), _LEAST_DENSE_ROWS):
        is_dense = torch.zeros_like(is_dense)
    is_dense |= sizes == 0
    return (~is_dense).nonzero()[:, 0], is_dense.nonzero()[:, 0]


def sparse_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions, kept: Ragged
) -> tuple[Tensor, Tensor]:
    """Do the work of `linear_log_probs_and_entropy` for rows that all have a set; the logits of the pairs are held."""
    layer = OutputLayer(hidden, weight, targets, options)
    pairs = KeptPairs.build(kept, layer.targets, layer.shard, layer.temperature)
    return SparseLogProbs.apply(hidden, weight, pairs)  # type: ignore


class SparseLogProbs(torch.autograd.Function):
    """Log-probabilities and entropy of the kept columns; the gradients of both factors wait for backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, pairs: KeptPairs
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logits = pair_products(hidden).pair_logits(hidden, weight, pairs)
        local = pairs.local_statistics(logits)
        statistics = combine_statistics(local, pairs.shard, pairs.temperature)
        ctx.pairs, ctx.parameter = pairs, weight  # saved, it may come back without its `main_grad`
        ctx.save_for_backward(hidden, weight, logits, *statistics.kept())
        return statistics.log_probs, statistics.entropy

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_log_probs_and_entropy")
        if all(gradient is None for gradient in incoming):
            return (None,) * 3
        hidden, _, logits, *statistics = ctx.saved_tensors
        gradient = kept_gradient(logits, ctx.pairs, RowStatistics(*statistics), incoming)
        gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad[:2], final=True)
        products = pair_products(hidden)
        if gradients.hidden is not None:
            products.write_hidden_gradient(gradient, ctx.parameter, ctx.pairs, gradients.hidden)
        if gradients.needs_weight:
            total, is_begun = gradients.weight_sum()
            products.add_weight_gradient(
                gradient, hidden, ctx.pairs, total if is_begun else total.zero_()
            )
        return (*gradients.finish(), None)
