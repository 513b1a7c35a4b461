"""Log-probabilities and entropy over the set of tokens that each token was sampled from.

With K a row's kept ids, including the target, and t the temperature, `log p_K(y) = z_y / t -
logsumexp_{k in K} z_k / t`. The entropy is over K, and the gradient outside of K is 0. All
functions work on pairs of a row and a kept id, in row order. A tensor-parallel rank counts only
pairs in its columns. The last three functions are a sparse output layer's products in plain torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.head.ragged import Ragged, to_device
from megatron_pg.head.rows_torch import row_chunks
from megatron_pg.head.vocabulary_shard import Incoming, RowStatistics, VocabularyShard


def check_rows(kept: Ragged, matrix: Tensor) -> None:
    """Raise ValueError unless there is one int64 set per row of the matrix."""
    if len(kept) != len(matrix) or kept.values.dtype != torch.int64:
        raise ValueError(
            f"kept must be {len(matrix)} sets of int64 ids, one per token, found {len(kept)} of "
            f"{kept.values.dtype}"
        )


@dataclass(frozen=True)
class KeptPairs:
    """The pairs of a row and a kept id of a call, on its device."""

    rows: Tensor  # the row of each pair, [pairs] int64, ascending
    columns: Tensor  # its local column, [pairs] int64, 0 if another rank holds it
    is_here: Tensor  # whether this rank holds the column, [pairs] bool
    is_target: Tensor  # whether the column is the row's target, [pairs] bool
    offsets: Tensor  # where each row's pairs begin, [tokens + 1] int64
    temperature: Tensor
    shard: VocabularyShard

    @classmethod
    def build(
        cls, kept: Ragged, targets: Tensor, shard: VocabularyShard, temperature: Tensor
    ) -> KeptPairs:
        """Pair the rows [tokens] with their global ids, without host synchronization. A row without
        pairs has no set.
        """
        rows, (columns, is_here) = kept.row_of_element(), shard.columns_of(kept.values)
        is_target, offsets = kept.values == targets[rows], to_device(kept.offsets, targets.device)
        return cls(rows, columns, is_here, is_target, offsets, temperature, shard)

    def logits_in(self, logits: Tensor) -> Tensor:
        """Select the logits [pairs] from `logits` [tokens, v/tp], in the dtype of the
        statistics.
        """
        values = logits[self.rows, self.columns].to(self.temperature.dtype)
        return torch.where(self.is_here, values, -math.inf)

    def local_statistics(self, logits: Tensor) -> Tensor:
        """Compute the statistics [tokens, 4] of `rows_torch` over this shard's part of each set,
        from `logits_in` [pairs].
        """
        maximum = self._reduce("max", logits)
        largest = torch.where(maximum == -math.inf, 0.0, maximum)[self.rows]
        exponents = (logits - largest) / self.temperature
        exponentials = exponents.exp()
        products = torch.where(exponentials == 0, 0.0, exponentials * exponents)
        target = self._reduce("max", torch.where(self.is_target, logits, -math.inf))
        sums = self._reduce("sum", exponentials), self._reduce("sum", products)
        return torch.stack([maximum, *sums, target], dim=1)

    def add_gradient(
        self, logits: Tensor, statistics: RowStatistics, incoming: Incoming, out: Tensor
    ) -> None:
        """Add the gradient of the logits [pairs] to all columns' gradient `out` [tokens, v/tp],
        which is 0 there.
        """
        gradient = kept_gradient(logits, self, statistics, incoming).to(out.dtype)
        out.index_put_((self.rows, self.columns), gradient, accumulate=True)

    def _reduce(self, reduction: str, values: Tensor) -> Tensor:
        """Return the sum or maximum [tokens] of each row's values [pairs]. A row without pairs gets
        0 or minus infinity.
        """
        return torch.segment_reduce(values, reduction, offsets=self.offsets, unsafe=True)


def kept_gradient(
    logits: Tensor, pairs: KeptPairs, statistics: RowStatistics, incoming: Incoming
) -> Tensor:
    """Compute the gradient [pairs] of the pairs' logits with the formula of
    `rows_torch.write_gradient` over the set.
    """
    exponents = (logits - statistics.maximum[pairs.rows]) / pairs.temperature
    log_p = exponents - statistics.log_sum[pairs.rows]
    p = log_p.exp()
    gradient, live = torch.zeros_like(p), torch.zeros_like(pairs.is_here)
    to_log_probs, to_entropy = (
        None if vector is None else vector.to(p.dtype)[pairs.rows] for vector in incoming
    )
    if to_log_probs is not None:
        gradient, live = to_log_probs * (pairs.is_target.to(p.dtype) - p), to_log_probs != 0
    if to_entropy is not None:
        surprise = torch.where(p == 0, 0.0, p * (log_p + statistics.entropy[pairs.rows]))
        gradient, live = gradient - to_entropy * surprise, live | (to_entropy != 0)
    return torch.where(live & pairs.is_here, gradient / pairs.temperature, 0.0)


def keep_only(sets: Ragged, logits: Tensor, rows: slice, shard: VocabularyShard) -> None:
    """Fill logits [rows, v/tp] with minus infinity outside of the row's set, if it has one, in
    place.
    """
    kept = sets.slice(rows)
    if not kept.values.numel():
        return
    row, (local, is_here) = kept.row_of_element(), shard.columns_of(kept.values)
    offsets = to_device(kept.offsets, logits.device)
    places = torch.where(is_here, local, -1).double()
    last = torch.segment_reduce(places, "max", offsets=offsets, initial=-1.0, unsafe=True).long()
    # A pair of another rank rewrites the row's last pair of this rank, or minus infinity at column
    # 0.
    columns = torch.where(is_here, local, last[row])
    values = torch.where(columns < 0, -math.inf, logits[row, columns.clamp(min=0)])
    logits.masked_fill_(to_device(kept.sizes > 0, logits.device)[:, None], -math.inf)
    logits[row, columns.clamp(min=0)] = values.to(logits.dtype)


def pair_logits(hidden: Tensor, weight: Tensor, pairs: KeptPairs) -> Tensor:
    """Compute the logits [pairs] in the dtype of the statistics, minus infinity if another rank
    holds the column.
    """
    dtype = pairs.temperature.dtype
    logits = torch.full(pairs.rows.shape, -math.inf, dtype=dtype, device=hidden.device)
    for part in row_chunks(len(pairs.rows), hidden.shape[1]):
        left, right = hidden[pairs.rows[part]].to(dtype), weight[pairs.columns[part]].to(dtype)
        logits[part] = torch.where(pairs.is_here[part], (left * right).sum(1), -math.inf)
    return logits


def write_hidden_gradient(gradient: Tensor, weight: Tensor, pairs: KeptPairs, out: Tensor) -> None:
    """Write the gradient of the hidden states to `out` [tokens, hidden], rounded once. Rows without
    a pair get 0.
    """
    total = torch.zeros_like(out, dtype=gradient.dtype)
    for part in row_chunks(len(pairs.rows), out.shape[1]):
        columns = weight[pairs.columns[part]].to(gradient.dtype)
        total.index_put_((pairs.rows[part],), gradient[part, None] * columns, accumulate=True)
    out.copy_(total)


def add_weight_gradient(gradient: Tensor, hidden: Tensor, pairs: KeptPairs, out: Tensor) -> None:
    """Add the weight's gradient to `out` [v/tp, hidden], float32 or wider, always in the same
    order.
    """
    for part in row_chunks(len(pairs.rows), out.shape[1]):
        rows = hidden[pairs.rows[part]].to(gradient.dtype)
        product = (gradient[part, None] * rows).to(out.dtype)
        out.index_put_((pairs.columns[part],), product, accumulate=True)
