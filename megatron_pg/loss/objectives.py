"""The policy objectives: the loss of each response token. One row of the table each.

r = exp(log_prob - old_log_prob), A the advantage, sg() stops the gradient. `--ratio-anchor` names the log-probs that stand
in the place of old_log_prob.

Every function takes the config, the tokens of this rank's window and the sums over whole sequences. Tokens are 0 and
without gradient where masked, so a formula needs no mask. It is computed in the dtype of the log-probs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megatron_pg.config.custom import check_returned, load_custom_function
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.rows import ANCHOR, Row, Table
from megatron_pg.loss.clip import clip_range, clipped_by_sign
from megatron_pg.loss.sequence import SequenceSums
from megatron_pg.loss.tokens import (
    Tokens,
    clamped_log_ratio,
    masked,
    straight_through,
    weighted_log_probs,
)

CLIP_SETTINGS = ("eps_clip", "eps_clip_high")
"""The settings of the clip range, which have values whether an objective reads them or not."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The per-token loss of a micro-batch, and the ratio for the metrics.

    An objective without a ratio has None for the last three.
    """

    loss: Tensor
    """The per-token loss [window], with gradient."""
    log_ratio: Tensor | None = None
    """The detached log r [window] before the clamp to +-20; of a sequence ratio that of the token's sequence."""
    is_clipped: Tensor | None = None
    """Tokens whose ratio is outside the objective's clip range, [window] bool."""
    is_effectively_clipped: Tensor | None = None
    """Tokens whose ratio is outside on the side that the sign of A makes active, [window] bool."""


@dataclass(frozen=True, kw_only=True)
class Objective(Row):
    """A policy objective and its properties. A property that is not stated has the careful value."""

    function: Callable[[PolicyLossConfig, Tokens, SequenceSums], Outcome]
    """The formula."""
    ratio: Literal["none", "token", "sequence"] = "none"
    """The unit that has one ratio. Sequence sums and the metrics of the ratio follow from it."""
    reads_clip: Callable[[Any], tuple[str, ...]] = lambda config: ()
    """The names of `CLIP_SETTINGS` that it reads under a config. Others are named at startup where they are given."""
    zero_advantage_is_zero_gradient: bool = False
    """True where a token whose advantage is 0 has no gradient. The fused head leaves such tokens out of the products."""

    def unread_settings(self, config: Any) -> tuple[str, ...]:
        return tuple(name for name in CLIP_SETTINGS if name not in self.reads_clip(config))

    def sums_over_sequences(self) -> tuple[str, ...]:
        return self.sequence_sums or (("policy",) if self.ratio == "sequence" else ())

    def __call__(self, config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
        return self.function(config, tokens, sums)


OBJECTIVES: Table[Objective] = Table(
    "policy_loss",
    replaced_by="custom_policy_loss_path",
    also_known_as={
        "grpo": "ppo",
        "dr_grpo": "ppo, with --loss-aggregation constant and dr_grpo's advantages",
        "pg": "reinforce",
        "policy_gradient": "reinforce",
        "nll": "sft",
        "dppo": "dppo_tv",
        "geo_mean": "gmpo",
    },
)
"""The rows by the name that `--policy-loss` takes."""

objective = OBJECTIVES.decorator(Objective)


def clipped_log_ratio(log_probs: Tensor, old_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """Compute log_prob - old_log_prob within +-20, [window], with zero gradient outside; 0 at masked positions.

    All are [window]: `log_probs` with gradient, `old_log_probs` taken as a constant, `loss_mask` bool. For objectives of
    the user's own.
    """
    return clamped_log_ratio(
        masked(log_probs, loss_mask) - masked(old_log_probs.detach(), loss_mask)
    )


def _reads_eps_clip(config: Any) -> bool:
    """Say if cispo reads eps_clip: as its lower bound, or for want of an upper one."""
    return config.cispo_lower_bound or config.eps_clip_high is None


@objective(
    "-min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A)",
    about="PPO's clipped surrogate, arXiv:1707.06347 eq. 7",
    inputs=(ANCHOR,),
    options=("eps_clip_c",),
    reads_clip=lambda config: CLIP_SETTINGS,
    ratio="token",
    is_sum_over_tokens=True,
    zero_advantage_is_zero_gradient=True,
)
def ppo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """PPO's clipped surrogate, GRPO's objective; clip-higher and dual clip by the config."""
    return _clipped_surrogate(config, tokens, tokens.log_probs - tokens.anchor(config))


@objective(
    "-min(s A, clip(s, 1 - eps_clip, 1 + eps_clip_high) A), log s_t = sg(mean_t log r) + log_prob - sg(log_prob)",
    about="one ratio for a sequence; arXiv:2507.18071, GSPO-token",
    inputs=(ANCHOR,),
    options=("eps_clip_c",),
    reads_clip=lambda config: CLIP_SETTINGS,
    ratio="sequence",
    is_sum_over_tokens=True,
)
def gspo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """PPO's surrogate of the sequence ratio; each token carries the gradient of its own log-prob."""
    log_ratio = masked(sums.mean("policy"), tokens.loss_mask).to(tokens.log_probs.dtype)
    return _clipped_surrogate(config, tokens, log_ratio + straight_through(tokens.log_probs))


@objective(
    "-sg(min(r, 1 + eps_clip_high)) A log_prob",
    about="MiniMax-M1, arXiv:2506.13585",
    inputs=(ANCHOR,),
    options=("cispo_lower_bound",),
    reads_clip=lambda config: CLIP_SETTINGS if _reads_eps_clip(config) else CLIP_SETTINGS[1:],
    ratio="token",
    is_sum_over_tokens=True,
    zero_advantage_is_zero_gradient=True,
)
def cispo(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """REINFORCE weighted by a clipped ratio that has no gradient, so that no token loses its own."""
    log_ratio = tokens.log_probs.detach() - tokens.anchor(config)
    ratio = clamped_log_ratio(log_ratio).exp()
    lowest, highest = clip_range(config)
    lowest = lowest if config.cispo_lower_bound else 0.0
    is_clipped = (ratio < lowest) | (ratio > highest)
    weight = ratio.clamp(lowest, highest) * tokens.advantages
    # The weight is clipped whatever the sign of the advantage.
    loss = -weighted_log_probs(weight, tokens.log_probs)
    return Outcome(loss, log_ratio, is_clipped, is_clipped)


@objective(
    "-A log_prob",
    about="Williams, 1992",
    is_sum_over_tokens=True,
    zero_advantage_is_zero_gradient=True,
)
def reinforce(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Score-function estimator without a ratio."""
    return Outcome(-weighted_log_probs(tokens.advantages, tokens.log_probs))


@objective("-log_prob", about="supervised: advantages are not read", is_sum_over_tokens=True)
def sft(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Supervised cross-entropy of the response tokens."""
    return Outcome(-tokens.log_probs)


@objective(
    "D(student, teacher)",
    about="the divergence of --distill-divergence over the whole vocabulary; advantages are not read",
    is_sum_over_tokens=True,
)
def distill(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """Distillation on the tokens of the samples, whichever policy sampled them."""
    return Outcome(tokens.given("divergence"))


def get_objective(config: PolicyLossConfig) -> Objective:
    """Return the objective that the config names. Of a custom one no property is known.

    Raises:
        ValueError: an import path that does not resolve.
    """
    path = config.custom_policy_loss_path
    if path is None:
        return OBJECTIVES[config.policy_loss]
    function = functools.partial(_custom, load_custom_function("custom_policy_loss_path", path))
    return Objective(name=path, formula="", function=function)


def _custom(
    function: Callable[..., Tensor], config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums
) -> Outcome:
    loss = function(config, tokens, tokens.log_probs)
    check_returned(
        loss,
        tokens.loss_mask.shape,
        f"--custom-policy-loss-path {config.custom_policy_loss_path}",
        "the loss of each token of this rank's window",
        differentiable_in=tokens.log_probs,
    )
    return Outcome(masked(loss, tokens.loss_mask))


def _clipped_surrogate(config: PolicyLossConfig, tokens: Tokens, log_ratio: Tensor) -> Outcome:
    """Compute -min(r A, clip(r) A), for A < 0 at most -eps_clip_c A (dual clip, arXiv:1912.09729)."""
    advantages, ratio = tokens.advantages, clamped_log_ratio(log_ratio).exp()
    effective_ratio, *is_clipped = clipped_by_sign(ratio, clip_range(config), advantages)
    if config.eps_clip_c is not None:
        is_dual_clipped = (advantages < 0) & (ratio > config.eps_clip_c)
        effective_ratio = effective_ratio.masked_fill(is_dual_clipped, config.eps_clip_c)
    return Outcome(-effective_ratio * advantages, log_ratio.detach(), *is_clipped)
