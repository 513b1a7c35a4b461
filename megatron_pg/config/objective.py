"""The terms of the loss: settings of objective, corrections, KL and entropy terms, and
distillation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_pg.config.settings import Settings, setting
from megatron_pg.config.tables import ANCHOR, TABLES, rows_on
from megatron_pg.config.values import ABOVE_0, FROM_0, Interval, flag_of

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio's size before it is exponentiated: every ratio is in [e^-20, e^20], and e^20
is 4.9e8."""
# Bounds of a ratio that some ratio meets.
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
    """Settings of the per-token loss."""

    # fmt: off
    policy_loss: str = setting("ppo", "Per-token loss, with r = exp(log_prob - old_log_prob).")
    custom_policy_loss_path: str | None = setting(None, """
        Import path, pkg.mod.fn, of f(config, tokens, log_probs) -> per-token loss [window], in
        place of policy_loss.""")
    ratio_anchor: Literal["old", "rollout"] = setting("old", """
        Log-probs in the denominator of the ratio r, wherever r stands. old: old_log_probs, of the
        policy that the step starts from. rollout: rollout_log_probs, of the engine that sampled;
        old_log_probs are then not read. Not with use_tis.""")
    old_log_probs: Literal["given", "current", "interpolated"] = setting("given", """
        Log-probs of the old policy. given: those of the samples. current: those of the forward
        pass that is trained, without gradient, so that no pass is needed for them. The ratio is
        then 1 and keeps its gradient. Exact if each sample is used for one optimizer step.
        interpolated: rollout / d + (1 - 1 / d) current for a token that is d >= 1 versions old,
        current for d = 0 (A-3PO, arXiv:2512.06547). Needs rollout_log_probs and policy_version.""")
    eps_clip: float = setting(0.2, Interval(0, 1), """
        The ratio is clipped from below at 1 - eps_clip. Above 0, at most 1.""")
    eps_clip_high: float | None = setting(None, ABOVE_0, """
        The ratio is clipped from above at 1 + eps_clip_high (arXiv:2503.14476). Above 0. Unset:
        eps_clip.""")
    eps_clip_c: float | None = setting(None, Interval(1), """
        Dual clip of ppo and gspo (arXiv:1912.09729): where A < 0 the loss is at most -eps_clip_c
        A. Above 1.""")
    cispo_lower_bound: bool = setting(False, """
        Clip the ratio of cispo from below too: -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A
        log_prob.""")
    sapo_tau_pos: float = setting(1.0, ABOVE_0, """
        Temperature tau of sapo where A > 0. Above 0; the larger, the faster the gradient falls off
        as r leaves 1.""")
    sapo_tau_neg: float = setting(1.05, ABOVE_0, "Temperature tau of sapo where A <= 0. Above 0.")
    vespo_k_pos: float = setting(2.0, FROM_0, "Exponent k of vespo where A >= 0. At least 0.")
    vespo_lambda_pos: float = setting(3.0, FROM_0, "Decay lam of vespo where A >= 0. At least 0.")
    vespo_k_neg: float = setting(3.0, FROM_0, "Exponent k of vespo where A < 0. At least 0.")
    vespo_lambda_neg: float = setting(2.0, FROM_0, "Decay lam of vespo where A < 0. At least 0.")
    dppo_delta: float | None = setting(None, Interval(0, 1), """
        Divergence above which dppo_tv and dppo_kl drop a token with A < 0 whose probability fell.
        Above 0, at most 1. Unset: 0.15 for dppo_tv, 0.05 nats for dppo_kl.""")
    dppo_delta_high: float | None = setting(None, Interval(0, 1), """
        The same for a token with A > 0 whose probability rose. Unset: dppo_delta.""")
    sequence_unit: Literal["sequence", "turn"] = setting("sequence", """
        Unit of every sum and mean over a sequence. turn: the tokens that share a number in the
        sample's turn_ids.""")
    # fmt: on

    @property
    def anchor(self) -> str:
        """The field of `Sample` that the ratio is taken against."""
        return f"{self.ratio_anchor}_log_probs"

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        rows = [row for table in TABLES.values() for row in rows_on(table, self)]
        if self.sequence_unit == "turn" and not any(r.sequence_sums for r in rows):
            yield (
                "--sequence-unit turn is about sums over a sequence, and nothing here has one: "
                "drop it, or choose gspo"
            )
        if self.old_log_probs != "given":
            yield from self._conflicts_of_trained_pass(rows)
        if self.ratio_anchor != "rollout":
            return
        if self.use_tis:
            yield (
                "--ratio-anchor rollout --use-tis would weigh the same mismatch twice: drop one of "
                "the two"
            )
        has_reader = any(ANCHOR in row.inputs for row in rows) or self.custom_policy_loss_path
        if not (has_reader or (self.use_unbiased_kl and self.kl_loss_coef > 0)):
            reader = f"--policy-loss {self.policy_loss}"
            yield (
                f"--ratio-anchor rollout is not read by {reader}: drop it, or choose another "
                f"objective"
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
    """Settings of importance weights, and of the rejection of tokens and sequences."""

    # fmt: off
    use_tis: bool = setting(False, """
        Truncated importance sampling against the mismatch of rollout engine and trainer: weigh the
        per-token loss as tis_level and tis_mode say. Needs rollout_log_probs.""")
    custom_tis_function_path: str | None = setting(None, """
        Import path of f(config, tokens, log_probs, pg_loss) -> (pg_loss, loss_mask), in place of
        use_tis's weights.""")
    tis_level: Literal["token", "sequence", "geometric"] = setting("token", """
        Unit of the importance weight w, with d = old_log_prob - rollout_log_prob. token: w =
        exp(d). sequence: w = exp(sum_t d), one for all tokens of the sample. geometric: w =
        exp(mean_t d), likewise.""")
    tis_mode: Literal["truncate", "mask"] = setting("truncate", """
        Treatment of w. truncate: clamp(w, tis_clip_low, tis_clip). mask: 0 outside these bounds
        (token: IcePop).""")
    tis_clip: float = setting(2.0, _UPPER_BOUND, """
        Upper bound of the importance weight. At least e^-20.""")
    tis_clip_low: float = setting(0.0, _LOWER_BOUND, """
        Lower bound of the importance weight. At least 0, at most e^20 and tis_clip.""")
    score_centering: bool = setting(False, """
        Score centering (arXiv:2609.20807): subtract the rollout engine's mean of the weighted
        gradient of log p from each token's, so that a constant advantage has no gradient on
        average. Needs sampler_top_k, the engine's likeliest tokens. With use_tis the weights are
        those of tis_mode, by token.""")
    use_geometric_rejection: bool = setting(False, """
        Keep a sequence only if exp(mean_t d), d as in tis_level, lies between
        geometric_rejection_low and geometric_rejection_high. Needs rollout_log_probs.""")
    geometric_rejection_low: float = setting(0.999, _LOWER_BOUND, """
        Smallest exp(mean_t d) that is kept. At most e^20; 0 leaves the bound open.""")
    geometric_rejection_high: float = setting(1.001, _OPEN_UPPER_BOUND, """
        Largest exp(mean_t d) that is kept. At least e^-20; inf leaves the bound open.""")
    use_sequence_rejection: bool = setting(False, """
        Keep a sequence only if exp(sum_t d), d as in tis_level, lies between
        sequence_rejection_low and sequence_rejection_high. Needs rollout_log_probs.""")
    sequence_rejection_low: float = setting(0.5, _LOWER_BOUND, """
        Smallest exp(sum_t d) that is kept. At most e^20; 0 leaves the bound open.""")
    sequence_rejection_high: float = setting(2.0, _OPEN_UPPER_BOUND, """
        Largest exp(sum_t d) that is kept. At least e^-20; inf leaves the bound open.""")
    use_opsm: bool = setting(False, """
        Off-policy sequence masking: drop a sequence if A < 0 and mean_t(old_log_prob - log_prob) >
        opsm_delta.""")
    opsm_delta: float = setting(1e-4, FROM_0, """
        Threshold of use_opsm, in nats per token. At least 0.""")
    rejection_denominator: Literal["original", "accepted"] = setting("original", """
        Totals that divide the policy loss under rejection. original: those before it. accepted:
        those of what was kept.""")
    # fmt: on

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        if self.score_centering:
            yield from self._conflicts_of_centering()
        for low, high in BOUNDS.items():
            lowest, highest = getattr(self, low), getattr(self, high)
            if lowest > highest:
                found = f"{flag_of(low)} {lowest:g} exceeds {flag_of(high)} {highest:g}"
                yield f"{found}: the lower bound must not be above the upper one"

    def _conflicts_of_centering(self: Any) -> Iterator[str]:
        objective = TABLES["policy_loss"].get(self.policy_loss)
        is_own = self.custom_policy_loss_path is not None
        if is_own or (objective is not None and not objective.can_be_centered):
            names = [row.name for row in TABLES["policy_loss"].values() if row.can_be_centered]
            found = "--custom-policy-loss-path" if is_own else f"--policy-loss {self.policy_loss}"
            yield f"--score-centering does not apply to {found}: use one of {', '.join(names)}"
        if self.use_tis and (self.tis_level != "token" or self.custom_tis_function_path):
            yield (
                "--score-centering requires weights of single tokens: use --tis-level token "
                "without --custom-tis-function-path, or remove --use-tis"
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
    """Settings of the KL and entropy terms."""

    # fmt: off
    regularizer_aggregation: Literal["sample_mean", "loss"] = setting("sample_mean", """
        Aggregation of the KL and entropy terms. sample_mean: whatever loss_aggregation is. loss:
        that of the policy loss, over the tokens before any rejection; grad_divisor then divides
        all of it.""")
    kl_loss_coef: float = setting(0.0, FROM_0, """
        Weight beta of the KL term: loss = pg + beta * kl. At least 0. Above 0 it needs
        ref_log_probs, of the reference model.""")
    kl_loss_type: str = setting("k3", """
        Per-token estimate of KL(policy || reference), with d = log_prob - ref_log_prob.""")
    use_unbiased_kl: bool = setting(False, """
        Weight the KL estimate by the ratio: r * kl, with gradient through r.""")
    kl_loss_gradient: Literal["estimate", "k2"] = setting("estimate", """
        Gradient of the KL term. estimate: of kl_loss_type. k2: of d^2 / 2 whatever the value is
        (arXiv:2506.09477). Not with use_unbiased_kl.""")
    kl_target: float | None = setting(None, ABOVE_0, """
        Reported kl_loss that adapted_kl leads towards, by a coefficient that begins at
        kl_loss_coef. Above 0.""")
    kl_horizon: float = setting(10000.0, Interval(0, metavar="N"), """
        Rollouts in which this coefficient changes by a fifth at most. Above 0.""")
    entropy_coef: float = setting(0.0, FROM_0, """
        Weight c of the entropy bonus: loss = pg - c * entropy of the full vocabulary, in nats,
        with gradient. At least 0.""")
    # fmt: on

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        if self.regularizer_aggregation == "loss" and not (self.kl_loss_coef or self.entropy_coef):
            yield (
                "--regularizer-aggregation loss is about --kl-loss-coef and --entropy-coef: give "
                "one, or drop it"
            )
        if self.kl_target is None and self.kl_horizon != RegularizerSettings.kl_horizon:
            yield (
                f"--kl-horizon {self.kl_horizon:g} is about --kl-target: add it, or drop the "
                f"horizon"
            )
        if self.kl_target is not None and self.regularizer_aggregation == "loss":
            if (
                given["loss_aggregation"] == "constant"
                or given["custom_pg_loss_reducer_function_path"]
            ):
                yield (
                    "--kl-target with --regularizer-aggregation loss, and an aggregation that is "
                    "no mean over tokens: kl_loss is "
                    "then no KL of a token; drop --regularizer-aggregation"
                )
        if self.kl_loss_gradient == "k2" and self.use_unbiased_kl:
            yield (
                "--kl-loss-gradient k2 and --use-unbiased-kl are two gradients of the KL term: "
                "drop one of the two"
            )


@dataclass(frozen=True)
class DistillationSettings(Settings):
    """Settings of the divergence from a teacher."""

    # fmt: off
    distill_coef: float = setting(0.0, FROM_0, """
        Weight of a distillation term beside another policy loss: loss = pg + distill_coef * D, D
        the divergence from the teacher by the same aggregation. At least 0. Needs
        distill_teacher.""")
    distill_divergence: Literal["forward_kl", "reverse_kl", "jsd"] = setting("reverse_kl", """
        D of --policy-loss distill and of distill_coef, with p of the student and q of the teacher.
        forward_kl: sum_v q log(q / p). reverse_kl: sum_v p log(p / q). jsd: beta sum_v q log(q /
        m) + (1 - beta) sum_v p log(p / m), m = beta q + (1 - beta) p (arXiv:2306.13649).""")
    distill_beta: float = setting(0.5, Interval(0, 1), """
        beta of jsd, the teacher's weight in the mixture. Above 0, below 1.""")
    distill_teacher: Literal["logits", "hidden", "top_k"] | None = setting(None, """
        Side channels of the samples that hold the teacher. logits: teacher_logits over the
        vocabulary. hidden: teacher_hidden, to be multiplied by the teacher's output weight
        (PolicyStep's teacher_weight). top_k: teacher_ids and teacher_log_probs of its likeliest
        tokens, at the rollout temperature; the rest is one bucket on both sides.""")
    # fmt: on

    def conflicts(self: Any, given: Mapping[str, Any]) -> Iterator[str]:
        is_loss = self.policy_loss == "distill" and self.custom_policy_loss_path is None
        divergence, beta = self.distill_divergence, self.distill_beta
        owners = "--policy-loss distill and --distill-coef: give one of them, or drop it"
        if self.distills and self.distill_teacher is None:
            flag = "--policy-loss distill" if is_loss else "--distill-coef"
            yield (
                f"{flag} needs --distill-teacher logits, hidden or top_k, what the samples have of "
                f"the teacher"
            )
        if self.distill_teacher is not None and not self.distills:
            yield f"--distill-teacher is for {owners}"
        if divergence != DistillationSettings.distill_divergence and not self.distills:
            yield f"--distill-divergence {divergence} is about {owners}"
        if is_loss and self.distill_coef > 0:
            yield "--distill-coef is for another policy loss: with --policy-loss distill drop it"
        if self.distills and self.replay_sampling_set:
            yield (
                "--replay-sampling-set gives the student a set that the teacher lacks: drop it, or "
                "the distillation"
            )
        if beta == 1:
            yield (
                "--distill-beta 1 leaves nothing of the student in the mixture: give a number "
                "below 1"
            )
        elif beta != DistillationSettings.distill_beta and divergence != "jsd":
            yield (
                f"--distill-beta {beta:g} is about --distill-divergence jsd: add what is missing, "
                f"or drop it"
            )
