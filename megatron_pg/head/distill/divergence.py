"""The divergence of each row's distribution from a teacher's, over the whole vocabulary or over the teacher's top k.

With p of the student, q of the teacher, both of `softmax(logits / temperature)`:

    forward_kl    sum_v q log(q / p)
    reverse_kl    sum_v p log(p / q)
    jsd           beta sum_v q log(q / m) + (1 - beta) sum_v p log(p / m), m = beta q + (1 - beta) p (arXiv:2306.13649)

The gradient to the student's logits is `(g_v - p_v sum_u g_u) / temperature` with `g_v = p_v dD/dp_v` up to a multiple of
p_v. Triton kernels on CUDA, elsewhere plain torch, a few rows at a time. Under tensor parallelism a row's sums are added up over the group.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.rows_torch import chunk_slices, statistics_dtype
from megatron_pg.head.vocabulary_shard import LogitRows, RowStatistics

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
_CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Divergence:
    """Which divergence."""

    kind: Kind = "reverse_kl"
    beta: float = 0.5
    """Weight of the teacher in the mixture of `jsd`, inside (0, 1)."""

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """What each column adds to the divergence, and g: both 0 where there is no probability to weigh them by."""
        p, q = log_p.exp(), log_q.exp()
        if self.kind == "forward_kl":
            return torch.where(q == 0, 0.0, q * (log_q - log_p)), -q
        if self.kind == "reverse_kl":
            value = torch.where(p == 0, 0.0, p * (log_p - log_q))
            return value, value
        log_m = torch.logaddexp(log_q + math.log(self.beta), log_p + math.log1p(-self.beta))
        of_p = (1 - self.beta) * torch.where(p == 0, 0.0, p * (log_p - log_m))
        return of_p + self.beta * torch.where(q == 0, 0.0, q * (log_q - log_m)), of_p


class RowDivergence(NamedTuple):
    """The divergence of each row and the sum of its g, [tokens] each, equal on every tensor-parallel rank."""

    value: Tensor
    moment: Tensor


class TeacherRows(Protocol):
    """A teacher on some rows of the student."""

    @property
    def value(self) -> Tensor:
        """The divergence [rows]."""

    def gradient(self, incoming: Tensor, dtype: torch.dtype) -> Tensor:
        """`incoming` [rows] times the gradient to the student's logits, [rows, v/tp], while these are still there."""


class Teacher(Protocol):
    """A teacher of all tokens of a call."""

    def on(self, student: LogitRows, of_student: RowStatistics, rows: slice) -> TeacherRows:
        """The teacher on the rows that the student's logits are of; every tensor-parallel rank must call."""


def row_divergence(
    divergence: Divergence,
    student: LogitRows,
    of_student: RowStatistics,
    teacher: LogitRows,
    of_teacher: RowStatistics,
) -> RowDivergence:
    """The divergence of each row; every tensor-parallel rank must call. One all-reduce of `[tokens, 2]`.

    Args:
        student, teacher: logits [tokens, v/tp] of the same columns.
        of_student, of_teacher: their statistics, of `row_statistics`.
    """
    passes = _triton_passes(student, teacher)
    local = local_sums if passes is None else passes.local_sums
    sums = local(divergence, student, of_student, teacher, of_teacher)
    if student.shard.group is not None and len(sums):
        dist.all_reduce(sums, group=student.shard.group)
    if student.row_mask is not None:
        sums = torch.where(student.row_mask[:, None], sums, 0.0)
    return RowDivergence(*sums.unbind(1))


def write_divergence_gradient(
    divergence: Divergence,
    student: LogitRows,
    of_student: RowStatistics,
    teacher: LogitRows,
    of_teacher: RowStatistics,
    of_rows: RowDivergence,
    incoming: Tensor,
    out: Tensor,
) -> None:
    """Writes `incoming` [tokens] times the gradient to the student's logits into `out`, which may be the teacher's logits.

    A row whose incoming gradient is 0 gets exactly 0.
    """
    if student.row_mask is not None:
        incoming = torch.where(student.row_mask, incoming, 0.0)
    passes = _triton_passes(student, teacher)
    write = write_gradient if passes is None else passes.write_gradient
    write(divergence, student, of_student, teacher, of_teacher, of_rows.moment, incoming, out)


@functools.cache
def _triton() -> ModuleType | None:
    try:
        from megatron_pg.head.distill import divergence_triton
    except ImportError:
        return None
    return divergence_triton


def _triton_passes(student: LogitRows, teacher: LogitRows) -> ModuleType | None:
    """The module of Triton launches for logits that they take; None for the two functions below."""
    both = (student.logits, teacher.logits)
    is_taken = all(x.is_cuda and x.dtype != torch.float64 and x.stride(1) == 1 for x in both)
    return _triton() if is_taken else None


def local_sums(
    divergence: Divergence,
    student: LogitRows,
    of_student: RowStatistics,
    teacher: LogitRows,
    of_teacher: RowStatistics,
) -> Tensor:
    """What this shard's columns add to the divergence and to the sum of g, [tokens, 2]."""
    sums = of_student.maximum.new_zeros(len(student.logits), 2)
    for part in _row_chunks(student.logits):
        log_p = _log_softmax(student, of_student, part)
        log_q = _log_softmax(teacher, of_teacher, part)
        for column, each in enumerate(divergence.terms(log_p, log_q)):
            sums[part, column] = each.sum(1)
    return sums


def write_gradient(
    divergence: Divergence,
    student: LogitRows,
    of_student: RowStatistics,
    teacher: LogitRows,
    of_teacher: RowStatistics,
    moment: Tensor,
    incoming: Tensor,
    out: Tensor,
) -> None:
    """Writes the gradient, with `moment` [tokens] the sum of g over all shards."""
    columns, live = student.shard.columns, incoming != 0
    scale = incoming.to(moment.dtype) / student.temperature
    for part in _row_chunks(student.logits):
        log_p = _log_softmax(student, of_student, part)
        log_q = _log_softmax(teacher, of_teacher, part)
        _, weighted = divergence.terms(log_p, log_q)
        gradient = (weighted - log_p.exp() * moment[part, None]) * scale[part, None]
        out[part, :columns] = torch.where(live[part, None], gradient, 0.0).to(out.dtype)
        out[part, columns:] = 0


def _row_chunks(logits: Tensor) -> list[slice]:
    return chunk_slices(0, len(logits), max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1])))


def _log_softmax(rows: LogitRows, statistics: RowStatistics, part: slice) -> Tensor:
    """The log-probabilities of this shard's columns in some rows."""
    logits = rows.logits[part, : rows.shard.columns].to(statistics_dtype(rows.logits.dtype))
    exponents = (logits - statistics.maximum[part, None]) / rows.temperature
    return exponents - statistics.log_sum[part, None]
