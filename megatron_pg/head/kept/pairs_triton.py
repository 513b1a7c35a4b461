"""The sparse layer's products as Triton kernels, with the functions and signatures of `sets`.

A program's order of summation depends neither on other rows nor on timing, so gradients are bitwise
repeatable.
"""

# Kernels are typed by Triton at their first launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.head.kept.sets import KeptPairs


@triton.jit
def logits_kernel(
    hidden, hidden_stride, weight, weight_stride, rows, columns, is_here, out, pairs, size,
    PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the logits of PAIRS pairs. A column of another rank is not read and gets minus
    infinity.
    """
    places = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = places < pairs
    here = tl.load(is_here + places, mask=inside, other=0) != 0
    row = tl.load(rows + places, mask=here, other=0)
    column = tl.load(columns + places, mask=here, other=0)
    left, right = hidden + row * hidden_stride, weight + column * weight_stride
    total = tl.zeros([PAIRS, TILE], tl.float32)
    for first in range(0, size, TILE):
        lanes = first + tl.arange(0, TILE)
        mask = here[:, None] & (lanes < size)[None, :]
        h = tl.load(left[:, None] + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(right[:, None] + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
        total += h * w
    logits = tl.where(here, tl.sum(total, axis=1), -float("inf"))
    tl.store(out + places, logits, mask=inside)


@triton.jit
def _product(
    coefficients, order, begin, end, source, stride, index, lanes, lanes_inside,
    PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum coefficient times a tile of a row of `source` over the pairs at the places [begin, end)
    of `order`. A row with coefficient 0 is not read.
    """
    total = tl.zeros([PAIRS, TILE], tl.float32)
    for first in range(begin, end, PAIRS):
        places = first + tl.arange(0, PAIRS)
        inside = places < end
        pair = places
        if order is not None:
            pair = tl.load(order + places, mask=inside, other=0)
        coefficient = tl.load(coefficients + pair, mask=inside, other=0.0)
        live = coefficient != 0.0
        at = tl.load(index + pair, mask=live, other=0)
        mask = live[:, None] & lanes_inside[None, :]
        values = tl.load(source + at[:, None] * stride + lanes[None, :], mask=mask, other=0.0)
        total += coefficient[:, None] * values.to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit
def hidden_gradient_kernel(
    coefficients, offsets, columns, weight, weight_stride, out, out_stride, size,
    PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write TILE elements of one hidden state's gradient."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * TILE + tl.arange(0, TILE)
    lanes_inside = lanes < size
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    total = _product(
        coefficients, None, begin, end, weight, weight_stride, columns, lanes,
        lanes_inside, PAIRS, TILE,
    )  # fmt: skip
    tl.store(out + row * out_stride + lanes, total.to(out.dtype.element_ty), mask=lanes_inside)


@triton.jit
def weight_gradient_kernel(
    coefficients, order, keys, ends, rows, hidden, hidden_stride, out, out_stride,
    pairs, columns, size,
    PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add TILE elements of every weight column's gradient to `out`, each column in one program.

    `order` sorts the pairs by column, `keys` are the sorted columns (`columns` for a column of
    another rank), and `ends` has the end of each column's places.
    """
    lanes = tl.program_id(1) * TILE + tl.arange(0, TILE)
    lanes_inside = lanes < size
    for place in range(tl.program_id(0), pairs, tl.num_programs(0)):
        key = tl.load(keys + place)
        before = tl.load(keys + place - 1, mask=place > 0, other=-1)
        if (key != before) & (key < columns):
            total = _product(
                coefficients, order, place, tl.load(ends + place), hidden, hidden_stride, rows,
                lanes, lanes_inside, PAIRS, TILE,
            )  # fmt: skip
            at = out + key.to(tl.int64) * out_stride + lanes
            total += tl.load(at, mask=lanes_inside, other=0.0).to(tl.float32)
            tl.store(at, total.to(out.dtype.element_ty), mask=lanes_inside)


_LOGITS_TILE, _HIDDEN_TILE, _WEIGHT_TILE = (8, 256, 4), (4, 512, 2), (2, 512, 2)
"""The pairs and hidden elements that a program takes at a time, and its warps."""
_WEIGHT_PROGRAMS = 8448
"""The programs that share the weight's columns: 64 per multiprocessor of an H100."""


def pair_logits(hidden: Tensor, weight: Tensor, pairs: KeptPairs) -> Tensor:
    """Read the kept columns once. See `sets.pair_logits`."""
    (per_program, tile, warps), count, size = _LOGITS_TILE, len(pairs.rows), hidden.shape[1]
    logits = pairs.temperature.new_empty(count)
    if count:
        logits_kernel[(triton.cdiv(count, per_program),)](
            hidden, hidden.stride(0), weight, weight.stride(0), pairs.rows, pairs.columns,
            pairs.is_here, logits, count, size, PAIRS=per_program, TILE=tile, num_warps=warps,
        )  # fmt: skip
    return logits


def write_hidden_gradient(gradient: Tensor, weight: Tensor, pairs: KeptPairs, out: Tensor) -> None:
    """Read the kept columns once. See `sets.write_hidden_gradient`."""
    (per_step, tile, warps), (tokens, size) = _HIDDEN_TILE, out.shape
    if tokens:
        hidden_gradient_kernel[(tokens, triton.cdiv(size, tile))](
            gradient, pairs.offsets, pairs.columns, weight, weight.stride(0),
            out, out.stride(0), size, PAIRS=per_step, TILE=tile, num_warps=warps,
        )  # fmt: skip


def add_weight_gradient(gradient: Tensor, hidden: Tensor, pairs: KeptPairs, out: Tensor) -> None:
    """Sort the pairs by column and sum each column in one program. See
    `sets.add_weight_gradient`.
    """
    count, size, columns = len(pairs.rows), hidden.shape[1], pairs.shard.columns
    per_step, tile, warps = _WEIGHT_TILE
    if count == 0:
        return
    keys = torch.where(pairs.is_here, pairs.columns, columns).int()
    keys, order = torch.sort(keys, stable=True)
    ends = torch.searchsorted(keys, keys, right=True)
    weight_gradient_kernel[(min(count, _WEIGHT_PROGRAMS), triton.cdiv(size, tile))](
        gradient, order, keys, ends, pairs.rows, hidden, hidden.stride(0), out, out.stride(0),
        count, columns, size, PAIRS=per_step, TILE=tile, num_warps=warps,
    )  # fmt: skip
