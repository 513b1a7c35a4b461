"""The objectives, divergences and corrections of one sequence, token by token, in float64.

Shares no code with the package. Inputs are lists over the response tokens of one sample; a masked
token is never touched. Clipping is written as the choice between the formula's terms, so autograd
follows the term that was chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ZERO = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Sequence1:
    log_probs: Tensor
    """[response_length] float64, with gradient."""
    loss_mask: list[int]
    advantages: list[float]
    old_log_probs: list[float]
    ref_log_probs: list[float]
    rollout_log_probs: list[float]
    turn_ids: list[int] | None = None

    def together(self, token: int, by_turn: bool) -> list[int]:
        """The active tokens of the sequence, or of the token's turn."""
        turns = self.turn_ids
        return [t for t in self.active() if not by_turn or not turns or turns[t] == turns[token]]

    def active(self) -> list[int]:
        return [token for token, keep in enumerate(self.loss_mask) if keep]


def exp_within_20(exponent: Tensor) -> Tensor:
    if abs(exponent) > 20:
        return torch.tensor(math.copysign(20, exponent.item())).double().exp()
    return exponent.exp()


def with_gradient_of(value: Tensor, log: Tensor) -> Tensor:
    """The value with the gradient of a log-prob or log-ratio, which one of -inf has not."""
    return value if log.isinf() else value + log - log.detach()


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


def policy_mean(sample: Sequence1, anchor: str, tokens: Sequence[int]) -> Tensor:
    """Mean of log r over the tokens, without gradient."""
    against = getattr(sample, f"{anchor}_log_probs")
    return mean([sample.log_probs[t].detach() - against[t] for t in tokens])


def soft_gate(ratio: Tensor, tau: float) -> Tensor:
    return 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))


OF_LOG_PROB = ("reinforce", "cispo", "dis", "vespo")
"""The objectives with a weight times the log-prob."""


def gamma_weight(
    sample: Sequence1, anchor: str, tokens: Sequence[int], k: float, lam: float
) -> float:
    """VESPO's weight of a sequence or turn: w^k e^(lambda (1 - w)), at most e^20, w the product of
    the ratios of its tokens.
    """
    against, total = getattr(sample, f"{anchor}_log_probs"), 0.0
    for t in tokens:
        total += sample.log_probs[t].item() - against[t]
    total = max(-20.0, min(total, 20.0)) if total == total else total
    exponent = k * total + lam * (1 - math.exp(total))
    return math.exp(min(exponent, 20.0)) if exponent == exponent else math.nan


def moved(measure: str, old: float, new: float) -> float:
    """Divergence of two log-probs of one token: of the pair (this token, all others)."""
    p_old, p_new = math.exp(old), math.exp(new)
    if measure == "dppo_tv":
        return abs(p_new - p_old)
    total = 0.0
    for share_old, share_new in ((p_old, p_new), (1 - p_old, 1 - p_new)):
        if share_old > 0:
            total += share_old * math.log(share_old / share_new) if share_new > 0 else math.inf
    return total


def kept_by_divergence(
    measure: str, old: float, new: float, advantage: float, delta: float, delta_high: float
) -> bool:
    if advantage > 0 and new > old:
        return not moved(measure, old, new) > delta_high
    if advantage < 0 and new < old:
        return not moved(measure, old, new) > delta
    return True


def geometric_mean_losses(
    sample: Sequence1, low: float, high: float, anchor: str, by_turn: bool
) -> list[Tensor]:
    """GMPO: -A times the geometric mean of the clipped ratios; each token has the gradient of its
    own factor.
    """
    against, tokens = getattr(sample, f"{anchor}_log_probs"), sample.active()
    logs: dict[int, Tensor] = {}
    for t in tokens:
        log = sample.log_probs[t] - against[t]
        if sample.advantages[t] > 0 and log > math.log(high):
            log = torch.tensor(math.log(high), dtype=torch.float64)
        if sample.advantages[t] < 0 and low > 0 and log < math.log(low):
            log = torch.tensor(math.log(low), dtype=torch.float64)
        logs[t] = log
    losses = [ZERO] * len(sample.loss_mask)
    for t, log in logs.items():
        average = mean([logs[k] for k in sample.together(t, by_turn)]).detach()
        losses[t] = -sample.advantages[t] * exp_within_20(with_gradient_of(average, log))
    return losses


def objective(
    name: str,
    sample: Sequence1,
    *,
    low: float = 0.8,
    high: float = 1.2,
    dual: float | None = None,
    cispo_lower_bound: bool = False,
    taus: tuple[float, float] = (1.0, 1.05),
    deltas: tuple[float, float] | None = None,
    gammas: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0),
    anchor: str = "old",
    by_turn: bool = False,
) -> list[Tensor]:
    """The loss of every response token; 0 where masked.

    `taus` are SAPO's of A > 0 and of the others, `deltas` DPPO's of
    A < 0 and of A > 0, `gammas` VESPO's k and lambda of A >= 0, then those of A < 0; `anchor` is
    whose log-probs the ratio is against.
    """
    if name == "gmpo":
        return geometric_mean_losses(sample, low, high, anchor, by_turn)
    if name == "dis":
        anchor = "rollout"
    losses = [ZERO] * len(sample.loss_mask)
    against = getattr(sample, f"{anchor}_log_probs")
    for t in sample.active():
        log_prob, advantage = sample.log_probs[t], sample.advantages[t]
        if name == "sft":
            losses[t] = -log_prob
            continue
        if name in OF_LOG_PROB and advantage == 0 and log_prob.isinf():
            continue  # 0 log 0 is 0
        if name == "reinforce":
            losses[t] = -advantage * log_prob
            continue
        log_ratio = log_prob - against[t]
        if name == "gspo":
            average = policy_mean(sample, anchor, sample.together(t, by_turn))
            log_ratio = with_gradient_of(average, log_prob)
        ratio = exp_within_20(log_ratio)
        if name in ("ppo", "gspo"):
            losses[t] = surrogate(ratio, advantage, low, high, dual)
        elif name == "sapo":
            losses[t] = -soft_gate(ratio, taus[0] if advantage > 0 else taus[1]) * advantage
        elif name in ("dppo_tv", "dppo_kl"):
            delta, delta_high = deltas or {"dppo_tv": (0.15, 0.15), "dppo_kl": (0.05, 0.05)}[name]
            pair = against[t], log_prob.item()
            if kept_by_divergence(name, *pair, advantage, delta, delta_high):
                losses[t] = -ratio * advantage
        elif name == "cispo":
            weight = min(ratio.item(), high)
            weight = max(weight, low) if cispo_lower_bound else weight
            losses[t] = -weight * advantage * log_prob
        elif name == "dis":
            weight = exp_within_20(log_ratio).item()
            if not (weight <= low or weight >= high):
                losses[t] = -weight * advantage * log_prob
        elif name == "vespo":
            k, lam = gammas[2:] if advantage < 0 else gammas[:2]
            weight = gamma_weight(sample, anchor, sample.together(t, by_turn), k, lam)
            losses[t] = -weight * advantage * log_prob
        else:
            raise KeyError(name)
    return losses


KL_ESTIMATES = ("k1", "k2", "k3", "low_var_kl")


def kl(
    sample: Sequence1,
    kind: str,
    *,
    unbiased: bool = False,
    gradient_of_k2: bool = False,
    anchor: str = "old",
) -> list[Tensor]:
    """The divergence estimate of every response token; 0 where masked."""
    values = [ZERO] * len(sample.loss_mask)
    for t in sample.active():
        difference = sample.log_probs[t] - sample.ref_log_probs[t]
        if kind == "k1":
            value = difference
        elif kind == "k2":
            value = difference**2 / 2
        elif kind not in KL_ESTIMATES:
            raise KeyError(kind)
        else:
            if abs(difference.item()) > 20:
                difference = torch.tensor(math.copysign(20, difference.item())).double()
            value = torch.exp(-difference) - 1 + difference
        if unbiased:
            against = getattr(sample, f"{anchor}_log_probs")
            value = exp_within_20(sample.log_probs[t] - against[t]) * value
        if kind == "low_var_kl" and value > 10:
            value = torch.tensor(10.0, dtype=torch.float64)
        if gradient_of_k2:  # d^2 / 2 has the gradient d: a product with a constant
            distance = (sample.log_probs[t] - sample.ref_log_probs[t]).item()
            value = torch.tensor(value.item(), dtype=torch.float64)
            if math.isfinite(distance):
                line = distance * sample.log_probs[t]
                value = value + line - line.item()
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
    anchor: str = "old"
    """Whose log-probs the ratio is against, which OPSM reads."""
    by_turn: bool = False

    def rejects(self) -> bool:
        is_mask = self.tis is not None and self.tis.endswith("mask")
        others = (self.geometric, self.sequence, self.opsm_delta)
        return is_mask or any(each is not None for each in others)


def bounded_exp(exponent: float) -> float:
    return math.exp(min(max(exponent, -20.0), 20.0))


def correct(
    sample: Sequence1, losses: Sequence[Tensor], settings: Correction
) -> tuple[list[Tensor], list[int]]:
    """(the corrected losses, the mask that is left)."""
    corrected, mask = list(losses), list(sample.loss_mask)
    for t in sample.active():
        unit = sample.together(t, settings.by_turn)
        total = sum(sample.old_log_probs[k] - sample.rollout_log_probs[k] for k in unit)
        average = total / len(unit)
        drift = -policy_mean(sample, settings.anchor, unit).item()
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
        for bounds, exponent in ((settings.geometric, average), (settings.sequence, total)):
            if bounds is not None and not bounds[0] <= bounded_exp(exponent) <= bounds[1]:
                mask[t] = 0
        if settings.opsm_delta is not None:
            if sample.advantages[t] < 0 and drift > settings.opsm_delta:
                mask[t] = 0
        if not mask[t]:
            corrected[t] = ZERO
    return corrected, mask
