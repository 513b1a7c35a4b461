"""A teacher for the divergence: its logits, its hidden states with its output weight, or its k likeliest tokens.

Each is a `Teacher`, and compares some rows as `TeacherRows`. The teacher gets no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.backend import choose, row_passes
from megatron_pg.head.distill import divergence as passes_torch
from megatron_pg.head.distill.divergence import Divergence, LogitPair
from megatron_pg.head.factor_gradients import multiply
from megatron_pg.head.vocabulary_shard import LogitRows, RowStatistics

_LEAST_REST = 1e-7
"""The least probability of all tokens beside the k: the float32 sum of the exponentials of the student's logits resolves no
less."""


def divergence_passes(pair: LogitPair) -> ModuleType:
    """Return `divergence_triton` or `divergence`."""
    logits = pair.student.logits, pair.teacher.logits
    return choose("distill.divergence_triton", passes_torch, *logits)


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

    def on(self, student: LogitRows, statistics: RowStatistics, rows: slice) -> WholeRows:
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
        teacher_statistics = row_passes(logits).row_statistics(teacher)
        pair = LogitPair(self.divergence, student, statistics, teacher, teacher_statistics)
        sums = divergence_passes(pair).local_sums(pair)
        if student.shard.group is not None and len(sums):
            dist.all_reduce(sums, group=student.shard.group)
        if mask is not None:
            sums = torch.where(mask[:, None], sums, 0.0)
        return WholeRows(pair, sums[:, 0], sums[:, 1], may_overwrite=self.logits is None)


@dataclass(frozen=True)
class WholeRows:
    """`WholeTeacher` on some rows."""

    pair: LogitPair
    value: Tensor
    """The divergence [rows], equal on every tensor-parallel rank."""
    moment: Tensor
    """The sum [rows] of g, equal on every tensor-parallel rank."""
    may_overwrite: bool
    """True where the teacher's logits are of no further use."""

    def gradient(self, incoming: Tensor, dtype: torch.dtype) -> Tensor:
        pair, out = self.pair, self.pair.teacher.logits
        if not self.may_overwrite or out.dtype != dtype:
            out = torch.empty_like(out, dtype=dtype)
        if pair.student.row_mask is not None:
            incoming = torch.where(pair.student.row_mask, incoming, 0.0)
        divergence_passes(pair).write_gradient(pair, self.moment, incoming, out)
        return out


@dataclass(frozen=True)
class TopKTeacher:
    """A teacher by its k likeliest tokens; the rest of the vocabulary is one bucket on both sides."""

    divergence: Divergence
    ids: Tensor
    """The global ids [tokens, k] int64, distinct in a row."""
    log_probs: Tensor
    """The teacher's log-probs [tokens, k] of the ids at the student's temperature."""

    def on(self, student: LogitRows, statistics: RowStatistics, rows: slice) -> TopKRows:
        return TopKRows(self.divergence, student, statistics, self.ids[rows], self.log_probs[rows])


@dataclass
class TopKRows:
    """`TopKTeacher` on some rows."""

    divergence: Divergence
    student: LogitRows
    statistics: RowStatistics
    ids: Tensor
    log_q: Tensor
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        student, statistics = self.student, self.statistics
        local = self.ids - student.shard.start
        self._is_here = (local >= 0) & (local < student.shard.columns)
        self._columns = torch.where(self._is_here, local, 0)
        logits = student.logits.gather(1, self._columns).to(statistics.maximum.dtype)
        exponents = (logits - statistics.maximum[:, None]) / student.temperature
        log_p = torch.where(self._is_here, exponents - statistics.log_sum[:, None], -math.inf)
        log_q = self.log_q.to(log_p.dtype)
        value, weighted = self.divergence.terms(log_p, log_q.where(self._is_here, -math.inf))
        value, weighted = (term.where(self._is_here, 0.0) for term in (value, weighted))
        self._p, self._weighted = log_p.exp(), weighted
        # In float64: of a rest of 1e-5, 1 minus a float32 sum leaves two digits.
        terms = log_p.double().exp(), value, weighted
        sums = torch.stack([term.double().sum(1) for term in terms], 1)
        if student.shard.group is not None and len(sums):
            dist.all_reduce(sums, group=student.shard.group)
        p_rest = (1 - sums[:, 0]).clamp(min=_LEAST_REST)
        q_rest = (1 - self.log_q.double().exp().sum(1)).clamp(min=_LEAST_REST)
        value_rest, weighted_rest = self.divergence.terms(p_rest.log(), q_rest.log())
        results = sums[:, 1] + value_rest, sums[:, 2] + weighted_rest, weighted_rest / p_rest
        value, self._moment, self._rest = (result.to(log_p.dtype) for result in results)
        self.value = value if student.row_mask is None else value.where(student.row_mask, 0.0)

    def gradient(self, incoming: Tensor, dtype: torch.dtype) -> Tensor:
        student, statistics = self.student, self.statistics
        live = incoming != 0 if student.row_mask is None else (incoming != 0) & student.row_mask
        scale = torch.where(live, incoming, 0.0).to(self._p.dtype) / student.temperature
        out = torch.zeros_like(student.logits, dtype=dtype)
        columns = student.shard.columns
        # The gradient of a column of the rest; then the k columns' excess over it.
        factor = torch.where(live, (self._rest - self._moment) * scale, 0.0)
        logits = student.logits[:, :columns]
        exponents = (logits - statistics.maximum[:, None]) / student.temperature
        p = torch.where(live[:, None], (exponents - statistics.log_sum[:, None]).exp(), 0.0)
        more = (self._weighted - self._p * self._rest[:, None]) * scale[:, None]
        more = torch.where(live[:, None] & self._is_here, more, 0.0)
        gradient = p * factor[:, None]
        if columns:  # a shard of padding alone has none that an index could name
            gradient.scatter_add_(1, self._columns, more)
        out[:, :columns] = gradient.to(dtype)
        return out
