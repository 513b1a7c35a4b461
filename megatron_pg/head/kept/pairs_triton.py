"""The functions of `pairs_torch` as launches of Triton kernels, with the same signatures."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megatron_pg.head.kept import pairs_kernels as kernels
from megatron_pg.head.kept.sets import KeptPairs

# Pairs of a program at a time, and elements of a hidden state.
_LOGITS_TILE = (8, 256)
_HIDDEN_TILE = (8, 512)
_WEIGHT_TILE = (8, 1024)
_WEIGHT_PROGRAMS = 1056
"""Programs that share the columns of the weight: 8 for each multiprocessor of an H200."""


def pair_logits(hidden: Tensor, weight: Tensor, pairs: KeptPairs) -> Tensor:
    """One read of the kept columns; see `pairs_torch.pair_logits`."""
    count, size = len(pairs.rows), hidden.shape[1]
    logits = pairs.temperature.new_empty(count)
    per_program, tile = _LOGITS_TILE
    if count:
        kernels.logits_kernel[(triton.cdiv(count, per_program),)](
            hidden, hidden.stride(0), weight, weight.stride(0), pairs.rows, pairs.columns, pairs.is_here,
            logits, count, size, PAIRS=per_program, TILE=tile,
        )  # fmt: skip
    return logits


def write_hidden_gradient(gradient: Tensor, weight: Tensor, pairs: KeptPairs, out: Tensor) -> None:
    """One read of the kept columns; see `pairs_torch.write_hidden_gradient`."""
    tokens, size = out.shape
    per_step, tile = _HIDDEN_TILE
    if tokens:
        kernels.hidden_gradient_kernel[(tokens, triton.cdiv(size, tile))](
            gradient, pairs.offsets, pairs.columns, weight, weight.stride(0), out, out.stride(0), size,
            PAIRS=per_step, TILE=tile,
        )  # fmt: skip


def add_weight_gradient(gradient: Tensor, hidden: Tensor, pairs: KeptPairs, out: Tensor) -> None:
    """The pairs sorted by column, each column summed by one program; see `pairs_torch.add_weight_gradient`."""
    count, size, columns = len(pairs.rows), hidden.shape[1], pairs.shard.columns
    per_step, tile = _WEIGHT_TILE
    if count == 0:
        return
    keys = torch.where(pairs.is_here, pairs.columns, columns).int()
    keys, order = torch.sort(keys, stable=True)
    ends = torch.searchsorted(keys, keys, right=True)
    kernels.weight_gradient_kernel[(min(count, _WEIGHT_PROGRAMS), triton.cdiv(size, tile))](
        gradient, order, keys, ends, pairs.rows, hidden, hidden.stride(0), out, out.stride(0),
        count, columns, size, PAIRS=per_step, TILE=tile, num_warps=8,
    )  # fmt: skip
