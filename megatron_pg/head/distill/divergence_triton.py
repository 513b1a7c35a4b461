"""The passes of `divergence` over two models' logits as launches of Triton kernels, with the same signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.distill import divergence_kernels as kernels

_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}
_TILE, _WARPS = 4096, 8


def local_sums(
    divergence: Any, student: Any, of_student: Any, teacher: Any, of_teacher: Any
) -> Tensor:
    """One read of both; see `divergence.local_sums`."""
    sums: Tensor = of_student.maximum.new_zeros(len(student.logits), 2)
    mask = student.row_mask
    if len(sums):
        kernels.sums_kernel[(len(sums),)](
            *_of_rows(student, of_student), *_of_rows(teacher, of_teacher),
            None if mask is None else mask.contiguous(), student.temperature, sums,
            student.shard.columns, divergence.beta,
            KIND=_KINDS[divergence.kind], TILE=_TILE, num_warps=_WARPS,
        )  # fmt: skip
    return sums


def write_gradient(
    divergence: Any,
    student: Any,
    of_student: Any,
    teacher: Any,
    of_teacher: Any,
    moment: Tensor,
    incoming: Tensor,
    out: Tensor,
) -> None:
    """One read of both and one write; see `divergence.write_gradient`."""
    if len(out):
        kernels.gradient_kernel[(len(out),)](
            *_of_rows(student, of_student), *_of_rows(teacher, of_teacher),
            moment.contiguous(), incoming.to(torch.float32).contiguous(), student.temperature,
            out, out.stride(0), student.shard.columns, out.shape[1], divergence.beta,
            KIND=_KINDS[divergence.kind], TILE=_TILE, num_warps=_WARPS,
        )  # fmt: skip


def _of_rows(rows: Any, statistics: Any) -> tuple[Any, ...]:
    """What the kernels read of one model."""
    vectors = statistics.maximum.contiguous(), statistics.log_sum.contiguous()
    return rows.logits, rows.logits.stride(0), *vectors
