"""The Triton kernel that overwrites the logits with their gradient; layout and offsets are as in `triton_statistics`."""

# Kernels are typed by Triton at their first launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_pg.head.triton_statistics import LN_2, LOG2_E, SMALLEST


@triton.jit
def _gradient(logits, at_target, maximum, log2_sum, constant, slope, to_target, scale, ENTROPY):
    """p * (constant + slope * log2 p), and `to_target` more at the target."""
    log2_p = (logits - maximum) * scale - log2_sum
    p = tl.exp2(log2_p)
    factor = constant
    if ENTROPY:
        # 0 * -inf is NaN: bound the logarithm. A NaN logit still shows, through p.
        factor = constant + slope * tl.maximum(log2_p, SMALLEST)
    return p * factor + tl.where(at_target, to_target, 0.0)


@triton.jit
def _gradient_tile(
    base, out_base, first, columns, end, local, maximum, log2_sum, constant, slope, to_target, scale,
    ENTROPY: tl.constexpr, PARTIAL: tl.constexpr, ORDERED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient of TILE columns from `first` on; PARTIAL: some may lie outside [0, columns), or from `end` on."""
    lanes = first + tl.arange(0, TILE)
    inside = (lanes >= 0) & (lanes < columns)
    if PARTIAL:
        tile = tl.load(base + lanes, mask=inside, other=0.0).to(tl.float32)
    else:
        tile = tl.load(base + lanes).to(tl.float32)
    gradient = _gradient(
        tile, lanes == local, maximum, log2_sum, constant, slope, to_target, scale, ENTROPY
    )
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
def gradient_kernel(
    logits,
    row_stride,
    out,
    out_stride,
    targets,
    row_mask,
    temperature,
    maximum,
    log_sum,
    entropy,
    grad_log_probs,
    grad_entropy,
    columns,
    padded_columns,
    start,
    segments,
    segment,
    LOG_PROBS: tl.constexpr,
    ENTROPY: tl.constexpr,
    MASKED: tl.constexpr,
    ORDERED: tl.constexpr,
    LINE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the gradient to a segment of one row of logits; `out` may be the logits themselves.

    Programs begin with the last row, which the statistics kernel read last and the cache still holds.
    LINE: where rows do not begin at cache lines, the columns of a line. Tiles then begin at lines, the first one before
    its row: with tiles that share lines, in-place gradients of such rows took a quarter longer on an H200.
    ORDERED: `out` is a narrower view of the very memory of `logits` (a bfloat16 gradient at the
    front of each float32 row), and the segment is the whole row. A tile's stores then land on columns
    of this tile or of earlier ones, so a barrier between the loads and the stores of each tile is enough.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // segments).to(tl.int64)
    begin = program % segments * segment
    if LINE > 0:
        # Divisible by 8, as row_stride is: accesses stay 16 bytes wide.
        begin -= tl.multiple_of((row * row_stride % LINE).to(tl.int32), 8)
    end = tl.minimum(begin + segment, padded_columns)
    to_log_prob = tl.full((), 0.0, tl.float32)
    to_entropy = tl.full((), 0.0, tl.float32)
    if LOG_PROBS:
        to_log_prob = tl.load(grad_log_probs + row)
    if ENTROPY:
        to_entropy = tl.load(grad_entropy + row)
    live = (to_log_prob != 0.0) | (to_entropy != 0.0)
    if MASKED:
        live = live & (tl.load(row_mask + row) != 0)
    base = logits + row * row_stride
    out_base = out + row * out_stride
    if live:
        value = tl.load(temperature)
        scale = LOG2_E / value
        row_maximum = tl.load(maximum + row)
        log2_sum = tl.load(log_sum + row) * LOG2_E
        constant = -(to_log_prob + to_entropy * tl.load(entropy + row)) / value
        slope = -to_entropy * LN_2 / value
        to_target = to_log_prob / value
        local = tl.load(targets + row) - start
        local = tl.where((local >= 0) & (local < columns), local, -1).to(tl.int32)
        if LINE > 0:
            if begin < 0:
                _gradient_tile(
                    base, out_base, begin, columns, end, local, row_maximum, log2_sum, constant, slope,
                    to_target, scale, ENTROPY, True, ORDERED, TILE,
                )  # fmt: skip
                begin += TILE
        full = begin + tl.maximum(tl.minimum(end, columns) - begin, 0) // TILE * TILE
        for first in range(begin, full, TILE):
            _gradient_tile(
                base, out_base, first, columns, end, local, row_maximum, log2_sum, constant, slope,
                to_target, scale, ENTROPY, False, ORDERED, TILE,
            )  # fmt: skip
        for first in range(full, end, TILE):
            _gradient_tile(
                base, out_base, first, columns, end, local, row_maximum, log2_sum, constant, slope,
                to_target, scale, ENTROPY, True, ORDERED, TILE,
            )  # fmt: skip
    else:
        zeros = tl.zeros([TILE], out.dtype.element_ty)
        for first in range(begin, end, TILE):
            lanes = first + tl.arange(0, TILE)
            tl.store(out_base + lanes, zeros, mask=(lanes >= 0) & (lanes < end))
