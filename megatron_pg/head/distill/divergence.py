"""The divergence of each row from a teacher over the whole vocabulary: formulas, and passes in
torch.

With p the student and q the teacher, both `softmax(logits / temperature)`:

    forward_kl    sum_v q log(q / p)
    reverse_kl    sum_v p log(p / q)
    jsd           beta sum_v q log(q / m) + (1 - beta) sum_v p log(p / m),
                  m = beta q + (1 - beta) p (arXiv:2306.13649)

The gradient to the student's logits is `(g_v - p_v sum_u g_u) / temperature` with `g_v = p_v
dD/dp_v` up to a multiple of p_v. The passes work on a few rows at a time.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_pg.head.rows_torch import row_chunks, wide_dtype
from megatron_pg.head.vocabulary_shard import LogitRows, RowStatistics

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Divergence:
    """A divergence between two distributions."""

    kind: Kind = "reverse_kl"
    beta: float = 0.5
    """The teacher's weight in the mixture of `jsd`, between 0 and 1, both excluded."""

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Return each column's part of the divergence, and g. Both are 0 if the weighting
        probability is 0.
        """
        p, q = log_p.exp(), log_q.exp()
        if self.kind == "forward_kl":
            return torch.where(q == 0, 0.0, q * (log_q - log_p)), -q
        if self.kind == "reverse_kl":
            value = torch.where(p == 0, 0.0, p * (log_p - log_q))
            return value, value
        log_m = torch.logaddexp(log_q + math.log(self.beta), log_p + math.log1p(-self.beta))
        student = (1 - self.beta) * torch.where(p == 0, 0.0, p * (log_p - log_m))
        return student + self.beta * torch.where(q == 0, 0.0, q * (log_q - log_m)), student


@dataclass(frozen=True)
class LogitPair:
    """The logits [tokens, v/tp] of student and teacher in the same columns, with statistics."""

    divergence: Divergence
    student: LogitRows
    models: tuple[tuple[Tensor, RowStatistics], ...]  # logits and statistics of student and teacher


def local_sums(pair: LogitPair) -> Tensor:
    """Compute this shard's part [tokens, 2] of the divergence and of the sum of g."""
    sums = pair.student.temperature.new_zeros(len(pair.student.logits), 2)
    for part in row_chunks(*pair.student.logits.shape):
        for column, terms in enumerate(pair.divergence.terms(*_log_softmaxes(pair, part))):
            sums[part, column] = terms.sum(1)
    return sums


def write_gradient(pair: LogitPair, moment: Tensor, incoming: Tensor, out: Tensor) -> None:
    """Write `incoming` [tokens] times the gradient to the student's logits to `out`, which may be
    the teacher's logits.

    A row whose incoming gradient is 0 gets exactly 0. `moment` [tokens] is the sum of g over all
    shards.
    """
    columns, live = pair.student.shard.columns, incoming != 0
    scale = incoming.to(moment.dtype) / pair.student.temperature
    for part in row_chunks(*pair.student.logits.shape):
        log_p, log_q = _log_softmaxes(pair, part)
        _, weighted = pair.divergence.terms(log_p, log_q)
        gradient = (weighted - log_p.exp() * moment[part, None]) * scale[part, None]
        out[part, :columns] = torch.where(live[part, None], gradient, 0.0).to(out.dtype)
        out[part, columns:] = 0


def _log_softmaxes(pair: LogitPair, part: slice) -> list[Tensor]:
    """Compute some rows' log-probabilities of student and teacher in this shard's columns."""
    columns, temperature = pair.student.shard.columns, pair.student.temperature
    chunks = [(logits[part, :columns], statistics.rows(part)) for logits, statistics in pair.models]
    return [own.log_softmax(x.to(wide_dtype(x.dtype)), temperature) for x, own in chunks]
