"""The objectives, divergences and corrections of one sequence, token by token, in float64.

Shares no code with the package. Inputs are lists over the response tokens of one sample; a masked
token is never touched. Clipping is written as the choice between the formula's terms, so autograd
follows the term that was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ZERO = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Sequence1:
    """One sample's response."""

    log_probs: Tensor
    """[response_length] float64, with gradient."""
    loss_mask: list[int]
    advantages: list[float]
    old_log_probs: list[float]
    ref_log_probs: list[float]
    rollout_log_probs: list[float]

    def active(self) -> list[int]:
        return [token for token, keep in enumerate(self.loss_mask) if keep]


def exp_within_20(exponent: Tensor) -> Tensor:
    if exponent > 20:
        return torch.tensor(math.exp(20), dtype=torch.float64)
    if exponent < -20:
        return torch.tensor(math.exp(-20), dtype=torch.float64)
    return exponent.exp()


def surrogate(ratio: Tensor, advantage: float, low: float, high: float, dual: float | None):
    """-min(r A, clip(r) A), bounded by -dual A where A < 0."""
    clipped = ratio
    if ratio < low:
        clipped = torch.tensor(low, dtype=torch.float64)
    if ratio > high:
        clipped = torch.tensor(high, dtype=torch.float64)
    loss = -ratio * advantage
    if -clipped * advantage > loss:
        loss = -clipped * advantage
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss = torch.tensor(-dual * advantage, dtype=torch.float64)
    return loss


def mean(values: Sequence[Tensor]) -> Tensor:
    return sum(values, ZERO) / max(len(values), 1)


def policy_mean(sample: Sequence1) -> Tensor:
    """Mean of log r over the active tokens, without gradient."""
    return mean([sample.log_probs[t].detach() - sample.old_log_probs[t] for t in sample.active()])


def objective(
    name: str,
    sample: Sequence1,
    *,
    low: float = 0.8,
    high: float = 1.2,
    dual: float | None = None,
    cispo_lower_bound: bool = False,
) -> list[Tensor]:
    """The loss of every response token; 0 where masked."""
    losses = [ZERO] * len(sample.loss_mask)
    for t in sample.active():
        log_prob, advantage = sample.log_probs[t], sample.advantages[t]
        if name == "sft":
            losses[t] = -log_prob
            continue
        if name == "reinforce":
            losses[t] = -advantage * log_prob
            continue
        log_ratio = log_prob - sample.old_log_probs[t]
        if name == "gspo":
            log_ratio = policy_mean(sample) + log_prob - log_prob.detach()
        ratio = exp_within_20(log_ratio)
        if name in ("ppo", "gspo"):
            losses[t] = surrogate(ratio, advantage, low, high, dual)
        else:
            weight = min(ratio.item(), high)
            weight = max(weight, low) if cispo_lower_bound else weight
            losses[t] = -weight * advantage * log_prob
    return losses


def kl(
    sample: Sequence1, kind: str, *, unbiased: bool = False, gradient_of_k2: bool = False
) -> list[Tensor]:
    """The divergence estimate of every response token; 0 where masked."""
    values = [ZERO] * len(sample.loss_mask)
    for t in sample.active():
        difference = sample.log_probs[t] - sample.ref_log_probs[t]
        if kind == "k1":
            value = difference
        elif kind == "k2":
            value = difference**2 / 2
        else:
            if abs(difference.item()) > 20:
                difference = torch.tensor(math.copysign(20, difference.item())).double()
            value = torch.exp(-difference) - 1 + difference
        if unbiased:
            value = exp_within_20(sample.log_probs[t] - sample.old_log_probs[t]) * value
        if kind == "low_var_kl" and value > 10:
            value = torch.tensor(10.0, dtype=torch.float64)
        if gradient_of_k2:  # d^2 / 2 has the gradient d: a product with a constant
            distance = (sample.log_probs[t] - sample.ref_log_probs[t]).item()
            line = distance * sample.log_probs[t]
            value = torch.tensor(value.item(), dtype=torch.float64) + line - line.item()
        values[t] = value
    return values


@dataclass(frozen=True)
class Correction:
    """Settings of the corrections; None turns one off."""

    tis: str | None = None
    """token, sequence or geometric, and mask, sequence_mask or geometric_mask."""
    tis_low: float = 0.0
    tis_high: float = 2.0
    geometric: tuple[float, float] | None = None
    sequence: tuple[float, float] | None = None
    opsm_delta: float | None = None

    def rejects(self) -> bool:
        is_mask = self.tis is not None and self.tis.endswith("mask")
        others = (self.geometric, self.sequence, self.opsm_delta)
        return is_mask or any(each is not None for each in others)


def mismatches(sample: Sequence1) -> list[float]:
    """old - rollout of the active tokens."""
    return [sample.old_log_probs[t] - sample.rollout_log_probs[t] for t in sample.active()]


def bounded_exp(exponent: float) -> float:
    return math.exp(min(max(exponent, -20.0), 20.0))


def correct(
    sample: Sequence1, losses: Sequence[Tensor], settings: Correction
) -> tuple[list[Tensor], list[int]]:
    """(the corrected losses, the mask that is left)."""
    corrected, mask = list(losses), list(sample.loss_mask)
    total = sum(mismatches(sample))
    average = total / max(len(sample.active()), 1)
    drift = -policy_mean(sample).item()
    for t in sample.active():
        mismatch = sample.old_log_probs[t] - sample.rollout_log_probs[t]
        kind = settings.tis or ""
        exponent = total if kind.startswith("sequence") else mismatch
        exponent = average if kind.startswith("geometric") else exponent
        weight = bounded_exp(exponent)
        if kind in ("token", "sequence", "geometric"):
            corrected[t] = losses[t] * min(max(weight, settings.tis_low), settings.tis_high)
        if kind.endswith("mask"):
            corrected[t] = losses[t] * weight
            if not settings.tis_low <= weight <= settings.tis_high:
                mask[t] = 0
        if settings.geometric is not None:
            low, high = settings.geometric
            if not low <= bounded_exp(average) <= high:
                mask[t] = 0
        if settings.sequence is not None:
            low, high = settings.sequence
            if not low <= bounded_exp(total) <= high:
                mask[t] = 0
        if settings.opsm_delta is not None:
            if sample.advantages[t] < 0 and drift > settings.opsm_delta:
                mask[t] = 0
        if not mask[t]:
            corrected[t] = ZERO
    return corrected, mask
