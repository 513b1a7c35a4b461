"""The metrics of a step, one row each: what it is made of, and when it is reported.

A document is a rollout, of one sample or several. "Mean" is over the documents with an active token: the token mean of
each, then the mean of those over the step.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.tables import rows_on
from megatron_pg.loss.corrections import Corrected, correction_metric_names
from megatron_pg.loss.objectives import OBJECTIVES, Outcome
from megatron_pg.loss.regularizers import KL_ESTIMATES
from megatron_pg.loss.tokens import Tokens

MAX_REPORTED = 300.0
"""Bound of differences of log-probs in metrics, +-300: float64 holds e^600 and its sums, and no e^710."""
SIGNS = {"maximum": 1.0, "minimum": -1.0}  # an all-reduce of maxima finds both


@dataclass(frozen=True, eq=False)
class Scored:
    """One micro-batch on one rank after the loss: the tensors that a metric may read."""

    config: PolicyLossConfig
    tokens: Tokens
    outcome: Outcome
    corrected: Corrected

    @functools.cached_property
    def log_ratio(self) -> Tensor:
        """The log-ratio log r, [window] float64, as are the others; NaN stays NaN."""
        return _held(promised(self.outcome.log_ratio))

    @functools.cached_property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    @functools.cached_property
    def mismatch(self) -> Tensor:
        """The mismatch d = old_log_prob - rollout_log_prob; 0 where masked."""
        return _held(self.tokens.mismatch())

    @property
    def ref_difference(self) -> Tensor:
        return _held(self.tokens.log_probs.double() - self.tokens.given("ref_log_probs"))

    @property
    def clipped(self) -> Tensor:
        return promised(self.outcome.is_effectively_clipped)


def _held(difference: Tensor) -> Tensor:
    return difference.double().clamp(-MAX_REPORTED, MAX_REPORTED)


def promised(values: Tensor | None) -> Tensor:
    """Return the values that a row of `OBJECTIVES` promises, or refuse an objective that did not return them."""
    if values is None:
        raise ValueError(
            "the objective's row has a `ratio`, and its Outcome lacks log_ratio, is_clipped or is_effectively_clipped: return "
            "all three (False everywhere where nothing is clipped), or leave `ratio` out of the row"
        )
    return values


Kind = Literal["mean", "token mean", "sum", "ratio sum", "maximum", "minimum"]


@dataclass(frozen=True)
class Metric:
    """One metric, made of a value for every token of the window."""

    name: str
    help: str
    value: Callable[[Scored], Tensor | None]
    """The value of each token, [window]; read at active tokens alone. None breaks a promise of the objective's row."""
    kind: Kind = "mean"
    """A mean over documents or over active tokens, a sum over active tokens, the same over sequences where the ratio is
    one number a sequence, or an extreme over active tokens."""
    of_ratio: bool = False  # needs a ratio
    reads: tuple[str, ...] = ()  # fields that samples may lack: where all do, it is not reported
    is_reported: bool = True  # False if only metrics that are derived from it are
    when: Callable[[PolicyLossConfig], bool] = lambda config: True


@dataclass(frozen=True)
class Derived:
    """One metric of a step that is made of others, once they are reduced."""

    name: str
    help: str
    of: tuple[str, ...]  # the metrics that `value` takes; without one of them it is not reported
    value: Callable[..., float]


def of_field(name: str, help: str, field: str, kind: Kind = "mean", **properties: Any) -> Metric:
    """Make the metric that is a field of the samples."""
    return Metric(name, help, lambda s: s.tokens.given(field), kind, reads=(field,), **properties)


of_ratio = functools.partial(Metric, of_ratio=True)
of_reference = functools.partial(Metric, reads=("ref_log_probs",))
of_mismatch = functools.partial(Metric, reads=("old_log_probs", "rollout_log_probs"))
unreported = functools.partial(of_mismatch, is_reported=False)


METRICS = [
    Metric("new_logprobs", "log-prob under the policy in training", lambda s: s.tokens.log_probs),
    Metric("advantage", "advantage", lambda s: s.tokens.advantages),
    Metric("num_tokens", "T, the active tokens", lambda s: s.tokens.loss_mask, "sum"),
    of_field("old_logprobs", "log-prob under the old policy", "old_log_probs", of_ratio=True),
    of_ratio("ratio_new_old", "r before any clip", lambda s: s.ratio),
    of_ratio("ppo_kl", "-log r, the estimate k1 of KL(old || new)", lambda s: -s.log_ratio),
    of_ratio(
        "kl_new_old",
        "r - 1 - log r, whose mean over tokens of the old policy estimates KL(old || new), not KL(new || old)",
        lambda s: s.log_ratio.expm1() - s.log_ratio,
    ),
    of_ratio("clipped_ratio_fraction", "r outside the clip range", lambda s: s.outcome.is_clipped),
    of_ratio(
        "clipped_ratio_effective_fraction",
        "r outside above for A > 0, below for A < 0",
        lambda s: s.clipped,
    ),
    of_ratio("pg_clipfrac", "the same, by the name that most trainers plot", lambda s: s.clipped),
    of_ratio(
        "pg_clipfrac_positive",
        "its part with A > 0, clipped from above",
        lambda s: s.clipped & (s.tokens.advantages > 0),
    ),
    of_ratio(
        "pg_clipfrac_negative",
        "its part with A < 0, clipped from below (cispo, dis: from either side)",
        lambda s: s.clipped & (s.tokens.advantages < 0),
    ),
    of_ratio("ratio_new_old_sum", "r", lambda s: s.ratio, "ratio sum"),
    of_ratio("ratio_new_old_squared_sum", "r^2", lambda s: (2 * s.log_ratio).exp(), "ratio sum"),
    of_field("ref_logprobs", "log-prob under the reference policy", "ref_log_probs"),
    of_reference(
        "kl_ref",
        "the estimate of KL(policy || reference) that --kl-loss-type names, without weight",
        lambda s: KL_ESTIMATES[s.config.kl_loss_type](s.ref_difference),
    ),
    of_reference(
        "ratio_ref_new", "exp(ref_log_prob - log_prob)", lambda s: (-s.ref_difference).exp()
    ),
    of_mismatch("rollout_ratio", "w = exp(d) before any bound", lambda s: s.mismatch.exp()),
    of_mismatch(
        "rollout_kl",
        "w - 1 - d, whose mean over the rollout engine's tokens estimates KL(rollout || old)",
        lambda s: s.mismatch.expm1() - s.mismatch,
    ),
    of_mismatch("rollout_abs_difference", "|d|", lambda s: s.mismatch.abs()),
    of_mismatch("max_rollout_abs_difference", "|d|", lambda s: s.mismatch.abs(), "maximum"),
    unreported("rollout_abs_difference_squared", "d^2", lambda s: s.mismatch.square()),
    of_mismatch(
        "rollout_chi_square",
        "w^2 - 1, which estimates the chi-square divergence of old from rollout",
        lambda s: (2 * s.mismatch).expm1(),
    ),
    of_mismatch(
        "rollout_log_ppl_diff",
        "-d: the log-perplexity of the old policy less that of the rollout engine",
        lambda s: -s.mismatch,
    ),
    unreported("rollout_ratio_of_tokens", "w", lambda s: s.mismatch.exp(), "token mean"),
    unreported(
        "rollout_ratio_squared_of_tokens", "w^2", lambda s: (2 * s.mismatch).exp(), "token mean"
    ),
    of_field("policy_version", "version of the policy that sampled the token", "policy_version"),
    of_field("min_policy_version", "the oldest of them", "policy_version", "minimum"),
    Metric(
        "entropy",
        "entropy of the whole vocabulary, or of the kept set, in nats; under --pg-metrics with_entropy",
        lambda s: s.tokens.given("entropy"),
        when=lambda config: config.pg_metrics == "with_entropy",
    ),
    of_field(
        "kept_set_size",
        "tokens of the set that the token was sampled from, 0 where all were kept; under --replay-sampling-set",
        "kept_set_size",
        when=lambda config: config.replay_sampling_set,
    ),
    of_field(
        "kept_set_mass",
        "probability that the policy in training gives that set, 1 where all were kept; under --kept-set-mass",
        "kept_set_mass",
        when=lambda config: config.kept_set_mass,
    ),
    Metric(
        "teacher_divergence",
        "the divergence from the teacher that --distill-divergence names, without weight; with distillation",
        lambda s: s.tokens.given("divergence"),
        when=lambda config: config.distills,
    ),
    Metric("max_advantage", "largest advantage", lambda s: s.tokens.advantages, "maximum"),
    Metric("min_advantage", "smallest advantage", lambda s: s.tokens.advantages, "minimum"),
]
"""Metrics that `--pg-metrics` reports beside the terms of the loss, the checksum and the metrics of the corrections that are on; d
is old_log_prob - rollout_log_prob. All differences of log-probs are held within +-300."""


def _kish(total: float, squares: float) -> float:
    return total * total / squares if squares else math.nan


DERIVED = [
    Derived(
        "effective_sample_size",
        "(sum r)^2 / sum r^2, Kish's: the number of tokens where all ratios are equal",
        ("ratio_new_old_sum", "ratio_new_old_squared_sum"),
        _kish,
    ),
    Derived(
        "rollout_abs_difference_std",
        "standard deviation of |d|, under the weights of its mean",
        ("rollout_abs_difference", "rollout_abs_difference_squared"),
        lambda mean, mean_square: math.sqrt(max(mean_square - mean * mean, 0.0)),
    ),
    Derived(
        "rollout_ppl_ratio",
        "perplexity of the old policy over that of the rollout engine: exp(rollout_log_ppl_diff)",
        ("rollout_log_ppl_diff",),
        math.exp,
    ),
    Derived(
        "rollout_effective_sample_size",
        "(sum w)^2 / (T sum w^2), Kish's over the number of tokens: from 1 / T to 1, where all w are equal",
        ("rollout_ratio_of_tokens", "rollout_ratio_squared_of_tokens"),
        _kish,
    ),
    Derived(
        "staleness",
        "the version that the step was told less the mean of its samples'",
        ("current_policy_version", "policy_version"),
        operator.sub,
    ),
    Derived(
        "max_staleness",
        "the same for the oldest sample",
        ("current_policy_version", "min_policy_version"),
        operator.sub,
    ),
]


def metrics_on(config: PolicyLossConfig) -> list[Metric]:
    """List the rows that these settings report. The config alone decides, so that ranks without a loss agree."""
    if config.pg_metrics == "none":
        return []
    has_ratio = ratio_of(config) != "none"
    rows = [row for row in METRICS if row.when(config) and (has_ratio or not row.of_ratio)]
    for name in correction_metric_names(config):
        rows.append(Metric(name, "", lambda s, name=name: s.corrected.metrics[name]))  # type: ignore[misc]
    return rows


def ratio_of(config: PolicyLossConfig) -> str:
    """Return the unit that has one ratio: "token", "sequence", or "none", also for a function of the user's own."""
    return next((row.ratio for row in rows_on(OBJECTIVES, config)), "none")
