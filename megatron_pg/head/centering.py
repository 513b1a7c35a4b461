"""The sampler's mean score per row, which centers the gradient of a policy loss (arXiv:2609.20807).

An engine samples from q and returns the log-probs of its top k tokens, the head H of a row. With p
the policy in training at the sampler's temperature, and sg a value without gradient:

    C = sum over v in H of sg(m_v - alpha p_v) log p_v
    rho = max(1 - sum over H of q, 0) / max(1 - sum over H of p, 1e-6)

    weights  m_v                                        alpha
    none     q_v                                        rho
    clip     clamp(p_v, low q_v, high q_v)              clamp(1, low rho, high rho)
    mask     p_v if low <= p_v / q_v <= high, else 0    1 if low <= 1 / rho <= high, else 0

m is q times the weight that a correction gives to a token. Outside of H it is alpha p, if q is rho
p there. The gradient of C is then the mean over q of the weight times the gradient of log p,
because the gradient of log p has the mean 0 over p. A policy loss of `-weight A log p(y)` plus `A
C` has no gradient on average if A is constant.

The gradient of C to a logit is `(c_v [v in H] - p_v sum of c) / temperature` with c = m - alpha p.
The columns of H and the target are written one by one. All other columns have the gradient of a
log-prob.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.vocabulary_shard import (
    ColumnGradients,
    Incoming,
    RowStatistics,
    ScoreGradient,
)

LEAST_TAIL = 1e-6
"""The smallest probability, under the policy in training, of all tokens outside the head."""
CENTERING_VALUES = ("value", "policy_mass", "sampler_mass", "drift", "norm")
"""The values of a row: C, the probability of H under policy and sampler, the sum of c, and the norm
of C's gradient to the logits of H at temperature 1."""


@dataclass(frozen=True)
class Centering:
    """The head of the sampler's distribution for all tokens of a call. It is a `Scorer`.

    Each row has the values `CENTERING_VALUES`.
    """

    ids: Tensor
    """The global ids [tokens, k] int64, distinct in a row. Negative: no id."""
    log_probs: Tensor
    """The sampler's log-probs [tokens, k] of these ids, over its whole distribution."""
    weights: Literal["none", "clip", "mask"] = "none"
    low: float = 0.0
    high: float = 1.0
    """The finite bounds of a weight, for `clip` and `mask`."""

    shape: ClassVar[tuple[int, ...]] = (5,)
    is_sparse: ClassVar[bool] = True

    def select(self, rows: Tensor) -> "Centering":
        """Take some rows, int64."""
        return replace(self, ids=self.ids[rows], log_probs=self.log_probs[rows])

    def on(
        self, chunk: Any, statistics: RowStatistics, rows: slice
    ) -> tuple[Tensor, "CenteredRows"]:
        """Compute the values [5, rows] of some rows and their gradient. Every tensor-parallel rank
        must call.

        `chunk` is a `LogitRows`, or a `Chunk` with targets, shard and temperature.
        """
        targets, shard, temperature = chunk.targets, chunk.shard, chunk.temperature
        ids = torch.cat([self.ids[rows], targets[:, None]], 1)
        columns, is_here = shard.columns_of(ids)
        logits = torch.where(is_here, chunk.logits_of(columns).to(temperature.dtype), -math.inf)
        if shard.group is not None and len(logits):
            # One exchange of k + 1 numbers per row instead of two dependent sums.
            dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=shard.group)
        log_p = statistics.log_softmax(logits, temperature)
        is_head = torch.nn.functional.pad(self.ids[rows] >= 0, (0, 1))
        log_q = torch.nn.functional.pad(self.log_probs[rows].to(log_p.dtype), (0, 1))
        p, q = (torch.where(is_head, x.exp(), 0.0) for x in (log_p, log_q))
        centers, mass = self._centers(p, q)
        drift = centers.sum(1)
        is_target = ids == targets[:, None]
        is_target_in_head = (is_target & is_head).any(1)
        is_here = torch.cat([is_here[:, :-1], is_here[:, -1:] & ~is_target_in_head[:, None]], 1)
        value = torch.where(centers == 0, 0.0, centers * log_p).sum(1)
        norm = torch.where(is_head, centers - drift[:, None] * p, 0.0).norm(dim=1)
        values = torch.stack([value, mass, q.double().sum(1), drift, norm])
        if chunk.row_mask is not None:
            values = torch.where(chunk.row_mask, values, 0.0)
        return values.to(log_p.dtype), CenteredRows(
            chunk,
            statistics,
            is_target,
            columns,
            is_here,
            logits,
            log_p,
            centers.to(log_p.dtype),
            drift.to(log_p.dtype),
        )

    def _centers(self, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return c [rows, k + 1] and the sum of p in float64. 1 minus a float32 sum would leave two
        digits of a tail of 1e-5.
        """
        p, q = p.double(), q.double()
        mass = p.sum(1)
        rho = (1 - q.sum(1)).clamp(min=0.0) / (1 - mass).clamp(min=LEAST_TAIL)
        if self.weights == "none":
            m, alpha = q, rho
        elif self.weights == "clip":
            m = p.clamp(self.low * q, self.high * q)
            alpha = torch.ones_like(rho).clamp(self.low * rho, self.high * rho)
        else:
            m = torch.where((self.low * q <= p) & (p <= self.high * q), p, 0.0)
            alpha = ((self.low * rho <= 1) & (self.high * rho >= 1)).double()
        return m - alpha[:, None] * p, mass


@dataclass(frozen=True, eq=False)
class CenteredRows:
    """The gradient of some rows' values, [rows, k + 1] with the target's column last."""

    chunk: Any
    statistics: RowStatistics
    is_target: Tensor
    columns: Tensor
    is_here: Tensor  # True for a column of this rank, once
    logits: Tensor
    log_p: Tensor
    centers: Tensor  # c
    drift: Tensor  # the sum of c, [rows]

    def __call__(self, incoming: Incoming, dtype: torch.dtype) -> ScoreGradient:
        """Return the gradient to the logits, given the gradients to log-probs, entropy and
        values.
        """
        zero = torch.zeros_like(self.drift)
        to_log_probs, to_entropy, to_value = (
            zero if x is None else (x[0] if x.dim() == 2 else x).to(zero.dtype) for x in incoming
        )
        if self.chunk.row_mask is not None:
            rows = self.chunk.row_mask
            to_log_probs, to_value = (torch.where(rows, x, 0.0) for x in (to_log_probs, to_value))
            to_entropy = torch.where(rows, to_entropy, 0.0)
        is_live = (to_log_probs != 0) | (to_value != 0) | (to_entropy != 0)
        to_all = to_log_probs + to_value * torch.where(is_live, self.drift, 0.0)
        p = self.log_p.exp()
        gradient = (
            to_log_probs[:, None] * self.is_target
            + to_value[:, None] * self.centers
            - to_all[:, None] * p
        )
        if incoming[1] is not None:
            surprise = torch.where(p == 0, 0.0, p * (self.log_p + self.statistics.entropy[:, None]))
            gradient = gradient - to_entropy[:, None] * surprise
        gradient = gradient / self.chunk.temperature
        if self.chunk.softcap is not None:
            gradient = gradient * (1 - (self.logits / self.chunk.softcap).square())
        gradient = torch.where(is_live[:, None] & self.is_here, gradient, 0.0)
        columns = ColumnGradients(self.columns, self.is_here, gradient)
        return ScoreGradient((to_all, None if incoming[1] is None else to_entropy), None, columns)
