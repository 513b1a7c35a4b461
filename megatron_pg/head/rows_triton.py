"""The functions of `rows_torch` as launches of Triton kernels, with the same signatures."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from megatron_pg.head import kernels
from megatron_pg.head.vocabulary_shard import LogitRows, RowStatistics, VocabularyShard

# Chosen by measurement on an H200 (docs/benchmarks.md). A vector is 16 bytes of bfloat16. Of the gradient: bytes of a
# logit -> columns of a tile, tiles of a segment.
_VECTOR = 8
_VECTORS = 256
_STATISTICS_WARPS = 4
_GRADIENT_TILES = {2: (1024, 8), 4: (2048, 4)}
_GRADIENT_WARPS = 4
_COMBINED_ROWS = 128
_CACHE_LINE = 128  # bytes


def row_statistics(rows: LogitRows) -> RowStatistics:
    """One read of the logits; see `rows_torch.row_statistics`."""
    tokens, shard, temperature = rows.logits.shape[0], rows.shard, rows.temperature
    outputs = RowStatistics(*(temperature.new_empty(tokens) for _ in RowStatistics._fields))
    if tokens == 0:
        return outputs
    row_mask, mask = _contiguous(rows.row_mask), _contiguous(rows.pass_mask)
    is_whole = shard.group is None and rows.of_sets is None
    own = None if is_whole else temperature.new_empty((tokens, 4))
    kernels.statistics_kernel[(tokens,)](
        rows.logits, rows.logits.stride(0), rows.targets.contiguous(), mask, temperature,
        own, *outputs,
        shard.columns, shard.start, shard.vocab_size,
        VECTORS=_VECTORS, VECTOR=_VECTOR, num_warps=_STATISTICS_WARPS,
    )  # fmt: skip
    if own is None:
        return outputs
    if rows.has_set is not None and rows.of_sets is not None:
        of_sets = rows.of_sets.clone()
        of_sets[:, 2] /= math.log(2.0)  # the kernels add up exponents of 2
        own = torch.where(rows.has_set[:, None], of_sets, own)
    combine(own, shard, temperature, row_mask, outputs)
    return outputs


def combine(
    own: Tensor,
    shard: VocabularyShard,
    temperature: Tensor,
    row_mask: Tensor | None,
    outputs: RowStatistics,
) -> None:
    """Writes the statistics over all shards from those of this one, [tokens, 4]; every tensor-parallel rank must call."""
    gathered = own[None] if shard.group is None else shard.gather(own)
    shards, tokens = gathered.shape[:2]
    kernels.combine_kernel[(triton.cdiv(tokens, _COMBINED_ROWS),)](
        gathered, row_mask, temperature,
        *outputs,
        tokens, shards,
        ROWS=_COMBINED_ROWS, SHARDS=triton.next_power_of_2(shards),
    )  # fmt: skip


def write_gradient(
    rows: LogitRows,
    statistics: RowStatistics,
    incoming: tuple[Tensor | None, Tensor | None],
    out: Tensor,
) -> None:
    """One read and one write; see `rows_torch.write_gradient`.

    `out` may be the logits, or a view of the front of each of their rows in a narrower dtype.
    """
    logits = rows.logits
    tokens, width = logits.shape
    if tokens == 0:
        return
    mask = _contiguous(rows.pass_mask)
    overlaps = out.dtype != logits.dtype and out.data_ptr() == logits.data_ptr()
    tile, tiles = _GRADIENT_TILES[logits.element_size()]
    line = 0 if overlaps else _columns_of_a_line(logits, out)
    reach = width + max(line - 1, 0)
    # Segments of rows keep what runs at one time close together in memory, and the last wave short.
    if overlaps:
        tiles = triton.cdiv(reach, tile)
    segments = triton.cdiv(reach, tiles * tile)
    kernels.gradient_kernel[(tokens * segments,)](
        logits, logits.stride(0), out, out.stride(0), rows.targets.contiguous(), mask, rows.temperature,
        statistics.maximum, statistics.log_sum, statistics.entropy,
        *(None if each is None else each.to(torch.float32).contiguous() for each in incoming),
        rows.shard.columns, width, rows.shard.start, segments, tiles * tile,
        ORDERED=overlaps, LINE=line, TILE=tile, num_warps=_GRADIENT_WARPS,
    )  # fmt: skip


def _contiguous(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous()


def _columns_of_a_line(logits: Tensor, out: Tensor) -> int:
    """Columns in a cache line, where rows begin inside lines and can be read and written from a line's start; else 0."""
    tile, _ = _GRADIENT_TILES[logits.element_size()]
    line = min(_CACHE_LINE // logits.element_size(), tile)
    same = logits.stride(0) == out.stride(0) and logits.dtype == out.dtype
    return line if same and logits.stride(0) % line and logits.stride(0) % 16 == 0 else 0
