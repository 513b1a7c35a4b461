"""Teachers, given as logits, as hidden states with an output weight, or as the k likeliest
tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.backend import choose, row_passes
from megatron_pg.head.distill import divergence as passes_torch
from megatron_pg.head.distill.divergence import Divergence, LogitPair
from megatron_pg.head.factor_gradients import multiply
from megatron_pg.head.from_logits import ScoreGradients
from megatron_pg.head.vocabulary_shard import Incoming, LogitRows, RowStatistics, ScoreGradient

_LEAST_REST = 1e-7
"""The smallest probability of all tokens outside the k. The student's float32 sum of exponentials
cannot resolve less."""


def _in_addition(gradient: Callable[[Tensor, torch.dtype], Tensor]) -> ScoreGradients:
    """Add the divergence's gradient [rows, v/tp] to the gradient of the other outputs."""

    def of_all(incoming: Incoming, dtype: torch.dtype) -> ScoreGradient:
        *to_rows, to_divergence = incoming
        dense = None if to_divergence is None else gradient(to_divergence, dtype)
        return ScoreGradient(to_rows, dense, None)

    return of_all


@dataclass(frozen=True)
class WholeTeacher:
    """A teacher given by its distribution over the whole vocabulary: `logits`, or `hidden` and
    `weight`.
    """

    shape: ClassVar[tuple[int, ...]] = ()
    is_sparse: ClassVar[bool] = False

    divergence: Divergence
    logits: Tensor | None = None
    """The logits [tokens, v/tp] of this rank's columns, which are not changed."""
    hidden: Tensor | None = None
    """The hidden states [tokens, teacher's hidden], the same on every tensor-parallel rank."""
    weight: Tensor | None = None
    """The output weight [v/tp, teacher's hidden]. Logits are computed chunk by chunk."""

    def on(
        self, student: LogitRows, statistics: RowStatistics, rows: slice
    ) -> tuple[Tensor, ScoreGradients]:
        logits, mask = self._logits_of(student, rows), student.row_mask
        teacher = LogitRows(logits, student.targets, student.shard, student.temperature, mask)
        models = (student.logits, statistics), (logits, row_passes(logits).row_statistics(teacher))
        pair = LogitPair(self.divergence, student, models)
        passes = choose("distill.divergence_triton", passes_torch, student.logits, logits)
        sums = passes.local_sums(pair)
        if student.shard.group is not None and len(sums):
            dist.all_reduce(sums, group=student.shard.group)
        if mask is not None:
            sums = torch.where(mask[:, None], sums, 0.0)

        def gradient(incoming: Tensor, dtype: torch.dtype) -> Tensor:
            may_overwrite = self.logits is None and logits.dtype == dtype
            out = logits if may_overwrite else torch.empty_like(logits, dtype=dtype)
            if mask is not None:
                incoming = torch.where(mask, incoming, 0.0)
            passes.write_gradient(pair, sums[:, 1], incoming, out)
            return out

        return sums[:, 0], _in_addition(gradient)

    def _logits_of(self, student: LogitRows, rows: slice) -> Tensor:
        if self.logits is not None:
            logits = self.logits[rows]
        elif self.hidden is not None and self.weight is not None:
            # The same precision as the student's logits.
            logits = student.logits.new_empty(len(student.logits), len(self.weight))
            multiply(self.hidden[rows], self.weight.t(), logits)
        else:
            raise ValueError("WholeTeacher requires logits, or hidden and weight")
        if logits.shape != student.logits.shape:
            raise ValueError(
                f"the teacher's logits are {list(logits.shape)} and the student's "
                f"{list(student.logits.shape)}: both must have the same tokens and the same "
                "columns of one vocabulary"
            )
        return logits


@dataclass(frozen=True)
class TopKTeacher:
    """A teacher given by its k likeliest tokens. The rest of the vocabulary is one bucket for
    teacher and student.
    """

    shape: ClassVar[tuple[int, ...]] = ()
    is_sparse: ClassVar[bool] = False

    divergence: Divergence
    ids: Tensor
    """The global ids [tokens, k] int64, distinct in a row."""
    log_probs: Tensor
    """The teacher's log-probs [tokens, k] of these ids at the student's temperature."""

    def on(
        self, student: LogitRows, statistics: RowStatistics, rows: slice
    ) -> tuple[Tensor, ScoreGradients]:
        shard, temperature, mask = student.shard, student.temperature, student.row_mask
        columns, is_here = shard.columns_of(self.ids[rows])
        logits = student.logits.gather(1, columns).to(statistics.maximum.dtype)
        log_p = statistics.log_softmax(logits, temperature).where(is_here, -math.inf)
        log_q = self.log_probs[rows]
        own_log_q = log_q.to(log_p.dtype).where(is_here, -math.inf)
        terms = self.divergence.terms(log_p, own_log_q)
        value, weighted = (term.where(is_here, 0.0) for term in terms)
        # 1 minus a float32 sum would leave two digits of a rest of 1e-5.
        parts = log_p.double().exp(), value, weighted
        sums = torch.stack([part.double().sum(1) for part in parts], 1)
        if shard.group is not None and len(sums):
            dist.all_reduce(sums, group=shard.group)
        p_rest = (1 - sums[:, 0]).clamp(min=_LEAST_REST)
        q_rest = (1 - log_q.double().exp().sum(1)).clamp(min=_LEAST_REST)
        value_rest, weighted_rest = self.divergence.terms(p_rest.log(), q_rest.log())
        results = sums[:, 1] + value_rest, sums[:, 2] + weighted_rest, weighted_rest / p_rest
        value, moment, rest = (result.to(log_p.dtype) for result in results)

        def gradient(incoming: Tensor, dtype: torch.dtype) -> Tensor:
            live = incoming != 0 if mask is None else (incoming != 0) & mask
            scale = torch.where(live, incoming, 0.0).to(log_p.dtype) / temperature
            out = torch.zeros_like(student.logits, dtype=dtype)
            # All columns first get the gradient of the rest, then the k columns the difference.
            factor = torch.where(live, (rest - moment) * scale, 0.0)
            log_probs = statistics.log_softmax(student.logits[:, : shard.columns], temperature)
            whole = torch.where(live[:, None], log_probs.exp(), 0.0) * factor[:, None]
            more = (weighted - log_p.exp() * rest[:, None]) * scale[:, None]
            if shard.columns:  # a shard of only padding has no column
                more = torch.where(live[:, None] & is_here, more, 0.0)
                whole.scatter_add_(1, columns, more)
            out[:, : shard.columns] = whole.to(dtype)
            return out

        return value if mask is None else value.where(mask, 0.0), _in_addition(gradient)
