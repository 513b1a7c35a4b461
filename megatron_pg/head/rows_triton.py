"""The two row passes as Triton kernels, with the signatures of `rows_torch`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megatron_pg.head import triton_gradient, triton_statistics
from megatron_pg.head.vocabulary_shard import (
    RowStatistics,
    VocabularyShard,
    gather_statistics,
)

# Chosen by measurement on an H200 (docs/benchmarks.md). A vector is 16 bytes of bfloat16. Of the gradient: bytes of a
# logit -> columns of a tile, tiles of a segment.
_VECTOR = 8
_VECTORS = 256
_STATISTICS_WARPS = 4
_GRADIENT_TILES = {2: (1024, 8), 4: (2048, 4)}
_GRADIENT_WARPS = 4
_COMBINED_ROWS = 128
_CACHE_LINE = 128  # bytes


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    temperature: Tensor,
    row_mask: Tensor | None = None,
    with_entropy: bool = True,
) -> RowStatistics:
    """One read of the logits; see `rows_torch.row_statistics`. The entropy comes at no cost."""
    tokens = logits.shape[0]
    outputs = RowStatistics(*(temperature.new_empty(tokens) for _ in range(4)))
    if tokens == 0:
        return outputs
    sharded = shard.group is not None
    mask = None if row_mask is None else row_mask.contiguous()
    pointers = (outputs.maximum, outputs.log_sum, outputs.log_probs, outputs.entropy)
    own = temperature.new_empty((tokens, 4)) if sharded else None
    triton_statistics.statistics_kernel[(tokens,)](
        logits,
        logits.stride(0),
        targets.contiguous(),
        mask,
        temperature,
        own,
        *pointers,
        shard.columns,
        shard.start,
        shard.vocab_size,
        SHARDED=sharded,
        MASKED=mask is not None,
        VECTORS=_VECTORS,
        VECTOR=_VECTOR,
        num_warps=_STATISTICS_WARPS,
    )
    if shard.group is None or own is None:
        return outputs
    gathered = gather_statistics(own, shard.group)
    shards = gathered.shape[0]
    triton_statistics.combine_kernel[(triton.cdiv(tokens, _COMBINED_ROWS),)](
        gathered,
        mask,
        temperature,
        *pointers,
        tokens,
        shards,
        MASKED=mask is not None,
        ROWS=_COMBINED_ROWS,
        SHARDS=triton.next_power_of_2(shards),
    )
    return outputs


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    temperature: Tensor,
    statistics: RowStatistics,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    row_mask: Tensor | None = None,
) -> None:
    """One read and one write; see `rows_torch.write_gradient`.

    `out` may be `logits`, or a view of the front of each of its rows in a narrower dtype.
    """
    tokens, width = logits.shape
    if tokens == 0:
        return
    overlaps = out.dtype != logits.dtype and out.data_ptr() == logits.data_ptr()
    mask = None if row_mask is None else row_mask.contiguous()
    tile, tiles = _GRADIENT_TILES[logits.element_size()]
    line = 0 if overlaps else _columns_of_a_line(logits, out)
    reach = width + max(line - 1, 0)
    # Segments of rows keep what runs at one time close together in memory, and the last wave short.
    if overlaps:
        tiles = triton.cdiv(reach, tile)
    segments = triton.cdiv(reach, tiles * tile)
    triton_gradient.gradient_kernel[(tokens * segments,)](
        logits,
        logits.stride(0),
        out,
        out.stride(0),
        targets.contiguous(),
        mask,
        temperature,
        statistics.maximum,
        statistics.log_sum,
        statistics.entropy,
        None if grad_log_probs is None else grad_log_probs.to(torch.float32).contiguous(),
        None if grad_entropy is None else grad_entropy.to(torch.float32).contiguous(),
        shard.columns,
        width,
        shard.start,
        segments,
        tiles * tile,
        LOG_PROBS=grad_log_probs is not None,
        ENTROPY=grad_entropy is not None,
        MASKED=mask is not None,
        ORDERED=overlaps,
        LINE=line,
        TILE=tile,
        num_warps=_GRADIENT_WARPS,
    )


def _columns_of_a_line(logits: Tensor, out: Tensor) -> int:
    """Columns in a cache line, where rows begin inside lines and can be read and written from a line's start; else 0."""
    tile, _ = _GRADIENT_TILES[logits.element_size()]
    line = min(_CACHE_LINE // logits.element_size(), tile)
    same = logits.stride(0) == out.stride(0) and logits.dtype == out.dtype
    return line if same and logits.stride(0) % line and logits.stride(0) % 16 == 0 else 0
