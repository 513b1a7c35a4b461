"""The policy objectives: what each response token contributes to the loss. One row of the table each.

r = exp(log_prob - old_log_prob), A the advantage, sg() stops the gradient. What stands in the place of old_log_prob is
`--ratio-anchor`'s.

Every function takes the config, the packed micro-batch and `log_probs` [window] (any floating dtype; computed in float32,
float64 stays), and needs no other rank: what a sequence ratio needs of the other context-parallel ranks comes in as
`sequence`. Masked positions are exactly 0 and pass no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megatron_pg.config.custom import check_returned, load_custom_function
from megatron_pg.config.policy_loss import PolicyLossConfig, anchor_of
from megatron_pg.config.rows import ANCHOR, Row, Table
from megatron_pg.loss.clip import clip_range, clipped_by_sign
from megatron_pg.loss.masking import (
    clamped_log_ratio,
    given_log_probs,
    masked,
    straight_through,
    weighted_log_probs,
    with_masked_inputs,
)
from megatron_pg.loss.sequence import SequenceLogRatios, given_sequence
from megatron_pg.step.batch import PackedBatch

CLIP_SETTINGS = ("eps_clip", "eps_clip_high")
"""The settings of the clip range, which have values whether an objective reads them or not."""


@dataclass(frozen=True, eq=False)
class ObjectiveOutput:
    """The per-token loss of a micro-batch, and what the metrics need of its making."""

    loss: Tensor
    """The per-token loss [window], with gradient."""
    log_ratio: Tensor | None = None
    """The detached log r [window] before the clamp to +-20; of a sequence ratio that of the token's sequence. This and
    the next two are None for an objective without a ratio."""
    is_clipped: Tensor | None = None
    """Where the ratio is outside the objective's clip range, [window] bool."""
    is_effectively_clipped: Tensor | None = None
    """Where the ratio is outside on the side that the sign of A makes active, [window] bool."""


@dataclass(frozen=True, kw_only=True)
class Objective(Row):
    """A policy objective and its properties. What is not stated is the careful answer."""

    function: Callable[..., ObjectiveOutput]
    """The formula (config, batch, log_probs) -> ObjectiveOutput; that of a sequence ratio takes `sequence` besides."""
    ratio: Literal["none", "token", "sequence"] = "none"
    """What its ratio is one number of: sequence sums and the metrics of the ratio follow."""
    reads_clip: Callable[[Any], tuple[str, ...]] = lambda config: ()
    """Which of `CLIP_SETTINGS` it reads under a config; of the others it is said at startup where they are given."""
    zero_advantage_is_zero_gradient: bool = False
    """Whether a token whose advantage is 0 has no gradient, so that the fused head leaves it out of the products."""

    def unread_settings(self, config: Any) -> tuple[str, ...]:
        return tuple(name for name in CLIP_SETTINGS if name not in self.reads_clip(config))

    def sums_over_sequences(self) -> tuple[str, ...]:
        return self.sequence_sums or (("policy",) if self.ratio == "sequence" else ())

    def __call__(
        self,
        config: PolicyLossConfig,
        batch: PackedBatch,
        log_probs: Tensor,
        *,
        sequence: SequenceLogRatios | None = None,
    ) -> ObjectiveOutput:
        if self.ratio != "sequence":
            return self.function(config, batch, log_probs)
        sequence = given_sequence(sequence, f"--policy-loss {self.name}")
        return self.function(config, batch, log_probs, sequence)


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
    """The log-ratio [window], log_prob - old_log_prob within +-20, zero gradient outside; 0 at masked positions.

    All are [window]: `log_probs` with gradient, `old_log_probs` taken as a constant, `loss_mask` bool.
    """
    return clamped_log_ratio(
        masked(log_probs, loss_mask) - masked(old_log_probs.detach(), loss_mask)
    )


def _reads_eps_clip(config: Any) -> bool:
    """Whether cispo does: as its lower bound, or for want of an upper one."""
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
def ppo(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> ObjectiveOutput:
    """PPO's clipped surrogate, GRPO's objective; clip-higher and dual clip by the config."""
    anchor = given_log_probs(batch, anchor_of(config), "--policy-loss ppo")
    return _clipped_surrogate(config, batch, masked(log_probs, batch.loss_mask) - anchor)


@objective(
    "-min(s A, clip(s, 1 - eps_clip, 1 + eps_clip_high) A), log s_t = sg(mean_t log r) + log_prob - sg(log_prob)",
    about="one ratio for a sequence; arXiv:2507.18071, GSPO-token",
    inputs=(ANCHOR,),
    options=("eps_clip_c",),
    reads_clip=lambda config: CLIP_SETTINGS,
    ratio="sequence",
    is_sum_over_tokens=True,
)
def gspo(
    config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor, sequence: SequenceLogRatios
) -> ObjectiveOutput:
    """PPO's surrogate of the sequence ratio; each token carries the gradient of its own log-prob."""
    log_probs = masked(log_probs, batch.loss_mask)
    sequence_log_ratio = masked(sequence.mean_of_tokens("policy"), batch.loss_mask)
    log_ratio = sequence_log_ratio.to(log_probs.dtype) + straight_through(log_probs)
    return _clipped_surrogate(config, batch, log_ratio)


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
def cispo(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> ObjectiveOutput:
    """REINFORCE weighted by a clipped ratio that has no gradient, so that no token loses its own."""
    log_probs = masked(log_probs, batch.loss_mask)
    log_ratio = log_probs.detach() - given_log_probs(
        batch, anchor_of(config), "--policy-loss cispo"
    )
    ratio = clamped_log_ratio(log_ratio).exp()
    lowest, highest = clip_range(config)
    lowest = lowest if config.cispo_lower_bound else 0.0
    is_clipped = (ratio < lowest) | (ratio > highest)
    weight = ratio.clamp(lowest, highest) * masked(batch.advantages, batch.loss_mask)
    return ObjectiveOutput(
        loss=-weighted_log_probs(weight, log_probs),
        log_ratio=log_ratio,
        is_clipped=is_clipped,
        # The weight is clipped whatever the sign of the advantage.
        is_effectively_clipped=is_clipped,
    )


@objective(
    "-A log_prob",
    about="Williams, 1992",
    is_sum_over_tokens=True,
    zero_advantage_is_zero_gradient=True,
)
def reinforce(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> ObjectiveOutput:
    """The score-function estimator, without a ratio."""
    advantages = masked(batch.advantages, batch.loss_mask)
    return ObjectiveOutput(-weighted_log_probs(advantages, masked(log_probs, batch.loss_mask)))


@objective("-log_prob", about="supervised: advantages are not read", is_sum_over_tokens=True)
def sft(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> ObjectiveOutput:
    """Supervised cross-entropy of the response tokens."""
    return ObjectiveOutput(-masked(log_probs, batch.loss_mask))


def get_objective(config: PolicyLossConfig) -> Objective:
    """The objective that the config names, a custom one included, of whose properties nothing is known.

    Raises:
        ValueError: an import path that does not resolve.
    """
    path = config.custom_policy_loss_path
    if path is None:
        return OBJECTIVES[config.policy_loss]
    function = functools.partial(_custom, load_custom_function("custom_policy_loss_path", path))
    return Objective(name=path, formula="", function=function)


def _custom(
    function: Callable[..., Tensor], config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor
) -> ObjectiveOutput:
    log_probs = masked(log_probs, batch.loss_mask)
    loss = function(config, with_masked_inputs(batch), log_probs)
    check_returned(
        loss,
        batch.loss_mask.shape,
        f"--custom-policy-loss-path {config.custom_policy_loss_path}",
        "the loss of each token of this rank's window",
        differentiable_in=log_probs,
    )
    return ObjectiveOutput(masked(loss, batch.loss_mask))


def _clipped_surrogate(
    config: PolicyLossConfig, batch: PackedBatch, log_ratio: Tensor
) -> ObjectiveOutput:
    """The surrogate -min(r A, clip(r) A), for A < 0 at most -eps_clip_c A (dual clip, arXiv:1912.09729)."""
    advantages = masked(batch.advantages, batch.loss_mask)
    ratio = clamped_log_ratio(log_ratio).exp()
    effective_ratio, *is_clipped = clipped_by_sign(ratio, clip_range(config), advantages)
    if config.eps_clip_c is not None:
        is_dual_clipped = (advantages < 0) & (ratio > config.eps_clip_c)
        effective_ratio = effective_ratio.masked_fill(is_dual_clipped, config.eps_clip_c)
    return ObjectiveOutput(-effective_ratio * advantages, log_ratio.detach(), *is_clipped)
