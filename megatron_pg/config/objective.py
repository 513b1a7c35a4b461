"""Settings for the loss terms: objective, corrections, KL and entropy terms, and distillation."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_pg.config.settings import Settings, setting
from megatron_pg.config.tables import ANCHOR, TABLES, rows_on
from megatron_pg.config.values import ABOVE_0, FROM_0, Interval, flag_of

MAX_LOG_RATIO = 20.0
"""Clamp for log-ratios before exp: every ratio is in [e^-20, e^20], and e^20 is 4.9e8."""
# Bounds that some ratio can reach.
_LOWER_BOUND = Interval(0, math.exp(MAX_LOG_RATIO), closed=True)
_UPPER_BOUND = Interval(math.exp(-MAX_LOG_RATIO), closed=True)
_OPEN_UPPER_BOUND = Interval(math.exp(-MAX_LOG_RATIO), closed=True, or_infinite=True)
BOUNDS = {
    "tis_clip_low": "tis_clip",
    "geometric_rejection_low": "geometric_rejection_high",
    "sequence_rejection_low": "sequence_rejection_high",
}
"""The upper bound of a ratio by its lower one."""


@dataclass(frozen=True)
class ObjectiveSettings(Settings):
    """Settings for the per-token loss."""

    # fmt: off
    policy_loss: str = setting("ppo", "Per-token loss, with r = exp(log_prob - old_log_prob).")
    custom_policy_loss_path: str | None = setting(None, """
        Import path, pkg.mod.fn, of f(config, tokens, log_probs) -> per-token loss [window], instead
        of policy_loss.""")
    ratio_anchor: Literal["old", "rollout"] = setting("old", """
        Log-probs in the denominator of every ratio r. old: old_log_probs, from the policy at the
        start of the step. rollout: rollout_log_probs, from the engine that sampled. old_log_probs
        are then not read. Not with use_tis.""")
    old_log_probs: Literal["given", "current", "interpolated"] = setting("given", """
        Log-probs of the old policy. given: from the samples. current: from the training forward
        pass, detached, so that they need no pass of their own. The ratio is then 1 and keeps its
        gradient. Exact if each sample is used for one optimizer step. interpolated: rollout / d +
        (1 - 1 / d) current for a token that is d >= 1 versions old, current for d = 0 (A-3PO,
        arXiv:2512.06547). Requires rollout_log_probs and policy_version.""")
    eps_clip: float = setting(0.2, Interval(0, 1), """
        Clip the ratio from below at 1 - eps_clip. Above 0, at most 1.""")
    eps_clip_high: float | None = setting(None, ABOVE_0, """
        Clip the ratio from above at 1 + eps_clip_high (arXiv:2503.14476). Above 0. Unset:
        eps_clip.""")
    eps_clip_c: float | None = setting(None, Interval(1), """
        Dual clip of ppo and gspo (arXiv:1912.09729): the loss is at most -eps_clip_c A if A < 0.
        Above 1.""")
    cispo_lower_bound: bool = setting(False, """
        Clip the ratio of cispo from below too: -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A
        log_prob.""")
    sapo_tau_pos: float = setting(1.0, ABOVE_0, """
        Temperature tau of sapo if A > 0. Above 0. With a larger tau the gradient decays faster as r
        leaves 1.""")
    sapo_tau_neg: float = setting(1.05, ABOVE_0, "Temperature tau of sapo if A <= 0. Above 0.")
    vespo_k_pos: float = setting(2.0, FROM_0, "Exponent k of vespo if A >= 0. At least 0.")
    vespo_lambda_pos: float = setting(3.0, FROM_0, "Decay lam of vespo if A >= 0. At least 0.")
    vespo_k_neg: float = setting(3.0, FROM_0, "Exponent k of vespo if A < 0. At least 0.")
    vespo_lambda_neg: float = setting(2.0, FROM_0, "Decay lam of vespo if A < 0. At least 0.")
    dppo_delta: float | None = setting(None, Interval(0, 1), """
        Largest divergence at which dppo_tv and dppo_kl keep a token with A < 0 and a lower
        probability than before. Above 0, at most 1. Unset: 0.15 for dppo_tv, 0.05 nats for
        dppo_kl.""")
    dppo_delta_high: float | None = setting(None, Interval(0, 1), """
        Largest divergence for a token with A > 0 and a higher probability. Unset: dppo_delta.""")
    sequence_unit: Literal["sequence", "turn"] = setting("sequence", """
        Unit of every sum and mean over a sequence. turn: the tokens that share a number in the
        sample's turn_ids.""")
    # fmt: on

    @property
    def anchor(self) -> str:
        """The field of `Sample` in the ratio's denominator."""
        return f"{self.ratio_anchor}_log_probs"

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        rows = [row for table in TABLES.values() for row in rows_on(table, self)]
        if self.sequence_unit == "turn" and not any(r.sequence_sums for r in rows):
            yield (
                "--sequence-unit turn has no effect without a sum over sequences. Remove it or "
                "choose --policy-loss gspo."
            )
        if self.old_log_probs != "given":
            yield from self._conflicts_of_trained_pass(rows)
        if self.ratio_anchor != "rollout":
            return
        if self.use_tis:
            yield (
                "--ratio-anchor rollout and --use-tis are mutually exclusive: both correct the "
                "same mismatch. Remove one of them."
            )
        has_reader = any(ANCHOR in row.inputs for row in rows) or self.custom_policy_loss_path
        if not (has_reader or (self.use_unbiased_kl and self.kl_loss_coef > 0)):
            reader = f"--policy-loss {self.policy_loss}"
            yield (
                f"--ratio-anchor rollout has no effect with {reader}. Remove it or choose a "
                "different objective."
            )

    def _conflicts_of_trained_pass(self: Any, rows: Sequence[Any]) -> Iterator[str]:
        flag = f"--old-log-probs {self.old_log_probs}"
        if self.ratio_anchor == "rollout":
            yield f"{flag} has no effect with --ratio-anchor rollout. Remove one of them."
        is_read = any({ANCHOR, "old_log_probs"} & {*row.inputs} for row in rows)
        if self.old_log_probs == "interpolated" and not (is_read or self.custom_policy_loss_path):
            yield (
                f"{flag} is not read by --policy-loss {self.policy_loss}. Remove it, or choose "
                "another objective."
            )
        if self.use_opsm and self.old_log_probs == "current":
            yield (
                f"{flag} and --use-opsm are mutually exclusive: the old policy is the current one, "
                "so no sequence is off-policy"
            )
        if self.rejection_denominator == "accepted":
            yield from self._conflicts_of_accepted_counts(flag, rows)

    def _conflicts_of_accepted_counts(self: Any, flag: str, rows: Sequence[Any]) -> Iterator[str]:
        """Yield what one factor of the whole gradient, known after the last micro-batch, does not
        divide.
        """
        mode = f"--loss-aggregation {self.loss_aggregation}"
        rejecting = [row for row in rows if getattr(row, "rejects", False)]
        drops_whole = all(row.sequence_sums for row in rejecting) and self.sequence_unit != "turn"
        others: list[str] = []
        if self.custom_pg_loss_reducer_function_path:
            others = ["--custom-pg-loss-reducer-function-path"]
        elif self.loss_aggregation == "prompt_mean":
            others = [mode]
        elif self.loss_aggregation == "sample_mean" and not drops_whole:
            others = [f"{mode} and {row.switch}" for row in rejecting]
        elif self.loss_aggregation == "token_mean":
            terms = ("kl_loss_coef", "entropy_coef", "distill_coef", "divide_gradient_twice")
            others = [flag_of(name) for name in terms if getattr(self, name)]
            others += ["grad_divisor"] * (self.grad_divisor is not None)
        for other in others:
            yield (
                f"{flag} requires --rejection-denominator original with {other}: what is accepted "
                "is known only after the last micro-batch, and no factor of the whole gradient "
                "counts it then"
            )


@dataclass(frozen=True)
class MismatchSettings(Settings):
    """Settings for importance weights and the rejection of tokens and sequences."""

    # fmt: off
    use_tis: bool = setting(False, """
        Truncated importance sampling against the mismatch of rollout engine and trainer: weight
        the per-token loss by tis_level and tis_mode. Requires rollout_log_probs.""")
    custom_tis_function_path: str | None = setting(None, """
        Import path of f(config, tokens, log_probs, pg_loss) -> (pg_loss, loss_mask), instead of
        use_tis's weights.""")
    tis_level: Literal["token", "sequence", "geometric"] = setting("token", """
        Unit of the importance weight w, with d = old_log_prob - rollout_log_prob. token: w =
        exp(d). sequence: w = exp(sum_t d). geometric: w = exp(mean_t d). The last two are equal
        for all tokens of a sample.""")
    tis_mode: Literal["truncate", "mask"] = setting("truncate", """
        Treatment of w. truncate: clamp(w, tis_clip_low, tis_clip). mask: 0 outside these bounds
        (IcePop at level token).""")
    tis_clip: float = setting(2.0, _UPPER_BOUND, """
        Upper bound of the importance weight. At least e^-20.""")
    tis_clip_low: float = setting(0.0, _LOWER_BOUND, """
        Lower bound of the importance weight. At least 0, at most e^20 and tis_clip.""")
    score_centering: bool = setting(False, """
        Score centering (arXiv:2609.20807): subtract the rollout engine's mean of the weighted
        gradient of log p from each token's gradient, so that a constant advantage has no gradient
        on average. Requires sampler_top_k, the engine's most likely tokens. With use_tis the
        per-token weights of tis_mode apply.""")
    use_geometric_rejection: bool = setting(False, """
        Keep a sequence only if exp(mean_t d), d as in tis_level, lies between
        geometric_rejection_low and geometric_rejection_high. Requires rollout_log_probs.""")
    geometric_rejection_low: float = setting(0.999, _LOWER_BOUND, """
        Smallest exp(mean_t d) that is kept. At most e^20. 0: no bound.""")
    geometric_rejection_high: float = setting(1.001, _OPEN_UPPER_BOUND, """
        Largest exp(mean_t d) that is kept. At least e^-20. inf: no bound.""")
    use_sequence_rejection: bool = setting(False, """
        Keep a sequence only if exp(sum_t d), d as in tis_level, lies between
        sequence_rejection_low and sequence_rejection_high. Requires rollout_log_probs.""")
    sequence_rejection_low: float = setting(0.5, _LOWER_BOUND, """
        Smallest exp(sum_t d) that is kept. At most e^20. 0: no bound.""")
    sequence_rejection_high: float = setting(2.0, _OPEN_UPPER_BOUND, """
        Largest exp(sum_t d) that is kept. At least e^-20. inf: no bound.""")
    use_opsm: bool = setting(False, """
        Off-policy sequence masking: drop a sequence if A < 0 and mean_t(old_log_prob - log_prob) >
        opsm_delta.""")
    opsm_delta: float = setting(1e-4, FROM_0, """
        Threshold of use_opsm, in nats per token. At least 0.""")
    rejection_denominator: Literal["original", "accepted"] = setting("original", """
        Totals that divide the policy loss under rejection. original: totals before rejection.
        accepted: totals over the kept tokens.""")
    # fmt: on

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        if self.score_centering:
            yield from self._conflicts_of_centering()
        for low, high in BOUNDS.items():
            lowest, highest = getattr(self, low), getattr(self, high)
            if lowest > highest:
                found = f"{flag_of(low)} {lowest:g} exceeds {flag_of(high)} {highest:g}"
                yield f"{found}. Lower it."

    def _conflicts_of_centering(self: Any) -> Iterator[str]:
        objective = TABLES["policy_loss"].get(self.policy_loss)
        is_own = self.custom_policy_loss_path is not None
        if is_own or (objective is not None and not objective.can_be_centered):
            names = [row.name for row in TABLES["policy_loss"].values() if row.can_be_centered]
            found = "--custom-policy-loss-path" if is_own else f"--policy-loss {self.policy_loss}"
            yield f"--score-centering does not apply to {found}. Use one of {', '.join(names)}."
        if self.ratio_anchor == "rollout":
            yield (
                "--score-centering and --ratio-anchor rollout are mutually exclusive: the ratio "
                "already divides by the engine's probabilities, so the mean of its gradient needs "
                "no correction"
            )
        if self.use_tis and (self.tis_level != "token" or self.custom_tis_function_path):
            yield (
                "--score-centering requires per-token weights. Use --tis-level token without "
                "--custom-tis-function-path, or remove --use-tis."
            )
        whole = ("use_geometric_rejection", "use_sequence_rejection", "use_opsm")
        for flag in [flag_of(name) for name in whole if getattr(self, name)]:
            yield (
                f"--score-centering and {flag} are mutually exclusive: the mean over the engine's "
                "tokens does not know which sequences are dropped"
            )
        if self.rejection_denominator == "accepted":
            yield (
                "--score-centering requires --rejection-denominator original: a dropped token "
                "keeps its centering term"
            )
        if self.distills:
            yield "--score-centering and a distillation are mutually exclusive"


@dataclass(frozen=True)
class RegularizerSettings(Settings):
    """Settings for the KL and entropy terms."""

    # fmt: off
    regularizer_aggregation: Literal["sample_mean", "loss"] = setting("sample_mean", """
        Aggregation of the KL and entropy terms. sample_mean: for any loss_aggregation. loss: the
        policy loss's aggregation, over the tokens before any rejection. grad_divisor then divides
        the whole loss.""")
    kl_loss_coef: float = setting(0.0, FROM_0, """
        Weight beta of the KL term: loss = pg + beta * kl. At least 0. Above 0 it requires the
        reference model's ref_log_probs.""")
    kl_loss_type: str = setting("k3", """
        Per-token estimate of KL(policy || reference), with d = log_prob - ref_log_prob.""")
    use_unbiased_kl: bool = setting(False, """
        Weight the KL estimate by the ratio: r * kl, with a gradient through r.""")
    kl_loss_gradient: Literal["estimate", "k2"] = setting("estimate", """
        Gradient of the KL term. estimate: the gradient of kl_loss_type. k2: the gradient of d^2 /
        2 for any kl_loss_type (arXiv:2506.09477). Not with use_unbiased_kl.""")
    kl_target: float | None = setting(None, ABOVE_0, """
        Target of the reported kl_loss for adapted_kl, which adapts the coefficient from
        kl_loss_coef on. Above 0.""")
    kl_horizon: float = setting(10000.0, Interval(0, metavar="N"), """
        Rollouts in which this coefficient changes by at most a fifth. Above 0.""")
    entropy_coef: float = setting(0.0, FROM_0, """
        Weight c of the entropy bonus: loss = pg - c * entropy of the full vocabulary, in nats,
        with gradient. At least 0.""")
    # fmt: on

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        if self.regularizer_aggregation == "loss" and not (self.kl_loss_coef or self.entropy_coef):
            yield (
                "--regularizer-aggregation loss has no effect without --kl-loss-coef or "
                "--entropy-coef. Add one or remove it."
            )
        if self.kl_target is None and self.kl_horizon != RegularizerSettings.kl_horizon:
            yield (
                f"--kl-horizon {self.kl_horizon:g} has no effect without --kl-target. Add it or "
                "remove --kl-horizon."
            )
        if self.kl_target is not None and self.regularizer_aggregation == "loss":
            if (
                given["loss_aggregation"] == "constant"
                or given["custom_pg_loss_reducer_function_path"]
            ):
                yield (
                    "--kl-target with --regularizer-aggregation loss requires an aggregation that "
                    "is a mean over tokens, so that kl_loss is a KL per token. Remove "
                    "--regularizer-aggregation."
                )
        if self.kl_loss_gradient == "k2" and self.use_unbiased_kl:
            yield (
                "--kl-loss-gradient k2 and --use-unbiased-kl are mutually exclusive: each sets the "
                "KL term's gradient. Remove one of them."
            )


@dataclass(frozen=True)
class DistillationSettings(Settings):
    """Settings for the divergence from a teacher."""

    # fmt: off
    distill_coef: float = setting(0.0, FROM_0, """
        Weight of a distillation term in addition to a policy loss: loss = pg + distill_coef * D
        with the divergence D from the teacher, by the same aggregation. At least 0. Requires
        distill_teacher.""")
    distill_divergence: Literal["forward_kl", "reverse_kl", "jsd"] = setting("reverse_kl", """
        D of --policy-loss distill and of distill_coef, for a student p and a teacher q.
        forward_kl: sum_v q log(q / p). reverse_kl: sum_v p log(p / q). jsd: beta sum_v q log(q /
        m) + (1 - beta) sum_v p log(p / m), m = beta q + (1 - beta) p (arXiv:2306.13649).""")
    distill_beta: float = setting(0.5, Interval(0, 1), """
        Weight beta of the teacher in the mixture of jsd. Above 0, below 1.""")
    distill_teacher: Literal["logits", "hidden", "top_k"] | None = setting(None, """
        Side channels of the samples that describe the teacher. logits: teacher_logits over the
        vocabulary. hidden: teacher_hidden, to be multiplied by the teacher's output weight
        (PolicyStep's teacher_weight). top_k: teacher_ids and teacher_log_probs of its most likely
        tokens, at the rollout temperature. All other tokens are one bucket on both sides.""")
    # fmt: on

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        is_loss = self.policy_loss == "distill" and self.custom_policy_loss_path is None
        divergence, beta = self.distill_divergence, self.distill_beta
        without = "without --policy-loss distill or --distill-coef. Add one or remove it."
        if self.distills and self.distill_teacher is None:
            flag = "--policy-loss distill" if is_loss else "--distill-coef"
            yield (
                f"{flag} requires --distill-teacher: logits, hidden or top_k, which the samples "
                "must have"
            )
        if self.distill_teacher is not None and not self.distills:
            yield f"--distill-teacher has no effect {without}"
        if divergence != DistillationSettings.distill_divergence and not self.distills:
            yield f"--distill-divergence {divergence} has no effect {without}"
        if is_loss and self.distill_coef > 0:
            yield (
                "--distill-coef and --policy-loss distill are mutually exclusive. Remove one of "
                "them."
            )
        if self.distills and self.replay_sampling_set:
            yield (
                "--replay-sampling-set and distillation are mutually exclusive: the teacher has no "
                "sampling set. Remove one of them."
            )
        if beta == 1:
            yield "--distill-beta 1 removes the student from the mixture. Use a number below 1."
        elif beta != DistillationSettings.distill_beta and divergence != "jsd":
            yield (
                f"--distill-beta {beta:g} has no effect without --distill-divergence jsd. Add it "
                "or remove --distill-beta."
            )
