"""Log-probabilities and entropy over the set of tokens that each token was sampled from.

With K the kept ids of a row, the target among them, and t the temperature: `log p_K(y) = z_y / t - logsumexp_{k in K}
z_k / t`, the entropy is over K, and the gradient is 0 outside of it. All works on pairs of a row and a kept id, in the order
of the rows; under tensor parallelism a rank counts the pairs of its own columns, and one all-gather of `[tokens, 4]`
statistics makes the row's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.head.ragged import Ragged, to_device
from megatron_pg.head.vocabulary_shard import RowStatistics, VocabularyShard


def check_rows(kept: Ragged, matrix: Tensor) -> None:
    """Raises ValueError unless the sets are int64 and one for each row of a matrix."""
    if len(kept) != len(matrix) or kept.values.dtype != torch.int64:
        raise ValueError(
            f"kept must be {len(matrix)} sets of int64 ids, one for each token, found {len(kept)} of {kept.values.dtype}"
        )


@dataclass(frozen=True)
class KeptPairs:
    """The pairs of a call, on its device."""

    rows: Tensor
    """The row of each pair, [pairs] int64, ascending."""
    columns: Tensor
    """Its local column, [pairs] int64; 0 where another rank holds it."""
    is_here: Tensor
    """Whether this rank holds the column, [pairs] bool."""
    is_target: Tensor
    """Whether it is the row's target, [pairs] bool."""
    offsets: Tensor
    """Where each row's pairs begin, [tokens + 1] int64."""
    temperature: Tensor
    """The temperature, one element in the dtype of the statistics."""
    shard: VocabularyShard

    @classmethod
    def build(
        cls, kept: Ragged, targets: Tensor, shard: VocabularyShard, temperature: Tensor
    ) -> KeptPairs:
        """The pairs of rows [tokens] with their global ids; a row without any has no set. No host synchronisation."""
        rows = kept.row_of_element()
        local = kept.values - shard.start
        is_here = (local >= 0) & (local < shard.columns)
        return cls(
            rows=rows,
            columns=torch.where(is_here, local, 0),
            is_here=is_here,
            is_target=kept.values == targets[rows],
            offsets=to_device(kept.offsets, targets.device),
            temperature=temperature,
            shard=shard,
        )

    def logits_in(self, logits: Tensor) -> Tensor:
        """The logits of the pairs [pairs], in the dtype of the statistics, out of those of all columns [tokens, v/tp]."""
        values = logits[self.rows, self.columns].to(self.temperature.dtype)
        return torch.where(self.is_here, values, -math.inf)

    def add_gradient(self, gradient: Tensor, row_mask: Tensor | None, out: Tensor) -> None:
        """Adds the gradient [pairs] to that of all columns, `out` [tokens, v/tp], where nothing has been written yet."""
        if row_mask is not None:
            gradient = torch.where(row_mask[self.rows], gradient, 0.0)
        out.index_put_((self.rows, self.columns), gradient.to(out.dtype), accumulate=True)


def local_statistics(logits: Tensor, pairs: KeptPairs) -> Tensor:
    """The statistics [tokens, 4] of this shard's part of each row's set, as `rows_torch` has those of a row.

    Args:
        logits: [pairs] in the dtype of the statistics, minus infinity where another rank holds the column.
    """
    maximum = _of_rows("max", logits, pairs)
    largest = torch.where(maximum == -math.inf, 0.0, maximum)[pairs.rows]
    exponents = (logits - largest) / pairs.temperature
    exponentials = exponents.exp()
    products = torch.where(exponentials == 0, 0.0, exponentials * exponents)
    at_target = torch.where(pairs.is_target, logits, -math.inf)
    sums = [_of_rows("sum", each, pairs) for each in (exponentials, products)]
    return torch.stack([maximum, *sums, _of_rows("max", at_target, pairs)], dim=1)


def kept_gradient(
    logits: Tensor, pairs: KeptPairs, statistics: RowStatistics, incoming: tuple[Tensor | None, ...]
) -> Tensor:
    """The gradient to the logits of the pairs, [pairs]; 0 where another rank holds the column, and in rows of zero gradient.

    The formula is that of `rows_torch.write_gradient`, over the set.
    """
    exponents = (logits - statistics.maximum[pairs.rows]) / pairs.temperature
    log_p = exponents - statistics.log_sum[pairs.rows]
    p = log_p.exp()
    gradient, live = torch.zeros_like(p), torch.zeros_like(pairs.is_here)
    to_log_probs, to_entropy = (
        None if each is None else each.to(p.dtype)[pairs.rows] for each in incoming
    )
    if to_log_probs is not None:
        gradient, live = to_log_probs * (pairs.is_target.to(p.dtype) - p), to_log_probs != 0
    if to_entropy is not None:
        surprise = torch.where(p == 0, 0.0, p * (log_p + statistics.entropy[pairs.rows]))
        gradient, live = gradient - to_entropy * surprise, live | (to_entropy != 0)
    return torch.where(live & pairs.is_here, gradient / pairs.temperature, 0.0)


def keep_only(logits: Tensor, kept: Ragged, shard: VocabularyShard) -> None:
    """Fills the logits [tokens, v/tp] outside of each row's set with minus infinity, in place; rows without a set stay."""
    rows, local = kept.row_of_element(), kept.values - shard.start
    is_here = (local >= 0) & (local < shard.columns)
    offsets = to_device(kept.offsets, logits.device)
    places = torch.where(is_here, local, -1).double()
    last = torch.segment_reduce(places, "max", offsets=offsets, initial=-1.0, unsafe=True).long()
    # What another rank holds writes once more what the row's last pair here does, or at column 0 that there is none.
    columns = torch.where(is_here, local, last[rows])
    values = torch.where(columns < 0, -math.inf, logits[rows, columns.clamp(min=0)])
    logits.masked_fill_(to_device(kept.sizes > 0, logits.device)[:, None], -math.inf)
    logits[rows, columns.clamp(min=0)] = values.to(logits.dtype)


def _of_rows(reduction: str, values: Tensor, pairs: KeptPairs) -> Tensor:
    """The sum or the maximum of the values [pairs] of each row, [tokens]; of no pair 0 and minus infinity."""
    return torch.segment_reduce(values, reduction, offsets=pairs.offsets, unsafe=True)
