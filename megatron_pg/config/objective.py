"""The terms of the loss: settings of the objective, of the KL and entropy terms, and of distillation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_pg.config.fields import Interval, Settings
from megatron_pg.config.rows import ANCHOR, TABLES


@dataclass(frozen=True)
class ObjectiveSettings(Settings):
    """Settings of the per-token loss."""

    policy_loss: str = "ppo"
    """Per-token loss, with r = exp(log_prob - old_log_prob)."""

    custom_policy_loss_path: str | None = None
    """Import path, pkg.mod.fn or pkg.mod:fn, of f(config, tokens, log_probs) -> per-token loss
    [window]. Takes the place of policy_loss."""

    ratio_anchor: Literal["old", "rollout"] = "old"
    """Log-probs in the denominator of the ratio r, wherever r stands. old: old_log_probs, of the
    policy that the step starts from. rollout: rollout_log_probs, of the engine that sampled; then r
    carries staleness and mismatch, the clip bounds both, and old_log_probs are not read. Not with
    use_tis."""

    eps_clip: Annotated[float, Interval(0, 1)] = 0.2
    """The ratio is clipped from below at 1 - eps_clip. Above 0, at most 1."""

    eps_clip_high: Annotated[float | None, Interval(0)] = None
    """The ratio is clipped from above at 1 + eps_clip_high (clip-higher, arXiv:2503.14476). Above
    0. Unset: eps_clip."""

    eps_clip_c: Annotated[float | None, Interval(1)] = None
    """Dual clip of ppo and gspo (arXiv:1912.09729): where A < 0 the per-token loss is at most
    -eps_clip_c A. Above 1. Unset: no dual clip."""

    cispo_lower_bound: bool = False
    """Clip the ratio of cispo from below too: -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A
    log_prob."""

    sapo_tau_pos: Annotated[float, Interval(0)] = 1.0
    """Temperature tau of sapo where A > 0. Above 0; the larger, the faster the gradient falls off as
    r leaves 1."""

    sapo_tau_neg: Annotated[float, Interval(0)] = 1.05
    """Temperature tau of sapo where A <= 0. Above 0."""

    dppo_delta: Annotated[float | None, Interval(0, 1)] = None
    """Divergence above which dppo_tv and dppo_kl drop a token with A < 0 whose probability fell.
    Above 0, at most 1. Unset: 0.15 for dppo_tv, 0.05 nats for dppo_kl."""

    dppo_delta_high: Annotated[float | None, Interval(0, 1)] = None
    """The same for a token with A > 0 whose probability rose. Unset: dppo_delta."""

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield a rollout engine as the ratio's denominator where there is no ratio, or twice."""
        if self.ratio_anchor != "rollout":
            return
        if self.use_tis:
            yield "--ratio-anchor rollout --use-tis would weigh the same mismatch twice: drop one of the two"
        rows = [row for table in TABLES.values() for row in table.rows_on(self)]
        has_ratio = any(ANCHOR in row.inputs for row in rows) or self.custom_policy_loss_path
        if not (has_ratio or (self.use_unbiased_kl and self.kl_loss_coef > 0)):
            found = f"--policy-loss {self.policy_loss} has none"
            yield f"--ratio-anchor rollout is about a ratio, and {found}: drop it, or choose another objective"


@dataclass(frozen=True)
class RegularizerSettings(Settings):
    """Settings of the KL and entropy terms."""

    regularizer_aggregation: Literal["sample_mean", "loss"] = "sample_mean"
    """Aggregation of the KL and entropy terms. sample_mean: the sample mean, whatever
    loss_aggregation is. loss: the aggregation of the policy loss, so that the whole loss is
    aggregate(pg + beta kl - c H), over the tokens before any rejection; grad_divisor then divides
    all of it."""

    kl_loss_coef: Annotated[float, Interval(0, closed=True)] = 0.0
    """Weight beta of the KL term: loss = pg + beta * kl, the mean of regularizer_aggregation. At
    least 0. Above 0 it needs ref_log_probs, of the reference model."""

    kl_loss_type: str = "k3"
    """Per-token estimate of KL(policy || reference), with d = log_prob - ref_log_prob."""

    use_unbiased_kl: bool = False
    """Weight the KL estimate by the ratio: r * kl, with gradient through r."""

    kl_loss_gradient: Literal["estimate", "k2"] = "estimate"
    """Gradient of the KL term. estimate: that of kl_loss_type. k2: that of d^2 / 2, whatever
    kl_loss_type makes of the value (straight-through): its expectation on-policy is the gradient of
    the divergence (arXiv:2506.09477). Not with use_unbiased_kl."""

    entropy_coef: Annotated[float, Interval(0, closed=True)] = 0.0
    """Weight c of the entropy bonus: loss = pg - c * entropy, the mean of regularizer_aggregation of
    the entropy of the full vocabulary, in nats, with gradient. At least 0."""

    def conflicts(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield an aggregation of no terms, and two gradients of the KL term."""
        if self.regularizer_aggregation == "loss" and not (self.kl_loss_coef or self.entropy_coef):
            yield "--regularizer-aggregation loss is about --kl-loss-coef and --entropy-coef: give one, or drop it"
        if self.kl_loss_gradient == "k2" and self.use_unbiased_kl:
            yield "--kl-loss-gradient k2 and --use-unbiased-kl are two gradients of the KL term: drop one of the two"


@dataclass(frozen=True)
class DistillationSettings(Settings):
    """Settings of the divergence from a teacher."""

    distill_coef: Annotated[float, Interval(0, closed=True)] = 0.0
    """Weight of a distillation term beside another policy loss: loss = pg + distill_coef * D, D the
    divergence from the teacher by the same aggregation. At least 0. Needs distill_teacher."""

    distill_divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "reverse_kl"
    """D of --policy-loss distill and of distill_coef, with p of the student and q of the teacher.
    forward_kl: sum_v q log(q / p). reverse_kl: sum_v p log(p / q). jsd: beta sum_v q log(q / m) + (1 -
    beta) sum_v p log(p / m), m = beta q + (1 - beta) p (arXiv:2306.13649)."""

    distill_beta: Annotated[float, Interval(0, 1)] = 0.5
    """beta of jsd, the teacher's weight in the mixture. Above 0, below 1."""

    distill_teacher: Literal["logits", "hidden", "top_k"] | None = None
    """Side channels of the samples that hold the teacher, for every response token. logits:
    teacher_logits over the vocabulary. hidden: teacher_hidden, to be multiplied by the teacher's
    output weight (PolicyStep's teacher_weight). top_k: teacher_ids and teacher_log_probs of its
    likeliest tokens, at the rollout temperature; the rest is one bucket on both sides."""

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults between teacher, divergence and policy loss."""
        is_loss = self.policy_loss == "distill" and self.custom_policy_loss_path is None
        divergence, beta = self.distill_divergence, self.distill_beta
        owners = "--policy-loss distill and --distill-coef: give one of them, or drop it"
        if self.distills and self.distill_teacher is None:
            flag = "--policy-loss distill" if is_loss else "--distill-coef"
            yield f"{flag} needs --distill-teacher logits, hidden or top_k, what the samples have of the teacher"
        if self.distill_teacher is not None and not self.distills:
            yield f"--distill-teacher is for {owners}"
        if divergence != DistillationSettings.distill_divergence and not self.distills:
            yield f"--distill-divergence {divergence} is about {owners}"
        if is_loss and self.distill_coef > 0:
            yield "--distill-coef is for another policy loss: with --policy-loss distill drop it"
        if self.distills and self.replay_sampling_set:
            yield "--replay-sampling-set gives the student a set that the teacher lacks: drop it, or the distillation"
        if beta == 1:
            yield "--distill-beta 1 leaves nothing of the student in the mixture: give a number below 1"
        elif beta != DistillationSettings.distill_beta and divergence != "jsd":
            yield f"--distill-beta {beta:g} is about --distill-divergence jsd: add what is missing, or drop it"
