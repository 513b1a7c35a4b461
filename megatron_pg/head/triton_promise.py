"""`megatron_pg.head.promise` as one Triton kernel, in place of some 14 launches."""

# Kernels are typed by Triton at their first launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.head.promise import RELATIVE_TOLERANCE

_BLOCK = 1024


@triton.jit
def _fill_with_nan(gradient, columns, BLOCK: tl.constexpr):
    nan = tl.full([BLOCK], float("nan"), tl.float32).to(gradient.dtype.element_ty)
    for first in range(0, columns, BLOCK):
        lanes = first + tl.arange(0, BLOCK)
        tl.store(gradient + lanes, nan, mask=lanes < columns)


@triton.jit
def spoil_kernel(
    arrived,
    promised,
    tolerance,
    before,
    now,
    now_stride,
    sampled_rows,
    sampled_columns,
    first_gradient,
    second_gradient,
    columns,
    SAMPLED: tl.constexpr,
    TWO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, which writes NaN to the first `columns` elements of each gradient, or nothing."""
    wanted = tl.load(promised).to(tl.float32)
    kept = tl.abs(tl.load(arrived).to(tl.float32) - wanted) <= tolerance * tl.abs(wanted)
    if SAMPLED:
        row = tl.arange(0, ROWS)[:, None].to(tl.int64)
        column = tl.arange(0, COLUMNS)[None, :]
        inside = (row < sampled_rows) & (column < sampled_columns)
        was = tl.load(before + row * sampled_columns + column, mask=inside, other=0.0) != 0.0
        still = tl.load(now + row * now_stride + column, mask=inside, other=0.0) != 0.0
        any_was = tl.sum(tl.sum(was.to(tl.int32), axis=1), axis=0) > 0
        any_is = tl.sum(tl.sum(still.to(tl.int32), axis=1), axis=0) > 0
        kept = kept & (any_is | (any_was == 0))
    if kept == 0:
        _fill_with_nan(first_gradient, columns, BLOCK)
        if TWO:
            _fill_with_nan(second_gradient, columns, BLOCK)


def spoil_unless_kept(
    arrived: Tensor,
    promised: Tensor,
    sample: tuple[Tensor, Tensor] | None,
    gradients: list[Tensor],
) -> None:
    """See `promise.spoil_unless_kept`."""
    gradients = [gradient for gradient in gradients if len(gradient)]
    if not gradients:
        return
    before, now = (None, None) if sample is None else sample
    rows, sampled_columns = (1, 1) if before is None else before.shape
    spoil_kernel[(1,)](
        arrived,
        promised,
        RELATIVE_TOLERANCE,
        before,
        now,
        0 if now is None else now.stride(0),
        rows,
        sampled_columns,
        gradients[0],
        gradients[-1],
        gradients[0].shape[1],
        SAMPLED=before is not None,
        TWO=len(gradients) == 2,
        ROWS=triton.next_power_of_2(rows),
        COLUMNS=triton.next_power_of_2(sampled_columns),
        BLOCK=_BLOCK,
    )
