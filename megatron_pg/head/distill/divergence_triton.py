"""The divergence's passes as Triton kernels, one row per program, with the functions and signatures
of `divergence`.
"""

# Kernels are typed by Triton at their first launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.head.distill.divergence import LogitPair
from megatron_pg.head.rows_triton import LN_2, SMALLEST, log2, packed, write_zeros

_TILE, _WARPS = 4096, 8


@triton.jit
def _log_softmax(base, lanes, mask, maximum, log_sum, inverse_temperature):
    """Return a tile's log-probabilities, but at least SMALLEST, which is also the value outside the
    row.
    """
    logits = tl.load(base + lanes, mask=mask, other=-float("inf")).to(tl.float32)
    log_p = (logits - maximum) * inverse_temperature - log_sum
    # 0 * -inf would be NaN. A NaN logit still propagates through the exponential.
    return tl.where(log_p < SMALLEST, SMALLEST, log_p)


@triton.jit
def _terms(log_p, log_q, beta, KIND: tl.constexpr, SPECIAL: tl.constexpr):
    """Return each column's part of the divergence and g, like `Divergence.terms`."""
    p, q = tl.exp(log_p), tl.exp(log_q)
    if KIND == "forward_kl":
        value = tl.where(q == 0.0, 0.0, q * (log_q - log_p))
        weighted = -q
    elif KIND == "reverse_kl":
        value = tl.where(p == 0.0, 0.0, p * (log_p - log_q))
        weighted = value
    else:
        # The bound is below every float32 logarithm. A mixture of 0 has no weight.
        log_m = tl.maximum(log2(beta * q + (1.0 - beta) * p, SPECIAL), -150.0) * LN_2
        weighted = (1.0 - beta) * tl.where(p == 0.0, 0.0, p * (log_p - log_m))
        value = weighted + beta * tl.where(q == 0.0, 0.0, q * (log_q - log_m))
    return p, value, weighted


@triton.jit
def sums_kernel(
    student, student_stride, student_maximum, student_log_sum,
    teacher, teacher_stride, teacher_maximum, teacher_log_sum,
    row_mask, temperature, out, columns, beta,
    KIND: tl.constexpr, SPECIAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write one row of the sums [tokens, 2] over this shard's columns."""
    row = tl.program_id(0).to(tl.int64)
    live = tl.full((), 1, tl.int1)
    if row_mask is not None:
        live = tl.load(row_mask + row) != 0
    value, moment = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    if live:
        inverse = 1.0 / tl.load(temperature)
        own, own_sum = tl.load(student_maximum + row), tl.load(student_log_sum + row)
        other, other_sum = tl.load(teacher_maximum + row), tl.load(teacher_log_sum + row)
        student_row, teacher_row = student + row * student_stride, teacher + row * teacher_stride
        for first in range(0, columns, TILE):
            lanes = first + tl.arange(0, TILE)
            mask = lanes < columns
            log_p = _log_softmax(student_row, lanes, mask, own, own_sum, inverse)
            log_q = _log_softmax(teacher_row, lanes, mask, other, other_sum, inverse)
            _, values, weighted = _terms(log_p, log_q, beta, KIND, SPECIAL)
            value += values
            moment += weighted
    tl.store(out + row * 2, tl.sum(value, axis=0))
    tl.store(out + row * 2 + 1, tl.sum(moment, axis=0))


@triton.jit
def gradient_kernel(
    student, student_stride, student_maximum, student_log_sum,
    teacher, teacher_stride, teacher_maximum, teacher_log_sum,
    moment, incoming, temperature, out, out_stride, columns, width, beta,
    KIND: tl.constexpr, SPECIAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one row. Padding columns and rows without a gradient get 0. `out` may
    be the teacher's logits.
    """
    row = tl.program_id(0).to(tl.int64)
    coefficient = tl.load(incoming + row).to(tl.float32)
    out_row = out + row * out_stride
    if coefficient != 0.0:
        inverse = 1.0 / tl.load(temperature)
        own, own_sum = tl.load(student_maximum + row), tl.load(student_log_sum + row)
        other, other_sum = tl.load(teacher_maximum + row), tl.load(teacher_log_sum + row)
        of_row = tl.load(moment + row)
        student_row, teacher_row = student + row * student_stride, teacher + row * teacher_stride
        for first in range(0, width, TILE):
            lanes = first + tl.arange(0, TILE)
            mask = lanes < columns
            log_p = _log_softmax(student_row, lanes, mask, own, own_sum, inverse)
            log_q = _log_softmax(teacher_row, lanes, mask, other, other_sum, inverse)
            p, _, weighted = _terms(log_p, log_q, beta, KIND, SPECIAL)
            gradient = (weighted - p * of_row) * (coefficient * inverse)
            gradient = tl.where(mask, gradient, 0.0).to(out.dtype.element_ty)
            tl.store(out_row + lanes, gradient, mask=lanes < width)
    else:
        write_zeros(out_row, 0, width, TILE)


def local_sums(pair: LogitPair) -> Tensor:
    """Read both models' logits once. See `divergence.local_sums`."""
    student = pair.student
    sums = student.temperature.new_zeros(len(student.logits), 2)
    if len(sums):
        sums_kernel[(len(sums),)](
            *_inputs(pair), packed(student.row_mask), student.temperature, sums,
            student.shard.columns, pair.divergence.beta,
            KIND=pair.divergence.kind, SPECIAL=pair.student.logits.is_cuda,
            TILE=_TILE, num_warps=_WARPS,
        )  # fmt: skip
    return sums


def write_gradient(pair: LogitPair, moment: Tensor, incoming: Tensor, out: Tensor) -> None:
    """Read both models' logits once and write once. See `divergence.write_gradient`."""
    if len(out):
        gradient_kernel[(len(out),)](
            *_inputs(pair), packed(moment), packed(incoming, torch.float32),
            pair.student.temperature,
            out, out.stride(0), pair.student.shard.columns, out.shape[1], pair.divergence.beta,
            KIND=pair.divergence.kind, SPECIAL=pair.student.logits.is_cuda,
            TILE=_TILE, num_warps=_WARPS,
        )  # fmt: skip


def _inputs(pair: LogitPair) -> list[Tensor | int | None]:
    """Return the kernels' arguments for both models."""
    arguments: list[Tensor | int | None] = []
    for logits, own in pair.models:
        arguments += [logits, logits.stride(0), packed(own.maximum), packed(own.log_sum)]
    return arguments
