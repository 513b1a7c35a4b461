"""The row passes as Triton kernels, with the functions and signatures of `rows_torch`.

A program processes one row, or a segment of one, in tiles, so a row's arithmetic does not depend on
the number of rows. Full tiles have no mask, because with a mask a vocabulary that is not a multiple
of the vector width would lose its 16-byte accesses. Row offsets are int64. A pointer may be None:
Triton compiles one kernel per case.
"""

# Kernels are typed by Triton at their first launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.head.vocabulary_shard import Incoming, LogitRows, RowStatistics, VocabularyShard

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SMALLEST = tl.constexpr(-1e30)


@triton.jit
def _rescale(maximum, safe, scale):
    """Return the base-2 exponent and the factor that move statistics from one maximum to
    another.
    """
    # The bound prevents 0 * -inf for a part without mass.
    shift = tl.maximum((maximum - safe) * scale, SMALLEST)
    return shift, tl.exp2(shift)


@triton.jit
def _finite(maximum):
    """Return the maximum to subtract, 0 for a part of only -inf, so that exponentials are 0 instead
    of NaN.
    """
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def log2(x, SPECIAL: tl.constexpr):
    """Return the base-2 logarithm. SPECIAL uses the special function unit, within 2 ** -22, instead
    of 30 instructions.
    """
    if SPECIAL:
        logarithm = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        logarithm = tl.log2(x)
    return logarithm


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent, from a series near 0, where the quotient would cancel."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.03, x - x * x * x / 3.0, tl.where(x < 0.0, -far, far))


@triton.jit
def _capped(logits, softcap):
    """Return the logits, soft-capped unless `softcap` is None."""
    if softcap is not None:
        logits = softcap * _tanh(logits / softcap)
    return logits


@triton.jit
def _online_update(logits, maximum, total, dot, scale):
    """Fold a tile [VECTORS, VECTOR] into running statistics [VECTORS], without communication,
    because a vector lies in one thread.
    """
    largest = tl.maximum(maximum, tl.max(logits, axis=1))
    safe = _finite(largest)
    exponents = (logits - safe[:, None]) * scale
    exponentials = tl.exp2(exponents)
    # Bound the exponent, because 0 * -inf is NaN. A NaN logit still propagates through the
    # exponential.
    products = exponentials * tl.maximum(exponents, SMALLEST)
    shift, shrink = _rescale(maximum, safe, scale)
    dot = shrink * (dot + shift * total) + tl.sum(products, axis=1)
    total = shrink * total + tl.sum(exponentials, axis=1)
    return largest, total, dot


@triton.jit
def _row_statistics(base, columns, scale, softcap, VECTORS: tl.constexpr, VECTOR: tl.constexpr):
    """Return a row's largest logit, sum of exponentials, and their dot product with the base-2
    exponents.
    """
    offsets = tl.arange(0, VECTORS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    maximum = tl.full([VECTORS], -float("inf"), tl.float32)
    total = tl.zeros([VECTORS], tl.float32)
    dot = tl.zeros([VECTORS], tl.float32)
    full = columns // (VECTORS * VECTOR) * (VECTORS * VECTOR)
    for first in range(0, full, VECTORS * VECTOR):
        tile = _capped(tl.load(base + first + offsets).to(tl.float32), softcap)
        maximum, total, dot = _online_update(tile, maximum, total, dot, scale)
    if full < columns:
        inside = full + offsets < columns
        tile = tl.load(base + full + offsets, mask=inside, other=0.0).to(tl.float32)
        tile = tl.where(inside, _capped(tile, softcap), -float("inf"))
        maximum, total, dot = _online_update(tile, maximum, total, dot, scale)
    largest = tl.max(maximum, axis=0)
    shift, shrink = _rescale(maximum, _finite(largest), scale)
    dot = tl.sum(shrink * (dot + shift * total), axis=0)
    return largest, tl.sum(shrink * total, axis=0), dot


@triton.jit
def _target_logit(base, target, start, columns, vocab_size, softcap):
    """Return the target's logit: -inf if another shard holds the target, NaN if the vocabulary
    lacks it.
    """
    local = target - start
    here = (local >= 0) & (local < columns)
    known = (target >= 0) & (target < vocab_size)
    logit = _capped(tl.load(base + local, mask=here, other=0.0).to(tl.float32), softcap)
    return tl.where(here, logit, tl.where(known, -float("inf"), float("nan")))


@triton.jit
def _log_prob_and_entropy(maximum, total, dot, target_logit, temperature):
    log_sum = tl.log(total)
    return log_sum, (target_logit - maximum) / temperature - log_sum, log_sum - dot * LN_2 / total


@triton.jit
def statistics_kernel(
    logits, row_stride, targets, row_mask, temperature, softcap,
    shard_out, maximum_out, log_sum_out, log_probs_out, entropy_out,
    columns, start, vocab_size,
    VECTORS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write one row's final statistics, or only its local columns' to `shard_out` [tokens, 4] if
    given.
    """
    row = tl.program_id(0).to(tl.int64)
    live = tl.full((), 1, tl.int1)
    if row_mask is not None:
        live = tl.load(row_mask + row) != 0
    # A masked row gets log-probability 0 and entropy 0.
    maximum, dot = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    total, target_logit = tl.full((), 1.0, tl.float32), tl.full((), 0.0, tl.float32)
    value = tl.load(temperature)
    if live:
        base = logits + row * row_stride
        maximum, total, dot = _row_statistics(
            base, columns, LOG2_E / value, softcap, VECTORS, VECTOR
        )
        target = tl.load(targets + row)
        target_logit = _target_logit(base, target, start, columns, vocab_size, softcap)
    if shard_out is not None:
        out = shard_out + row * 4
        tl.store(out, maximum)
        tl.store(out + 1, total)
        tl.store(out + 2, dot)
        tl.store(out + 3, target_logit)
    else:
        log_sum, log_prob, entropy = _log_prob_and_entropy(maximum, total, dot, target_logit, value)
        tl.store(maximum_out + row, maximum)
        tl.store(log_sum_out + row, log_sum)
        tl.store(log_probs_out + row, log_prob)
        tl.store(entropy_out + row, entropy)


@triton.jit
def combine_kernel(
    gathered, row_mask, temperature,
    maximum_out, log_sum_out, log_probs_out, entropy_out,
    tokens, shards,
    ROWS: tl.constexpr, SHARDS: tl.constexpr,
):  # fmt: skip
    """Write the final statistics of ROWS rows from all shards' statistics [shards, tokens, 4]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < tokens
    shard = tl.arange(0, SHARDS)[:, None]
    present = (shard < shards) & inside[None, :]
    pointers = gathered + (shard.to(tl.int64) * tokens + rows[None, :]) * 4
    maxima = tl.load(pointers, mask=present, other=-float("inf"))
    totals = tl.load(pointers + 1, mask=present, other=0.0)
    dots = tl.load(pointers + 2, mask=present, other=0.0)
    targets = tl.load(pointers + 3, mask=present, other=-float("inf"))
    value = tl.load(temperature)
    maximum = tl.max(maxima, axis=0)
    shift, shrink = _rescale(maxima, _finite(maximum)[None, :], LOG2_E / value)
    total = tl.sum(shrink * totals, axis=0)
    dot = tl.sum(shrink * (dots + shift * totals), axis=0)
    # Every shard marks an unknown target with NaN, which a maximum may drop, but not a sum.
    unknown = tl.sum((targets != targets).to(tl.int32), axis=0) > 0
    target_logit = tl.where(unknown, float("nan"), tl.max(targets, axis=0))
    log_sum, log_prob, entropy = _log_prob_and_entropy(maximum, total, dot, target_logit, value)
    if row_mask is not None:
        keep = tl.load(row_mask + rows, mask=inside, other=0) != 0
        log_prob = tl.where(keep, log_prob, 0.0)
        entropy = tl.where(keep, entropy, 0.0)
    tl.store(maximum_out + rows, maximum, mask=inside)
    tl.store(log_sum_out + rows, log_sum, mask=inside)
    tl.store(log_probs_out + rows, log_prob, mask=inside)
    tl.store(entropy_out + rows, entropy, mask=inside)


@triton.jit
def _gradient_tile(
    base, out_base, first, columns, end, local, maximum, log2_sum, constant, slope,
    to_target, scale, softcap,
    ENTROPY: tl.constexpr, PARTIAL: tl.constexpr, ORDERED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of TILE columns from `first` on: p * (constant + slope * log2 p), plus
    `to_target` at the target.

    PARTIAL: some columns may lie outside [0, columns), or from `end` on.
    """
    lanes = first + tl.arange(0, TILE)
    inside = (lanes >= 0) & (lanes < columns)
    if PARTIAL:
        tile = tl.load(base + lanes, mask=inside, other=0.0).to(tl.float32)
    else:
        tile = tl.load(base + lanes).to(tl.float32)
    tile = _capped(tile, softcap)
    at_target = lanes == local
    log2_p = (tile - maximum) * scale - log2_sum
    p = tl.exp2(log2_p)
    factor = constant
    if ENTROPY:
        # Bound the logarithm, because 0 * -inf is NaN. A NaN logit still propagates through p.
        factor = constant + slope * tl.maximum(log2_p, SMALLEST)
    gradient = p * factor + tl.where(at_target, to_target, 0.0)
    if softcap is not None:
        gradient *= 1.0 - (tile / softcap) * (tile / softcap)
    if PARTIAL:
        gradient = tl.where(inside, gradient, 0.0)
    gradient = gradient.to(out_base.dtype.element_ty)
    if ORDERED:
        tl.debug_barrier()
    if PARTIAL:
        tl.store(out_base + lanes, gradient, mask=(lanes >= 0) & (lanes < end))
    else:
        tl.store(out_base + lanes, gradient)


@triton.jit
def arriving(gradients, row):
    """Return a row's incoming gradient, 0 without one."""
    value = tl.full((), 0.0, tl.float32)
    if gradients is not None:
        value = tl.load(gradients + row)
    return value


@triton.jit
def write_zeros(base, begin, end, TILE: tl.constexpr):
    """Write 0 to the columns of a row from `begin`, or from 0, to `end`."""
    zeros = tl.zeros([TILE], base.dtype.element_ty)
    for first in range(begin, end, TILE):
        lanes = first + tl.arange(0, TILE)
        tl.store(base + lanes, zeros, mask=(lanes >= 0) & (lanes < end))


@triton.jit
def gradient_kernel(
    logits, row_stride, out, out_stride, targets, row_mask, temperature, softcap,
    maximum, log_sum, entropy, grad_log_probs, grad_entropy,
    columns, padded_columns, start, segments, segment,
    ORDERED: tl.constexpr, LINE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient to a segment of one row of logits. `out` may be the logits.

    Programs begin with the last row, which the cache still holds. LINE: the columns of a cache line
    if rows do not begin at lines, else 0. Tiles then begin at lines, the first one before its row.
    With tiles that share lines, in-place gradients took a quarter longer on an H200. ORDERED: `out`
    is a narrower view of the memory of `logits`, and the segment is the whole row. A tile's stores
    land on columns of this tile or of earlier ones, so a barrier before the stores is enough.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // segments).to(tl.int64)
    begin = program % segments * segment
    if LINE > 0:
        # Divisible by 8, like row_stride, so that accesses stay 16 bytes wide.
        begin -= tl.multiple_of((row * row_stride % LINE).to(tl.int32), 8)
    end = tl.minimum(begin + segment, padded_columns)
    to_log_prob, to_entropy = arriving(grad_log_probs, row), arriving(grad_entropy, row)
    live = (to_log_prob != 0.0) | (to_entropy != 0.0)
    if row_mask is not None:
        live = live & (tl.load(row_mask + row) != 0)
    base = logits + row * row_stride
    out_base = out + row * out_stride
    if live:
        value = tl.load(temperature)
        scale = LOG2_E / value
        row_maximum = tl.load(maximum + row)
        log2_sum = tl.load(log_sum + row) * LOG2_E
        ENTROPY: tl.constexpr = grad_entropy is not None
        total = to_log_prob
        if ENTROPY:  # otherwise it may be NaN
            total += to_entropy * tl.load(entropy + row)
        constant = -total / value
        slope = -to_entropy * LN_2 / value
        to_target = to_log_prob / value
        local = tl.load(targets + row) - start
        local = tl.where((local >= 0) & (local < columns), local, -1).to(tl.int32)
        if LINE > 0:
            if begin < 0:
                _gradient_tile(
                    base, out_base, begin, columns, end, local, row_maximum, log2_sum, constant,
                    slope, to_target, scale, softcap, ENTROPY, True, ORDERED, TILE,
                )  # fmt: skip
                begin += TILE
        full = begin + tl.maximum(tl.minimum(end, columns) - begin, 0) // TILE * TILE
        for first in range(begin, full, TILE):
            _gradient_tile(
                base, out_base, first, columns, end, local, row_maximum, log2_sum, constant, slope,
                to_target, scale, softcap, ENTROPY, False, ORDERED, TILE,
            )  # fmt: skip
        for first in range(full, end, TILE):
            _gradient_tile(
                base, out_base, first, columns, end, local, row_maximum, log2_sum, constant, slope,
                to_target, scale, softcap, ENTROPY, True, ORDERED, TILE,
            )  # fmt: skip
    else:
        write_zeros(out_base, begin, end, TILE)


# Chosen by measurement on an H200 (docs/benchmarks.md).
_VECTOR, _VECTORS, _COMBINED_ROWS = 8, 256, 128  # a vector is 16 bytes of bfloat16
_STATISTICS_WARPS = _GRADIENT_WARPS = 4
_GRADIENT_TILES = {2: (1024, 8), 4: (2048, 4)}
"""The columns of a tile and the tiles of a segment, by a logit's bytes."""
_CACHE_LINE = 128  # bytes


def row_statistics(rows: LogitRows) -> RowStatistics:
    """Read the logits once. See `rows_torch.row_statistics`."""
    tokens, shard, temperature = rows.logits.shape[0], rows.shard, rows.temperature
    outputs = RowStatistics.empty(tokens, temperature)
    if tokens == 0:
        return outputs
    is_whole = shard.group is None and rows.set_statistics is None
    own = None if is_whole else temperature.new_empty((tokens, 4))
    statistics_kernel[(tokens,)](
        rows.logits, rows.logits.stride(0), rows.targets.contiguous(), packed(rows.pass_mask),
        temperature, rows.softcap, own, *outputs, shard.columns, shard.start, shard.vocab_size,
        VECTORS=_VECTORS, VECTOR=_VECTOR, num_warps=_STATISTICS_WARPS,
    )  # fmt: skip
    if own is None:
        return outputs
    if rows.has_set is not None and rows.set_statistics is not None:
        set_statistics = rows.set_statistics.clone()
        set_statistics[:, 2] /= math.log(2.0)  # the kernels add up exponents of 2
        own = torch.where(rows.has_set[:, None], set_statistics, own)
    return combine(own, shard, temperature, rows.row_mask)


def combine(
    own: Tensor, shard: VocabularyShard, temperature: Tensor, row_mask: Tensor | None = None
) -> RowStatistics:
    """Combine the statistics [tokens, 4] of all shards. Every tensor-parallel rank must call."""
    gathered = own[None] if shard.group is None else shard.gather(own)
    shards, tokens = gathered.shape[:2]
    outputs = RowStatistics.empty(tokens, temperature)
    combine_kernel[(triton.cdiv(tokens, _COMBINED_ROWS),)](
        gathered, packed(row_mask), temperature, *outputs, tokens, shards,
        ROWS=_COMBINED_ROWS, SHARDS=triton.next_power_of_2(shards),
    )  # fmt: skip
    return outputs


def write_gradient(
    rows: LogitRows, statistics: RowStatistics, incoming: Incoming, out: Tensor
) -> None:
    """Read the logits once and write once. `out` may be the logits or, in a narrower dtype, the
    front of their rows.
    """
    logits = rows.logits
    tokens, width = logits.shape
    if tokens == 0:
        return
    overlaps = out.dtype != logits.dtype and out.data_ptr() == logits.data_ptr()
    tile, tiles = _GRADIENT_TILES[logits.element_size()]
    line = 0 if overlaps else _columns_of_a_line(logits, out)
    reach = width + max(line - 1, 0)
    # Segments keep concurrent programs close in memory, and the last wave short.
    segment = tile * (triton.cdiv(reach, tile) if overlaps else tiles)
    segments = triton.cdiv(reach, segment)
    gradient_kernel[(tokens * segments,)](
        logits, logits.stride(0), out, out.stride(0), rows.targets.contiguous(),
        packed(rows.pass_mask), rows.temperature, rows.softcap,
        statistics.maximum, statistics.log_sum, statistics.entropy,
        *(packed(vector, torch.float32) for vector in incoming),
        rows.shard.columns, width, rows.shard.start, segments, segment,
        ORDERED=overlaps, LINE=line, TILE=tile, num_warps=_GRADIENT_WARPS,
    )  # fmt: skip


def packed(vector: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return a contiguous vector for the kernels."""
    return None if vector is None else vector.to(dtype or vector.dtype).contiguous()


def _columns_of_a_line(logits: Tensor, out: Tensor) -> int:
    """Return the columns of a cache line if rows begin inside lines and can be processed from a
    line's start, else 0.
    """
    tile, _ = _GRADIENT_TILES[logits.element_size()]
    line = min(_CACHE_LINE // logits.element_size(), tile)
    same = logits.stride(0) == out.stride(0) and logits.dtype == out.dtype
    return line if same and logits.stride(0) % line and logits.stride(0) % 16 == 0 else 0
