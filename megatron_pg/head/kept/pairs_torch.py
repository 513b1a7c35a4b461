"""The three products of a sparse output layer in plain torch, over the columns that each row has kept.

They work on a few pairs at a time, so that the copies of weights and hidden states stay small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_pg.head.kept.sets import KeptPairs
from megatron_pg.head.rows_torch import chunk_slices

_CHUNK_ELEMENTS = 1 << 22


def _chunks(pairs: KeptPairs, size: int) -> list[slice]:
    return chunk_slices(0, len(pairs.rows), max(1, _CHUNK_ELEMENTS // max(1, size)))


def pair_logits(hidden: Tensor, weight: Tensor, pairs: KeptPairs) -> Tensor:
    """Compute the logits [pairs] in the dtype of the statistics; minus infinity where another rank holds the column.

    Args:
        hidden, weight: [tokens, hidden] and [v/tp, hidden], of one dtype.
        pairs: the pairs.
    """
    dtype = pairs.temperature.dtype
    logits = torch.full(pairs.rows.shape, -math.inf, dtype=dtype, device=hidden.device)
    for part in _chunks(pairs, hidden.shape[1]):
        left, right = hidden[pairs.rows[part]].to(dtype), weight[pairs.columns[part]].to(dtype)
        logits[part] = torch.where(pairs.is_here[part], (left * right).sum(1), -math.inf)
    return logits


def write_hidden_gradient(gradient: Tensor, weight: Tensor, pairs: KeptPairs, out: Tensor) -> None:
    """Write the gradient of the hidden states into `out` [tokens, hidden], rounded once; rows without a pair get 0.

    Args:
        gradient: [pairs], from `kept_gradient`.
        weight, pairs: as for `pair_logits`.
        out: the gradient.
    """
    total = torch.zeros_like(out, dtype=gradient.dtype)
    for part in _chunks(pairs, out.shape[1]):
        columns = weight[pairs.columns[part]].to(gradient.dtype)
        total.index_put_((pairs.rows[part],), gradient[part, None] * columns, accumulate=True)
    out.copy_(total)


def add_weight_gradient(gradient: Tensor, hidden: Tensor, pairs: KeptPairs, out: Tensor) -> None:
    """Add the gradient of the weight to `out` [v/tp, hidden], float32 or wider, always in the same order."""
    for part in _chunks(pairs, out.shape[1]):
        rows = hidden[pairs.rows[part]].to(gradient.dtype)
        product = (gradient[part, None] * rows).to(out.dtype)
        out.index_put_((pairs.columns[part],), product, accumulate=True)
