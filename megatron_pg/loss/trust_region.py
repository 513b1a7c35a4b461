"""The objectives that keep the policy near by other means than PPO's clip of a token's ratio: rows of the same table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.rows import ANCHOR
from megatron_pg.loss.clip import clip_range_of_logs, clipped_by_sign
from megatron_pg.loss.objectives import CLIP_SETTINGS, Outcome, objective
from megatron_pg.loss.sequence import SequenceSums
from megatron_pg.loss.tokens import Tokens, clamped_log_ratio, masked, straight_through

DPPO_DELTAS = {"dppo_tv": 0.15, "dppo_kl": 0.05}
"""Default of `--dppo-delta`: the thresholds of the authors' launch script."""


@objective(
    "-f(r) A, f(r) = 4 / tau sigmoid(tau (r - 1)), tau = sapo_tau_pos where A > 0, else sapo_tau_neg",
    about="a soft gate in place of the clip; arXiv:2511.20347 eq. 5 and 6",
    inputs=(ANCHOR,),
    options=("sapo_tau_pos", "sapo_tau_neg"),
    ratio="token",
    is_sum_over_tokens=True,
    zero_advantage_is_zero_gradient=True,
)
def sapo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Soft adaptive policy optimization: the gradient of r A at r = 1, fading as r leaves it. Nothing is clipped."""
    advantages, log_ratio = tokens.advantages, tokens.log_probs - tokens.anchor(config)
    ratio = clamped_log_ratio(log_ratio).exp()
    of_positive = torch.full_like(ratio, config.sapo_tau_pos)
    tau = torch.where(advantages > 0, of_positive, config.sapo_tau_neg)
    distance = tau * (ratio - 1.0)
    # Where the sigmoid is near 1, float32 keeps too few of its digits to say its gradient: 1 - sigmoid(-x) there.
    is_above = distance > 0
    nearer_zero = torch.sigmoid(torch.where(is_above, -distance, distance))
    gate = 4.0 / tau * torch.where(is_above, 1.0 - nearer_zero, nearer_zero)
    nowhere = torch.zeros_like(tokens.loss_mask)
    return Outcome(-gate * advantages, log_ratio.detach(), nowhere, nowhere)


MASK = "0 where A > 0, r > 1, D > dppo_delta_high and where A < 0, r < 1, D > dppo_delta"


@objective(
    f"-M r A, M = {MASK}, else 1; D = abs(p - p_old)",
    about="divergence PPO by binary total variation, p = exp(log_prob); arXiv:2602.04879 eq. 13",
    inputs=(ANCHOR,),
    options=("dppo_delta", "dppo_delta_high"),
    ratio="token",
    is_sum_over_tokens=True,
    zero_advantage_is_zero_gradient=True,
)
def dppo_tv(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Divergence PPO, whose trust region is about the probability that the sampled token lost or gained."""
    return _divergence_masked(config, tokens, "dppo_tv", total_variation)


@objective(
    f"-M r A, M = {MASK}, else 1; D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))",
    about="the same by binary Kullback-Leibler divergence; arXiv:2602.04879 eq. 14",
    inputs=(ANCHOR,),
    options=("dppo_delta", "dppo_delta_high"),
    ratio="token",
    is_sum_over_tokens=True,
    zero_advantage_is_zero_gradient=True,
)
def dppo_kl(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Divergence PPO, whose trust region is about the sampled token against all others together."""
    return _divergence_masked(config, tokens, "dppo_kl", binary_divergence)


def total_variation(old: Tensor, new: Tensor) -> Tensor:
    """|exp(new) - exp(old)| of log-probs [window]: the total variation of {this token, any other}."""
    return (new.exp() - old.exp()).abs()


def binary_divergence(old: Tensor, new: Tensor) -> Tensor:
    """KL(old || new) in nats of {this token, any other}, [window] from log-probs [window].

    Infinite where the new policy leaves nothing to other tokens and the old one did.
    """
    others_old, others_new = (-torch.expm1(each.clamp(max=0.0)) for each in (old, new))
    of_others = torch.xlogy(others_old, others_old) - torch.xlogy(others_old, others_new)
    p_old = old.exp()
    # 0 log 0 is 0: a token that the old policy could not sample adds nothing.
    return torch.where(p_old == 0, 0.0, p_old * (old - new)) + of_others


def _divergence_masked(
    config: PolicyLossConfig,
    tokens: Tokens,
    name: str,
    divergence: Callable[[Tensor, Tensor], Tensor],
) -> Outcome:
    """Compute -r A without the tokens that move further away and are further away than delta."""
    delta = DPPO_DELTAS[name] if config.dppo_delta is None else config.dppo_delta
    delta_high = delta if config.dppo_delta_high is None else config.dppo_delta_high
    advantages, anchor = tokens.advantages, tokens.anchor(config)
    log_ratio = tokens.log_probs - anchor
    with torch.no_grad():
        distance = divergence(anchor, tokens.log_probs)
        is_above = (log_ratio > 0) & (distance > delta_high)
        is_below = (log_ratio < 0) & (distance > delta)
        is_dropped = (is_above & (advantages > 0)) | (is_below & (advantages < 0))
    ratio = clamped_log_ratio(log_ratio).exp().masked_fill(is_dropped, 0.0)
    return Outcome(-ratio * advantages, log_ratio.detach(), is_above | is_below, is_dropped)


@objective(
    "-s A, log s_t = sg(mean_t log c) + log c - sg(log c), c = min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A) / A",
    about="geometric mean of a sequence's clipped ratios; arXiv:2507.20673 eq. 4",
    inputs=(ANCHOR,),
    reads_clip=lambda config: CLIP_SETTINGS,
    ratio="sequence",
    sequence_sums=("clipped_policy",),
    is_sum_over_tokens=True,
)
def gmpo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Geometric-mean policy optimization: one ratio for a sequence, clipped token by token.

    Its gradient is a sum over tokens, each with the sequence's ratio as weight: under the sample mean and with one
    advantage a sequence, the gradient of the paper's objective.
    """
    advantages, log_ratio = tokens.advantages, tokens.log_probs - tokens.anchor(config)
    held, *is_clipped = clipped_by_sign(log_ratio, clip_range_of_logs(config), advantages)
    mean = masked(sums.mean("clipped_policy"), tokens.loss_mask).to(held.dtype)
    ratio = clamped_log_ratio(mean + straight_through(held)).exp()
    return Outcome(-ratio * advantages, mean, *is_clipped)
