"""The output layer over only each row's kept tokens, one product of two vectors per pair."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.backend import choose
from megatron_pg.head.centering import Centering
from megatron_pg.head.factor_gradients import FactorGradients
from megatron_pg.head.from_hidden import linear_log_probs
from megatron_pg.head.from_logits import refuse_second_derivative
from megatron_pg.head.kept import sets
from megatron_pg.head.kept.sets import KeptPairs, check_rows, keep_only, kept_gradient
from megatron_pg.head.output_layer import Factors, HeadOptions, OutputLayer
from megatron_pg.head.ragged import Ragged, to_device
from megatron_pg.head.rows_torch import combine_statistics, wide_dtype
from megatron_pg.head.vocabulary_shard import RowStatistics

_COLUMNS_OF_A_PAIR = 300
"""The columns that cost as much as a pair. On an H200, sets of 508 ids cost as much as 151936
columns (docs/kept_set.md)."""
_LEAST_DENSE_ROWS = 256
"""A dense product of fewer rows costs as much, because it reads the whole weight."""


def split_rows(
    kept: Ragged, local_columns: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the rows [sparse] and [dense], int64 on the host. Rows without a set, or with a set
    that costs more, are dense.
    """
    columns = local_columns * (1 if group is None else dist.get_world_size(group))
    sizes, limit = kept.sizes, columns / _COLUMNS_OF_A_PAIR
    is_dense = sizes > limit
    if int(sizes[is_dense].sum()) < limit * max(int(is_dense.sum()), _LEAST_DENSE_ROWS):
        is_dense = torch.zeros_like(is_dense)
    is_dense |= sizes == 0
    return (~is_dense).nonzero()[:, 0], is_dense.nonzero()[:, 0]


def kept_log_probs(
    factors: Factors,
    options: HeadOptions,
    keep_logits: bool | None,
    kept: Ragged,
    centering: Centering | None = None,
) -> tuple[Tensor, ...]:
    """Compute `linear_log_probs_and_entropy` over kept sets, each row with the cheaper layer."""
    hidden, weight, targets = factors
    check_rows(kept, hidden)
    sparse, dense = split_rows(kept, weight.shape[0], options.tensor_parallel_group)
    if not len(dense):
        return sparse_log_probs(factors, options, kept, centering)
    if not len(sparse):
        restrict = functools.partial(keep_only, kept)
        return linear_log_probs(factors, options, keep_logits, restrict, centering)
    zeros = torch.zeros_like(targets, dtype=wide_dtype(hidden.dtype))
    joined = [zeros, zeros]
    if centering is not None:
        joined.append(zeros.new_zeros(*centering.shape, len(zeros)))
    for rows in (sparse, dense):
        places, own = to_device(rows, hidden.device), kept.select(rows)
        part = Factors(hidden[places], weight, targets[places])
        center = None if centering is None else centering.select(places)
        if rows is sparse:
            vectors = sparse_log_probs(part, options, own, center)
        else:
            restrict = functools.partial(keep_only, own)
            vectors = linear_log_probs(part, options, None, restrict, center)
        pairs = zip(joined, vectors, strict=True)
        joined = [whole.index_copy(-1, places, vector) for whole, vector in pairs]
    return tuple(joined)


def sparse_log_probs(
    factors: Factors, options: HeadOptions, kept: Ragged, centering: Centering | None = None
) -> tuple[Tensor, ...]:
    """Compute log-probs and entropy [tokens] over only the kept columns, with the arguments of
    `linear_log_probs_and_entropy`.
    """
    layer = OutputLayer.build(factors, options)
    pairs = KeptPairs.build(kept, factors.targets, layer.shard, layer.temperature)
    rows_of = functools.partial(PairRows, pairs, kept.values, factors.targets)
    return SparseLogProbs.apply(factors.hidden, factors.weight, pairs, rows_of, centering)  # type: ignore


@dataclass(frozen=True, eq=False)
class PairRows:
    """Pairs as rows of logits that a `Centering` reads: the columns are places among the pairs."""

    pairs: KeptPairs
    ids: Tensor  # the global id of each pair, [pairs] int64
    targets: Tensor
    logits: Tensor  # [pairs]
    row_mask: ClassVar[None] = None
    softcap: ClassVar[None] = None

    @property
    def shard(self) -> Self:
        return self

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.pairs.shard.group

    @property
    def temperature(self) -> Tensor:
        return self.pairs.temperature

    def columns_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of global ids [rows, n], and True where this rank holds the column."""
        rows, size = torch.arange(len(ids), device=ids.device), self.pairs.shard.vocab_size
        keys, order = (self.pairs.rows * size + self.ids).sort()
        wanted = torch.where(ids < 0, -1, rows[:, None] * size + ids)
        places = torch.searchsorted(keys, wanted).clamp(max=max(len(keys) - 1, 0))
        columns = order[places]
        return columns, (keys[places] == wanted) & self.pairs.is_here[columns]

    def logits_of(self, columns: Tensor) -> Tensor:
        return self.logits[columns]


class SparseLogProbs(torch.autograd.Function):
    """Log-probabilities and entropy of the kept columns, with both factors' gradients in
    backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        pairs: KeptPairs,
        rows_of: Callable[[Tensor], PairRows],
        centering: Centering | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.products = choose("kept.pairs_triton", sets, hidden)
        logits = ctx.products.pair_logits(hidden, weight, pairs)
        local = pairs.local_statistics(logits)
        statistics = combine_statistics(local, pairs.shard, pairs.temperature)
        ctx.pairs, ctx.parameter = pairs, weight  # a saved tensor may lose its `main_grad`
        ctx.save_for_backward(hidden, weight, logits, *statistics.kept())
        ctx.rows_of, ctx.centering = rows_of, centering
        if centering is None:
            return statistics.log_probs, statistics.entropy
        values, _ = centering.on(rows_of(logits), statistics, slice(None))
        return statistics.log_probs, statistics.entropy, values

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_log_probs_and_entropy")
        if all(gradient is None for gradient in incoming):
            return (None,) * 5
        hidden, _, logits, *saved = ctx.saved_tensors
        statistics, columns = RowStatistics(*saved), None
        if ctx.centering is not None:
            to_logits = ctx.centering.on(ctx.rows_of(logits), statistics, slice(None))[1]
            incoming, _, columns = to_logits(incoming, logits.dtype)
        gradient = kept_gradient(logits, ctx.pairs, statistics, incoming)
        if columns is not None:
            # Places beyond the pairs take what is not here.
            places = torch.where(columns.is_here, columns.columns, len(gradient)).flatten()
            gradient = torch.cat([gradient, gradient.new_zeros(1)])
            gradient = gradient.scatter_(0, places, columns.values.flatten())[:-1]
        gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad[:2], final=True)
        if gradients.hidden is not None:
            ctx.products.write_hidden_gradient(gradient, ctx.parameter, ctx.pairs, gradients.hidden)
        if gradients.needs_weight:
            gradients.add_to_weight(
                lambda out, add: ctx.products.add_weight_gradient(
                    gradient, hidden, ctx.pairs, out if add else out.zero_()
                )
            )
        return (*gradients.finish(), None, None, None)
