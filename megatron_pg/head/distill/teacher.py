"""A teacher as the divergence gets it: its logits, its hidden states with its output weight, or its k likeliest tokens.

Each gives, for some rows of the student, an object with the rows' divergence, and the gradient to the student's logits; the
teacher gets none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.distill.divergence import (
    Divergence,
    RowDivergence,
    row_divergence,
    write_divergence_gradient,
)
from megatron_pg.head.from_logits import row_passes
from megatron_pg.head.output_layer import multiply
from megatron_pg.head.vocabulary_shard import LogitRows, RowStatistics

_LEAST_REST = 1e-7
"""What is left of a distribution beside k of its tokens is held above it: the float32 sum of all exponentials of the student's
logits knows no less."""


@dataclass(frozen=True)
class WholeTeacher:
    """A teacher by its distribution over the whole vocabulary: give `logits`, or `hidden` and `weight`."""

    divergence: Divergence
    logits: Tensor | None = None
    """The logits [tokens, v/tp] of this rank's columns; not changed."""
    hidden: Tensor | None = None
    """The hidden states [tokens, teacher's hidden], the same on every tensor-parallel rank."""
    weight: Tensor | None = None
    """The teacher's output weight [v/tp, teacher's hidden]: its logits are made a chunk at a time."""

    def on(self, student: LogitRows, of_student: RowStatistics, rows: slice) -> WholeRows:
        if self.logits is not None:
            logits = self.logits[rows]
        elif self.hidden is not None and self.weight is not None:
            shape = len(student.logits), len(self.weight)
            logits = student.logits.new_empty(shape)  # as precise as the student's
            multiply(self.hidden[rows], self.weight.t(), logits)
        else:
            raise ValueError("a teacher is its logits, or its hidden states and its output weight")
        if logits.shape != student.logits.shape:
            raise ValueError(
                f"the teacher's logits are {list(logits.shape)} and the student's {list(student.logits.shape)}: they are "
                "of the same tokens and the same columns of one vocabulary"
            )
        mask = student.row_mask
        teacher = LogitRows(logits, student.targets, student.shard, student.temperature, mask)
        of_teacher = row_passes(logits).row_statistics(teacher)
        found = row_divergence(self.divergence, student, of_student, teacher, of_teacher)
        is_own = self.logits is None
        return WholeRows(self.divergence, student, of_student, teacher, of_teacher, found, is_own)


@dataclass(frozen=True)
class WholeRows:
    """`WholeTeacher` on some rows."""

    divergence: Divergence
    student: LogitRows
    of_student: RowStatistics
    teacher: LogitRows
    of_teacher: RowStatistics
    found: RowDivergence
    is_own: bool
    """Whether the teacher's logits may be overwritten."""

    @property
    def value(self) -> Tensor:
        return self.found.value

    def gradient(self, incoming: Tensor, dtype: torch.dtype) -> Tensor:
        out = self.teacher.logits
        if not self.is_own or out.dtype != dtype:
            out = torch.empty_like(out, dtype=dtype)
        write_divergence_gradient(
            self.divergence, self.student, self.of_student, self.teacher, self.of_teacher, self.found,
            incoming, out,
        )  # fmt: skip
        return out


@dataclass(frozen=True)
class TopKTeacher:
    """A teacher by its k likeliest tokens; the rest of the vocabulary is one bucket on both sides."""

    divergence: Divergence
    ids: Tensor
    """The global ids [tokens, k] int64, distinct in a row."""
    log_probs: Tensor
    """The teacher's log-probs [tokens, k] of them at the student's temperature."""

    def on(self, student: LogitRows, of_student: RowStatistics, rows: slice) -> TopKRows:
        return TopKRows(self.divergence, student, of_student, self.ids[rows], self.log_probs[rows])


@dataclass
class TopKRows:
    """`TopKTeacher` on some rows."""

    divergence: Divergence
    student: LogitRows
    of_student: RowStatistics
    ids: Tensor
    log_q: Tensor
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        student, statistics = self.student, self.of_student
        local = self.ids - student.shard.start
        self._is_here = (local >= 0) & (local < student.shard.columns)
        self._columns = torch.where(self._is_here, local, 0)
        logits = student.logits.gather(1, self._columns).to(statistics.maximum.dtype)
        exponents = (logits - statistics.maximum[:, None]) / student.temperature
        log_p = torch.where(self._is_here, exponents - statistics.log_sum[:, None], -math.inf)
        log_q = self.log_q.to(log_p.dtype)
        value, weighted = self.divergence.terms(log_p, log_q.where(self._is_here, -math.inf))
        value, weighted = (each.where(self._is_here, 0.0) for each in (value, weighted))
        self._p, self._weighted = log_p.exp(), weighted
        # In float64: of a rest of 1e-5, 1 minus a float32 sum leaves two digits.
        sums = torch.stack(
            [each.double().sum(1) for each in (log_p.double().exp(), value, weighted)], 1
        )
        if student.shard.group is not None and len(sums):
            dist.all_reduce(sums, group=student.shard.group)
        p_rest = (1 - sums[:, 0]).clamp(min=_LEAST_REST)
        q_rest = (1 - self.log_q.double().exp().sum(1)).clamp(min=_LEAST_REST)
        of_rest, weighted_rest = self.divergence.terms(p_rest.log(), q_rest.log())
        found = sums[:, 1] + of_rest, sums[:, 2] + weighted_rest, weighted_rest / p_rest
        value, self._moment, self._of_rest = (each.to(log_p.dtype) for each in found)
        self.value = value if student.row_mask is None else value.where(student.row_mask, 0.0)

    def gradient(self, incoming: Tensor, dtype: torch.dtype) -> Tensor:
        student, statistics = self.student, self.of_student
        live = incoming != 0 if student.row_mask is None else (incoming != 0) & student.row_mask
        scale = torch.where(live, incoming, 0.0).to(self._p.dtype) / student.temperature
        out = torch.zeros_like(student.logits, dtype=dtype)
        columns = student.shard.columns
        # Of a column of the rest; then what one of the k has beyond that.
        of_p = torch.where(live, (self._of_rest - self._moment) * scale, 0.0)
        exponents = (
            student.logits[:, :columns] - statistics.maximum[:, None]
        ) / student.temperature
        p = torch.where(live[:, None], (exponents - statistics.log_sum[:, None]).exp(), 0.0)
        more = (self._weighted - self._p * self._of_rest[:, None]) * scale[:, None]
        more = torch.where(live[:, None] & self._is_here, more, 0.0)
        gradient = p * of_p[:, None]
        if columns:  # a shard of padding alone has none that an index could name
            gradient.scatter_add_(1, self._columns, more)
        out[:, :columns] = gradient.to(dtype)
        return out
