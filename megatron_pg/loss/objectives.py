"""Policy objectives: the loss of each response token. One table row each.

r = exp(log_prob - old_log_prob), A is the advantage, sg() stops the gradient. `--ratio-anchor` may
replace old_log_prob. Masked tokens are 0 without gradient, so that formulas need no mask. They are
computed in the dtype of the log-probs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megatron_pg.config.custom import check_returned, load_custom_function
from megatron_pg.config.objective import MAX_LOG_RATIO
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.tables import ANCHOR, TABLES, Row, decorator, is_replaced
from megatron_pg.loss.sequence import SequenceSums
from megatron_pg.loss.tokens import (
    Tokens,
    clamped_log_ratio,
    clip_range,
    clip_range_of_logs,
    clipped_by_sign,
    masked,
    straight_through,
    weighted_log_probs,
)

CLIP_SETTINGS = ("eps_clip", "eps_clip_high")
"""Settings of the clip range, which have values even if an objective does not read them."""
DPPO_DELTAS = {"dppo_tv": 0.15, "dppo_kl": 0.05}
"""Defaults of `--dppo-delta`, from the authors' launch script."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """Per-token loss [window] with gradient, and inputs of metrics, which a row with a `ratio` must
    return.
    """

    loss: Tensor
    log_ratio: Tensor | None = None
    """The detached log r [window] before the clamp to +-20, of the token or of its sequence."""
    is_clipped: Tensor | None = None  # outside the objective's clip range, [window] bool
    is_effectively_clipped: Tensor | None = None  # on the side that the sign of A activates


Formula = Callable[[PolicyLossConfig, Tokens, SequenceSums], Outcome]


@dataclass(frozen=True, kw_only=True)
class Objective(Row):
    """Policy objective with its properties. Defaults are the safe values."""

    setting: ClassVar[str] = "policy_loss"

    function: Formula
    ratio: Literal["none", "token", "sequence"] = "none"  # the unit with one ratio
    reads_clip: Callable[[Any], tuple[str, ...]] = lambda config: ()
    """The names in `CLIP_SETTINGS` that it reads under a config. A startup warning names others
    that are set."""
    can_be_centered: bool = False
    """Whether `--score-centering` applies: the loss is -A log p times a token weight."""
    zero_advantage_is_zero_gradient: bool = False
    """Whether tokens with advantage 0 have no gradient, so that the fused head can skip them."""

    def refusals(self, config: Any) -> list[str]:
        if not (config.use_tis and "rollout_log_probs" in self.inputs):
            return []
        return [
            f"--policy-loss {self.name} and --use-tis are mutually exclusive: both correct the "
            "same mismatch. Remove one of them."
        ]

    def unread_settings(self, config: Any) -> tuple[str, ...]:
        return tuple(name for name in CLIP_SETTINGS if name not in self.reads_clip(config))


OBJECTIVES: dict[str, Objective] = TABLES["policy_loss"]
objective = decorator(OBJECTIVES, Objective)

of_tokens = functools.partial(objective, is_sum_over_tokens=True)
of_token_ratio = functools.partial(
    of_tokens, inputs=(ANCHOR,), ratio="token", zero_advantage_is_zero_gradient=True
)
of_sequence_ratio = functools.partial(
    of_tokens, inputs=(ANCHOR,), ratio="sequence", reads_clip=lambda config: CLIP_SETTINGS
)
of_divergence = functools.partial(of_token_ratio, options=("dppo_delta", "dppo_delta_high"))


def clipped_log_ratio(log_probs: Tensor, old_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """Compute log_prob - old_log_prob clamped to +-20, [window], with zero gradient outside, 0 at
    masked positions.

    For custom objectives. All are [window]: `log_probs` with gradient, `old_log_probs` as a
    constant, `loss_mask` bool.
    """
    old_log_probs = masked(old_log_probs.detach(), loss_mask)
    return clamped_log_ratio(masked(log_probs, loss_mask) - old_log_probs)


def _clip_of_cispo(config: Any) -> tuple[str, ...]:
    """List the clip settings for cispo: eps_clip only as lower bound or without eps_clip_high."""
    reads_low = config.cispo_lower_bound or config.eps_clip_high is None
    return CLIP_SETTINGS if reads_low else CLIP_SETTINGS[1:]


@of_token_ratio(
    "-min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A)",
    about="PPO's clipped surrogate, arXiv:1707.06347 eq. 7",
    options=("eps_clip_c",),
    can_be_centered=True,
    reads_clip=lambda config: CLIP_SETTINGS,
)
def ppo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    return _clipped_surrogate(config, tokens, tokens.log_probs - tokens.anchor(config))


@of_sequence_ratio(
    "-min(s A, clip(s, 1 - eps_clip, 1 + eps_clip_high) A), log s_t = sg(mean_t log r) + log_prob "
    "- sg(log_prob)",
    about="one ratio per sequence, arXiv:2507.18071, GSPO-token",
    options=("eps_clip_c",),
    sequence_sums=("policy",),
)
def gspo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Compute PPO's surrogate of the sequence ratio, with the gradient of each token's log-prob."""
    log_ratio = masked(sums.mean("policy"), tokens.loss_mask).to(tokens.log_probs.dtype)
    return _clipped_surrogate(config, tokens, log_ratio + straight_through(tokens.log_probs))


@of_token_ratio(
    "-sg(min(r, 1 + eps_clip_high)) A log_prob",
    about="MiniMax-M1, arXiv:2506.13585",
    options=("cispo_lower_bound",),
    can_be_centered=True,
    reads_clip=_clip_of_cispo,
)
def cispo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Weight REINFORCE by a clipped ratio without gradient, so that every token keeps its
    gradient.
    """
    log_ratio = tokens.log_probs.detach() - tokens.anchor(config)
    ratio, (lowest, highest) = clamped_log_ratio(log_ratio).exp(), clip_range(config)
    lowest = lowest if config.cispo_lower_bound else 0.0
    # For any sign of the advantage.
    is_clipped = (ratio < lowest) | (ratio > highest)
    weight = ratio.clamp(lowest, highest) * tokens.advantages
    return Outcome(-weighted_log_probs(weight, tokens.log_probs), log_ratio, is_clipped, is_clipped)


@of_token_ratio(
    "-sg(f) A log_prob, f = q if 1 - eps_clip < q < 1 + eps_clip_high, else 0, q = exp(log_prob "
    "- rollout_log_prob)",
    about="SAO, arXiv:2607.07508 eq. 3, and GLM-5, arXiv:2602.15763",
    inputs=("rollout_log_probs",),
    reads_clip=lambda config: CLIP_SETTINGS,
)
def dis(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Weight REINFORCE by the ratio to the sampling policy, without tokens at or beyond a bound."""
    log_ratio = tokens.log_probs.detach() - tokens.given("rollout_log_probs")
    ratio, (lowest, highest) = clamped_log_ratio(log_ratio).exp(), clip_range(config)
    is_outside = (ratio <= lowest) | (ratio >= highest)
    weight = ratio.masked_fill(is_outside, 0.0) * tokens.advantages
    return Outcome(-weighted_log_probs(weight, tokens.log_probs), log_ratio, is_outside, is_outside)


@of_sequence_ratio(
    "-sg(exp(lam (1 - w)) w^k) A log_prob, w = exp(clamp(sum_t log r, +-20)), k and lam by the "
    "sign of A",
    about="a Gamma-shaped weight instead of the clip, arXiv:2602.10693",
    options=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    sequence_sums=("policy",),
    reads_clip=lambda config: (),
    zero_advantage_is_zero_gradient=True,
)
def vespo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Weight REINFORCE by a function of the whole sequence's ratio, 1 at w = 1 and at most e^20,
    without a clip.
    """
    total = masked(sums.total("policy"), tokens.loss_mask)
    log_ratio = clamped_log_ratio(total)

    def log_weight(k: float, lam: float) -> Tensor:
        return k * log_ratio - lam * log_ratio.expm1()

    positive = log_weight(config.vespo_k_pos, config.vespo_lambda_pos)
    negative = log_weight(config.vespo_k_neg, config.vespo_lambda_neg)
    log_weights = torch.where(tokens.advantages < 0, negative, positive).clamp(max=MAX_LOG_RATIO)
    weight = log_weights.exp().to(tokens.log_probs.dtype) * tokens.advantages
    nowhere = torch.zeros_like(tokens.loss_mask)
    return Outcome(-weighted_log_probs(weight, tokens.log_probs), total, nowhere, nowhere)


@of_tokens(
    "-A log_prob",
    about="Williams, 1992",
    can_be_centered=True,
    zero_advantage_is_zero_gradient=True,
)
def reinforce(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    return Outcome(-weighted_log_probs(tokens.advantages, tokens.log_probs))


@of_tokens("-log_prob", about="supervised, does not read advantages")
def sft(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    return Outcome(-tokens.log_probs)


@of_tokens(
    "D(student, teacher)",
    about="the divergence of --distill-divergence over the vocabulary, does not read advantages",
)
def distill(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    return Outcome(tokens.given("divergence"))


@of_token_ratio(
    "-f(r) A, f(r) = 4 / tau sigmoid(tau (r - 1)), tau = sapo_tau_pos if A > 0, else sapo_tau_neg",
    about="a soft gate instead of the clip, arXiv:2511.20347 eq. 5 and 6",
    options=("sapo_tau_pos", "sapo_tau_neg"),
)
def sapo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Compute the loss of soft adaptive policy optimization, with the gradient of r A at r = 1 and
    less away from it, without a clip.
    """
    advantages, log_ratio = tokens.advantages, tokens.log_probs - tokens.anchor(config)
    ratio = clamped_log_ratio(log_ratio).exp()
    positive_tau = torch.full_like(ratio, config.sapo_tau_pos)
    tau = torch.where(advantages > 0, positive_tau, config.sapo_tau_neg)
    distance = tau * (ratio - 1.0)
    # Near 1 the sigmoid in float32 loses the digits of its gradient. Use 1 - sigmoid(-x) there.
    is_above = distance > 0
    nearer_zero = torch.sigmoid(torch.where(is_above, -distance, distance))
    gate = 4.0 / tau * torch.where(is_above, 1.0 - nearer_zero, nearer_zero)
    nowhere = torch.zeros_like(tokens.loss_mask)
    return Outcome(-gate * advantages, log_ratio.detach(), nowhere, nowhere)


@of_divergence(
    "-M r A, M = 0 if A > 0, r > 1, D > dppo_delta_high or if A < 0, r < 1, D > dppo_delta, "
    "else 1, D = abs(p - p_old)",
    about="divergence PPO by binary total variation, p = exp(log_prob), arXiv:2602.04879 eq. 13",
)
def dppo_tv(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    return _divergence_masked(config, tokens, lambda old, new: (new.exp() - old.exp()).abs())


@of_divergence(
    "-M r A, M as in dppo_tv, D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))",
    about="divergence PPO by binary Kullback-Leibler divergence, arXiv:2602.04879 eq. 14",
)
def dppo_kl(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    return _divergence_masked(config, tokens, binary_divergence)


@of_sequence_ratio(
    "-s A, log s_t = sg(mean_t log c) + log c - sg(log c), c = min(r A, clip(r, 1 - eps_clip, 1 + "
    "eps_clip_high) A) / A",
    about="geometric mean of a sequence's clipped ratios, arXiv:2507.20673 eq. 4",
    sequence_sums=("clipped_policy",),
)
def gmpo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Clip token by token. With one advantage per sequence, the sample mean has the gradient of the
    paper's objective.
    """
    advantages, log_ratio = tokens.advantages, tokens.log_probs - tokens.anchor(config)
    held, *is_clipped = clipped_by_sign(log_ratio, clip_range_of_logs(config), advantages)
    mean = masked(sums.mean("clipped_policy"), tokens.loss_mask).to(held.dtype)
    ratio = clamped_log_ratio(mean + straight_through(held)).exp()
    return Outcome(-ratio * advantages, mean, *is_clipped)


def get_objective(config: PolicyLossConfig) -> Formula:
    """Return the formula that the config names, from a row or a custom function."""
    is_custom = is_replaced("policy_loss", config)
    return _custom if is_custom else OBJECTIVES[config.policy_loss].function


def _custom(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    path, log_probs = str(config.custom_policy_loss_path), tokens.log_probs
    loss = load_custom_function("custom_policy_loss_path", path)(config, tokens, log_probs)
    meaning = "the loss of each token of this rank's window"
    where = f"--custom-policy-loss-path {path}"
    check_returned(loss, log_probs.shape, where, meaning, differentiable_in=log_probs)
    return Outcome(masked(loss, tokens.loss_mask))


def _clipped_surrogate(config: PolicyLossConfig, tokens: Tokens, log_ratio: Tensor) -> Outcome:
    """Compute -min(r A, clip(r) A), at most -eps_clip_c A for A < 0 (dual clip,
    arXiv:1912.09729).
    """
    advantages, ratio = tokens.advantages, clamped_log_ratio(log_ratio).exp()
    effective_ratio, *is_clipped = clipped_by_sign(ratio, clip_range(config), advantages)
    if config.eps_clip_c is not None:
        is_dual_clipped = (advantages < 0) & (ratio > config.eps_clip_c)
        effective_ratio = effective_ratio.masked_fill(is_dual_clipped, config.eps_clip_c)
    return Outcome(-effective_ratio * advantages, log_ratio.detach(), *is_clipped)


def binary_divergence(old: Tensor, new: Tensor) -> Tensor:
    """Compute KL(old || new) in nats over {this token, any other token}. It is infinite if only the
    new policy gives other tokens probability 0.
    """
    others_old, others_new = (-torch.expm1(x.clamp(max=0.0)) for x in (old, new))
    others_divergence = torch.xlogy(others_old, others_old) - torch.xlogy(others_old, others_new)
    p_old = old.exp()
    # 0 log 0 is 0, for tokens that the old policy could not sample.
    return torch.where(p_old == 0, 0.0, p_old * (old - new)) + others_divergence


def _divergence_masked(
    config: PolicyLossConfig, tokens: Tokens, divergence: Callable[[Tensor, Tensor], Tensor]
) -> Outcome:
    """Compute -r A without the tokens that move away and are further away than delta."""
    delta = DPPO_DELTAS[config.policy_loss] if config.dppo_delta is None else config.dppo_delta
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
