"""Triton kernels around exponentials with an offset for each tile: statistics, factors of rows and strips, gradient."""

# Kernels are typed by Triton at their first launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_pg.head.kernels import LN_2, LOG2_E, SMALLEST, _incoming

# Exponents of two between which factors stay, so that the gradient at a target divided by its factors fits bfloat16.
LEAST_STRIP = tl.constexpr(-60.0)
LEAST_ROW = tl.constexpr(-40.0)


@triton.jit
def _local_target(targets, row, start, columns):
    """Column of the row's target, or -1 where another shard holds it."""
    local = tl.load(targets + row) - start
    return tl.where((local >= 0) & (local < columns), local, -1)


@triton.jit
def tile_statistics_kernel(
    offsets, sums, dots, target_logits, targets, temperature, shard_out,
    tiles, vocab_size,
    TILES: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of one row's local columns to `shard_out` [rows, 4], without `dots` with NaN in their place.

    `target_logits` is -inf where another shard holds the target; of a target outside the vocabulary NaN comes out.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILES)
    inside = lanes < tiles
    own = row * tiles + lanes
    offset = tl.load(offsets + own, mask=inside, other=-float("inf"))
    largest = tl.max(offset, axis=0)
    shift = tl.where(inside, offset - largest, 0.0)
    shrink = tl.exp2(shift)
    sums_of_tiles = tl.load(sums + own, mask=inside, other=0.0)
    total = tl.sum(shrink * sums_of_tiles, axis=0)
    dot = tl.full((), float("nan"), tl.float32)
    if dots is not None:
        dots_of_tiles = tl.load(dots + own, mask=inside, other=0.0)
        dot = tl.sum(shrink * (dots_of_tiles + shift * sums_of_tiles), axis=0)
    value = tl.load(temperature)
    maximum = largest * LN_2 * value
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocab_size)
    target_logit = tl.where(known, tl.load(target_logits + row), float("nan"))
    out = shard_out + row * 4
    tl.store(out, maximum)
    tl.store(out + 1, total)
    tl.store(out + 2, dot)
    tl.store(out + 3, target_logit)


@triton.jit
def row_factors_kernel(
    exponentials, offsets, hidden, targets, temperature, maximum, log_sum, log_probs, grad_log_probs,
    factors_out, references_out, scaled_hidden_out,
    rows, tiles, columns, hidden_size, hidden_stride, start,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the factor of one row, to which exponent of two its strips refer, its hidden states times the factor, and in
    place of the target's exponential that which gives, times both factors, the gradient of the target's logit.

    Rows from `rows` on fill up a tile: their factor is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILES)
    offset = tl.load(offsets + row * tiles + lanes, mask=lanes < tiles, other=-float("inf"))
    reference = tl.max(offset, axis=0)
    factor = tl.full((), 0.0, tl.float32)
    if row < rows:
        to_log_prob = tl.load(grad_log_probs + row)
        value = tl.load(temperature)
        log2_total = (tl.load(maximum + row) / value + tl.load(log_sum + row)) * LOG2_E
        reference = tl.maximum(reference, tl.floor(log2_total) + LEAST_ROW)
        base = exponentials + row * columns
        if to_log_prob != 0.0:
            factor = -to_log_prob / value * tl.exp2(reference - log2_total)
            local = _local_target(targets, row, start, columns)
            if local >= 0:
                of_tile = tl.load(offsets + row * tiles + local // TILE)
                strip = tl.maximum(of_tile - reference, LEAST_STRIP)
                less_one = tl.exp(tl.load(log_probs + row)) - 1.0
                at_target = less_one * tl.exp2(log2_total - reference - strip)
                tl.store(base + local, at_target.to(exponentials.dtype.element_ty))
        elif not (tl.abs(log2_total) < float("inf")):
            # 0 times such an exponential would be NaN.
            for first in range(0, columns, BLOCK):
                lanes_of_row = first + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], exponentials.dtype.element_ty)
                tl.store(base + lanes_of_row, zeros, mask=lanes_of_row < columns)
    tl.store(factors_out + row, factor)
    tl.store(references_out + row, reference)
    for first in range(0, hidden_size, BLOCK):
        of_hidden = first + tl.arange(0, BLOCK)
        inside = of_hidden < hidden_size
        state = tl.load(hidden + row * hidden_stride + of_hidden, mask=inside, other=0.0)
        scaled = tl.where(factor == 0.0, 0.0, state.to(tl.float32) * factor)
        scaled = scaled.to(scaled_hidden_out.dtype.element_ty)
        tl.store(scaled_hidden_out + row * hidden_size + of_hidden, scaled, mask=inside)


@triton.jit
def strip_factors_kernel(
    offsets, references, strips_out, rows, tiles,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Writes 2 ** (offset - reference) of TILES tiles and ROWS rows to `strips_out` [tiles * REPEAT, rows]."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (tile < tiles)[None, :]
    offset = tl.load(offsets + row[:, None] * tiles + tile[None, :], mask=inside, other=0.0)
    reference = tl.load(references + row, mask=row < rows, other=0.0)
    exponent = tl.maximum(offset - reference[:, None], LEAST_STRIP)
    # NaN - NaN, of a row that is NaN: it shows through the exponentials where the row counts.
    strip = tl.exp2(tl.where(exponent == exponent, exponent, 0.0))
    strip = tl.trans(strip.to(strips_out.dtype.element_ty))
    inside = tl.trans(inside)
    for repeat in tl.static_range(REPEAT):
        at = (tile[:, None] * REPEAT + repeat) * rows + row[None, :]
        tl.store(strips_out + at, strip, mask=inside)


@triton.jit
def exponential_gradient_kernel(
    exponentials, offsets, targets, temperature, maximum, log_sum, log_probs, entropy,
    grad_log_probs, grad_entropy,
    columns, tiles, start, segments, segment,
    OFFSET_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Overwrites a segment of one row of exponentials with the gradient of its logits, as `kernels.gradient_kernel` does."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // segments).to(tl.int64)
    begin = program % segments * segment
    end = tl.minimum(begin + segment, columns)
    base = exponentials + row * columns
    to_log_prob, to_entropy = _incoming(grad_log_probs, row), _incoming(grad_entropy, row)
    if (to_log_prob != 0.0) | (to_entropy != 0.0):
        value = tl.load(temperature)
        log2_total = (tl.load(maximum + row) / value + tl.load(log_sum + row)) * LOG2_E
        constant = -(to_log_prob + to_entropy * tl.load(entropy + row)) / value
        slope = -to_entropy * LN_2 / value
        to_target = to_log_prob / value
        local = _local_target(targets, row, start, columns)
        log2_at_target = tl.load(log_probs + row) * LOG2_E
        for first in range(begin, end, TILE):
            lanes = first + tl.arange(0, TILE)
            inside = lanes < end
            of_tile = tl.load(offsets + row * tiles + lanes // OFFSET_TILE, mask=inside, other=0.0)
            exponential = tl.load(base + lanes, mask=inside, other=0.0).to(tl.float32)
            shift = of_tile - log2_total
            at_target = lanes == local
            log2_p = tl.where(at_target, log2_at_target, tl.log2(exponential) + shift)
            p = tl.where(at_target, tl.exp2(log2_at_target), exponential * tl.exp2(shift))
            # 0 * -inf is NaN: bound the logarithm. A NaN still shows, through p.
            gradient = p * (constant + slope * tl.maximum(log2_p, SMALLEST))
            gradient += tl.where(at_target, to_target, 0.0)
            tl.store(base + lanes, gradient.to(exponentials.dtype.element_ty), mask=inside)
    else:
        zeros = tl.zeros([TILE], exponentials.dtype.element_ty)
        for first in range(begin, end, TILE):
            lanes = first + tl.arange(0, TILE)
            tl.store(base + lanes, zeros, mask=lanes < end)
