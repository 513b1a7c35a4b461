"""Metrics of a step: sums and extremes per micro-batch, reduced over the world once per step.

A metric is a row of `METRICS`: a name, a help text, a function of the scored tokens, a reduction.
"Mean" is over rollouts (of one or more samples) with an active token: the mean over rollouts of
their token means. Each active token weighs 1 / its rollout's active tokens in the whole step, so
that a mean is a weighted sum at any packing and any context parallelism.
"""

import functools
import itertools
import logging
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.tables import rows_on
from megatron_pg.loss.aggregation import STEP_NUMBERS, Weights
from megatron_pg.loss.checksum import CHECKSUM, CHECKSUMS, check_checksum
from megatron_pg.loss.corrections import (
    Corrected,
    correction_metric_names,
    counts_accepted_afterwards,
)
from megatron_pg.loss.objectives import OBJECTIVES, Outcome
from megatron_pg.loss.regularizers import KL_ESTIMATES
from megatron_pg.loss.tokens import Tokens
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.totals import StepTotals

logger = logging.getLogger("megatron_pg")

MAX_REPORTED = 300.0
"""Clamp for differences of log-probs in metrics, +-300: float64 can represent e^600, not e^710."""

Reduction = Literal["mean", "token mean", "sum", "ratio sum", "maximum", "minimum"]
"""A mean over rollouts or active tokens, a sum over active tokens, a sum over sequences if ratios
are per sequence (ratio sum), or an extreme over active tokens."""
WEIGHTS = {
    "mean": ("rollout", "rollout"),
    "token mean": ("active", "active"),
    "sum": ("active", "share"),
    "ratio sum": ("active", "share"),
    "sequence sum": ("sequence", "share"),
    "absent": ("", "nothing"),
}
"""A token's weight in the numerator, and the denominator: the sum of a weight, the share of the
step's report, or 0 if the samples lack the field."""
SIGNS = {"maximum": 1.0, "minimum": -1.0}  # an all-reduce of maxima finds both


@dataclass(frozen=True, eq=False)
class Scored:
    """Tensors for metrics: one micro-batch on one rank after the loss."""

    config: PolicyLossConfig
    tokens: Tokens
    outcome: Outcome
    corrected: Corrected

    @functools.cached_property
    def log_ratio(self) -> Tensor:
        """The log-ratio log r, [window] float64 like the fields below. NaN stays NaN."""
        return _held(promised(self.outcome.log_ratio))

    @functools.cached_property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    @functools.cached_property
    def mismatch(self) -> Tensor:
        """The mismatch d = old_log_prob - rollout_log_prob, 0 if masked."""
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
    """Return values that a row of `OBJECTIVES` promises, or raise a ValueError if they are None."""
    if values is None:
        raise ValueError(
            "the objective's row has a `ratio`, but its Outcome lacks log_ratio, is_clipped or "
            "is_effectively_clipped. Return all three (False if nothing is clipped), or remove "
            "`ratio` from the row."
        )
    return values


@dataclass(frozen=True)
class Metric:
    """Metric, reduced from a value for every token in the window."""

    name: str
    help: str
    value: Callable[[Scored], Tensor | None]
    """The value per token, [window], read only at active tokens. None is an error."""
    reduction: Reduction = "mean"
    of_ratio: bool = False  # needs a ratio
    reads: tuple[str, ...] = ()  # optional fields, without which it is not reported
    is_reported: bool = True  # False if only derived metrics use it
    when: Callable[[PolicyLossConfig], bool] = lambda config: True


@dataclass(frozen=True)
class Derived:
    """Metric of a step that is computed from reduced metrics."""

    name: str
    help: str
    of: tuple[str, ...]  # the arguments of `value`, without which it is not reported
    value: Callable[..., float]


def of_field(
    name: str, help: str, field: str, reduction: Reduction = "mean", **options: Any
) -> Metric:
    """Make the metric for a field of the samples."""
    fields: Any = {"reads": (field,), **options}
    return Metric(name, help, lambda s: s.tokens.given(field), reduction, **fields)


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
        "r - 1 - log r. Its mean over tokens from the old policy estimates KL(old || new), "
        "not KL(new || old)",
        lambda s: s.log_ratio.expm1() - s.log_ratio,
    ),
    of_ratio("clipped_ratio_fraction", "r outside the clip range", lambda s: s.outcome.is_clipped),
    of_ratio(
        "clipped_ratio_effective_fraction",
        "r above the clip range for A > 0, or below it for A < 0",
        lambda s: s.clipped,
    ),
    of_ratio(
        "pg_clipfrac", "clipped_ratio_effective_fraction, under its usual name", lambda s: s.clipped
    ),
    of_ratio(
        "pg_clipfrac_positive",
        "part of pg_clipfrac with A > 0, clipped from above",
        lambda s: s.clipped & (s.tokens.advantages > 0),
    ),
    of_ratio(
        "pg_clipfrac_negative",
        "part of pg_clipfrac with A < 0, clipped from below (cispo, dis: from either side)",
        lambda s: s.clipped & (s.tokens.advantages < 0),
    ),
    of_ratio("ratio_new_old_sum", "r", lambda s: s.ratio, "ratio sum"),
    of_ratio("ratio_new_old_squared_sum", "r^2", lambda s: (2 * s.log_ratio).exp(), "ratio sum"),
    of_field("ref_logprobs", "log-prob under the reference policy", "ref_log_probs"),
    of_reference(
        "kl_ref",
        "KL(policy || reference), estimated by --kl-loss-type, without weight",
        lambda s: KL_ESTIMATES[s.config.kl_loss_type](s.ref_difference),
    ),
    of_reference(
        "ratio_ref_new", "exp(ref_log_prob - log_prob)", lambda s: (-s.ref_difference).exp()
    ),
    of_mismatch("rollout_ratio", "w = exp(d) before any bound", lambda s: s.mismatch.exp()),
    of_mismatch(
        "rollout_kl",
        "w - 1 - d. Its mean over the rollout engine's tokens estimates KL(rollout || old)",
        lambda s: s.mismatch.expm1() - s.mismatch,
    ),
    of_mismatch("rollout_abs_difference", "|d|", lambda s: s.mismatch.abs()),
    of_mismatch("max_rollout_abs_difference", "|d|", lambda s: s.mismatch.abs(), "maximum"),
    unreported("rollout_abs_difference_squared", "d^2", lambda s: s.mismatch.square()),
    of_mismatch(
        "rollout_chi_square",
        "w^2 - 1, an estimate of the chi-square divergence of old from rollout",
        lambda s: (2 * s.mismatch).expm1(),
    ),
    of_mismatch(
        "rollout_log_ppl_diff",
        "-d, log-perplexity of the old policy minus log-perplexity of the rollout engine",
        lambda s: -s.mismatch,
    ),
    unreported("rollout_ratio_of_tokens", "w", lambda s: s.mismatch.exp(), "token mean"),
    unreported(
        "rollout_ratio_squared_of_tokens", "w^2", lambda s: (2 * s.mismatch).exp(), "token mean"
    ),
    of_field("policy_version", "version of the policy that sampled the token", "policy_version"),
    of_field("min_policy_version", "oldest policy_version", "policy_version", "minimum"),
    Metric(
        "entropy",
        "entropy over the vocabulary or the sampling set, in nats (--pg-metrics with_entropy)",
        lambda s: s.tokens.given("entropy"),
        when=lambda config: config.pg_metrics == "with_entropy",
    ),
    of_field(
        "kept_set_size",
        "size of the token's sampling set, 0 for the whole vocabulary (--replay-sampling-set)",
        "kept_set_size",
        when=lambda config: config.replay_sampling_set,
    ),
    of_field(
        "kept_set_mass",
        "probability of the sampling set under the policy in training, 1 for the whole "
        "vocabulary (--kept-set-mass)",
        "kept_set_mass",
        when=lambda config: config.kept_set_mass,
    ),
    Metric(
        "teacher_divergence",
        "divergence from the teacher by --distill-divergence, without weight (with distillation)",
        lambda s: s.tokens.given("divergence"),
        when=lambda config: config.distills,
    ),
    Metric("max_advantage", "largest advantage", lambda s: s.tokens.advantages, "maximum"),
    Metric("min_advantage", "smallest advantage", lambda s: s.tokens.advantages, "minimum"),
]
"""Metrics of `--pg-metrics`, in addition to the loss terms, the checksum and the metrics of
corrections. d is old_log_prob - rollout_log_prob. All differences are clamped to +-300."""


def _kish(total: float, squares: float) -> float:
    return total * total / squares if squares else math.nan


DERIVED = [
    Derived(
        "effective_sample_size",
        "(sum r)^2 / sum r^2 (Kish), the number of tokens if all ratios are equal",
        ("ratio_new_old_sum", "ratio_new_old_squared_sum"),
        _kish,
    ),
    Derived(
        "rollout_abs_difference_std",
        "standard deviation of |d|, with the weights of its mean",
        ("rollout_abs_difference", "rollout_abs_difference_squared"),
        lambda mean, mean_square: math.sqrt(max(mean_square - mean * mean, 0.0)),
    ),
    Derived(
        "rollout_ppl_ratio",
        "exp(rollout_log_ppl_diff), perplexity of the old policy over the rollout engine's",
        ("rollout_log_ppl_diff",),
        math.exp,
    ),
    Derived(
        "rollout_effective_sample_size",
        "(sum w)^2 / (T sum w^2) (Kish), from 1 / T to 1, which means that all w are equal",
        ("rollout_ratio_of_tokens", "rollout_ratio_squared_of_tokens"),
        _kish,
    ),
    Derived(
        "staleness",
        "policy_version of the step minus the mean version of its tokens",
        ("current_policy_version", "policy_version"),
        operator.sub,
    ),
    Derived(
        "max_staleness",
        "policy_version of the step minus the oldest token's version",
        ("current_policy_version", "min_policy_version"),
        operator.sub,
    ),
]


def ratio_of(config: PolicyLossConfig) -> str:
    """Return the unit with one ratio: "token", "sequence" or "none" (a custom function)."""
    return next((row.ratio for row in rows_on(OBJECTIVES, config)), "none")


def metrics_on(config: PolicyLossConfig) -> list[Metric]:
    """List the rows that the settings report. Data do not matter, so that all ranks agree."""
    if config.pg_metrics == "none":
        return []
    has_ratio = ratio_of(config) != "none"
    rows = [row for row in METRICS if row.when(config) and (has_ratio or not row.of_ratio)]
    return rows + [
        Metric(name, "", lambda s, name=name: s.corrected.metrics[name])  # type: ignore[misc]
        for name in correction_metric_names(config)
    ]


@dataclass(frozen=True)
class PairTable:
    """Names of the metrics that are pairs (numerator, denominator) of a micro-batch."""

    terms: tuple[str, ...]  # one number per micro-batch, with denominators that add up to 1
    rows: tuple[tuple[str, str], ...]  # per-token metrics: (name, reduction)
    counts_accepted: bool = False
    """True if the denominators of terms add up to the accepted share of the step's tokens."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.terms, *CHECKSUMS, *(name for name, _ in self.rows))

    def parts(
        self,
        values: Mapping[str, Tensor],
        terms: Mapping[str, Tensor],
        weights: Weights,
        loss_mask: Tensor,
        accepted: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Sum values [window] over active tokens and stack 0-d terms, for `pairs`.

        `accepted` [window] is each token's part of the accepted share.
        """
        active = loss_mask.double()
        weight = {"rollout": weights.rollout, "sequence": weights.sequence, "active": active}
        # `where`, because 0 * NaN is NaN. By row, so that the compiler does not materialize rows.
        rows = [
            torch.where(loss_mask, values[name].double(), 0.0) * weight[WEIGHTS[kind][0]]
            for name, kind in self.rows
            if kind != "absent"
        ]
        shares = [] if accepted is None else [accepted]
        sums = torch.stack([*rows, weights.rollout, active, *shares]).sum(1)
        # Stacked, because an output that is the loss itself would take its gradient.
        stacked = torch.stack([terms[name] for name in self.terms]).double()
        return stacked, checksums(weights), sums

    def pairs(self, parts: Sequence[Tensor], step_numbers: Tensor) -> Tensor:
        """Collect numerators and denominators, [names, 2] float64, in two launches.

        Not in the compiled part, which would take a launch per number.
        """
        return torch.cat([*parts, step_numbers])[_places(self, step_numbers.device)]


@functools.cache
def _places(table: PairTable, device: torch.device) -> Tensor:
    """Find each name's numerator and denominator in the concatenation in `PairTable.pairs`."""
    added = [name for name, kind in table.rows if kind != "absent"]
    shares = ["accepted"] * table.counts_accepted
    laid = [*table.terms, *CHECKSUMS, *added, "rollout", "active", *shares, *STEP_NUMBERS]
    pairs = [(name, "accepted" if shares else "share") for name in table.terms]
    pairs += [(name, "share") for name in CHECKSUMS]
    pairs += [(name if name in added else "nothing", WEIGHTS[kind][1]) for name, kind in table.rows]
    places = torch.tensor([list(map(laid.index, pair)) for pair in pairs], device="cpu")
    return to_device(places, device)


def metric_table(config: PolicyLossConfig, lacking: frozenset[str] = frozenset()) -> PairTable:
    """Make the policy loss's table for a config and samples that lack the fields `lacking`."""
    kinds: dict[str, str] = {}
    if ratio_of(config) == "sequence":
        # Weights are per sample, so that a turn's share of the step is unknown.
        kinds["ratio sum"] = "absent" if config.sequence_unit == "turn" else "sequence sum"
    rows = [row for row in metrics_on(config) if row.reduction not in SIGNS]
    kind_of = {row.name: kinds.get(row.reduction, row.reduction) for row in rows}
    kind_of |= {row.name: "absent" for row in rows if lacking & {*row.reads}}
    coefficients = (config.kl_loss_coef, config.entropy_coef, config.distill_coef)
    terms = itertools.compress(("kl_loss", "entropy_loss", "distill_loss"), coefficients)
    names, is_counted_late = ("loss", "pg_loss", *terms), counts_accepted_afterwards(config)
    return PairTable(names, tuple(kind_of.items()), is_counted_late)


def metric_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """List the metrics of a micro-batch for a config."""
    return metric_table(config).names


def checksums(weights: Weights) -> Tensor:
    """Sum this rank's part of the two checksums, [2] float64."""
    rows = [weights.loss * weights.checksum_scale, weights.numbered * weights.numbers_scale]
    return torch.stack(rows).sum(1) + weights.checksum_offset


@torch.no_grad()
def measure(
    scored: Scored,
    metrics: Sequence[Metric],
    table: PairTable,
    weights: Weights,
    terms: Mapping[str, Tensor],
) -> tuple[Tensor | None, ...]:
    """Compute `maxima`, `is_nan` and the parts of `pairs` for `MicroBatchMetrics`, over the tokens
    that are active before any rejection.
    """
    tokens, mask = scored.tokens, scored.tokens.loss_mask
    values = {
        row.name: promised(row.value(scored))
        for row in metrics
        if all(getattr(tokens, name) is not None for name in row.reads)
    }
    accepted = None
    if table.counts_accepted:
        accepted = scored.corrected.loss_mask.double()
        if scored.config.loss_weight_denominator == "weights" and tokens.loss_weights is not None:
            accepted = accepted * tokens.loss_weights
        accepted = accepted / weights.unrejected_count
    parts = table.parts(values, terms, weights, mask, accepted)
    if not metrics:
        return None, None, *parts
    is_nan = ~scored.corrected.loss.isfinite()
    if "kl_loss" in terms:
        is_nan = is_nan | ~(tokens.log_probs - tokens.given("ref_log_probs")).isfinite()
    if "distill_loss" in terms:
        is_nan = is_nan | ~tokens.given("divergence").isfinite()
    nothing = torch.full_like(mask, -torch.inf, dtype=torch.float64)
    extremes = [
        torch.where(mask, SIGNS[row.reduction] * values[row.name].double(), -torch.inf)
        if row.name in values
        else nothing
        for row in metrics
        if row.reduction in SIGNS
    ]
    # Not `len(mask)`, which would make the traced size static.
    stacked = torch.stack(extremes)
    maxima = stacked.amax(1) if mask.shape[0] else stacked.new_full((len(extremes),), -torch.inf)
    return maxima, is_nan, *parts


@dataclass(eq=False, repr=False)
class MicroBatchMetrics(Mapping[str, Tensor]):
    """Detached metrics of a micro-batch, which Megatron's schedules carry to the end of the step.

    As a mapping, name -> [2] float64 (numerator, denominator): `train_step` in Megatron's
    `training.py` sums them over micro-batches and over data- and context-parallel ranks, then
    divides. `reduce_metrics` also reads the other fields.
    """

    table: PairTable
    pairs: Tensor  # [names, 2] float64
    maxima: Tensor | None = None
    """[extremes] float64 over active tokens, with negated minima, and minus infinity without
    tokens. None without metrics."""
    is_nan: Tensor | None = None
    """The active tokens with a NaN or infinite loss, [window] bool. None without metrics."""
    batch: PackedBatch | None = None  # the micro-batch, for errors
    totals: StepTotals | None = None

    def __post_init__(self) -> None:
        if self.batch is not None:
            # They would stay on the device until the step ends.
            self.batch = replace(self.batch, side_channels={}, routed_experts=None)

    @classmethod
    def awaited(cls, table: PairTable, device: torch.device) -> Self:
        """Make metrics for a loss that backward computes. They are NaN until `fill`."""
        size = (len(table.names), 2)
        return cls(table, torch.full(size, math.nan, dtype=torch.float64, device=device))

    def fill(self, other: Self) -> None:
        """Copy the values into these tensors, so that earlier references see them."""
        self.pairs.copy_(other.pairs)
        self.maxima, self.is_nan = other.maxima, other.is_nan
        self.batch, self.totals = other.batch, other.totals

    @functools.cached_property
    def _by_name(self) -> dict[str, Tensor]:
        return dict(zip(self.table.names, self.pairs.unbind(), strict=True))

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.names)

    def __len__(self) -> int:
        return len(self.table.names)


class SumsReport(NamedTuple):
    """Sums of a step on this rank, such as a critic's, to reduce with the policy loss's."""

    sums: Tensor  # pairs [names, 2] float64
    metrics: Callable[[Tensor], dict[str, float]]
    """Function from the world's pairs to metrics by name. For a critic it raises a RuntimeError
    under `check_aggregation` if the checksum is not 1."""


def reduce_metrics(
    config: PolicyLossConfig,
    micro_batches: Sequence[Mapping[str, Tensor]],
    *,
    contributes: bool,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
    policy_version: int | None = None,
    beside: Sequence[SumsReport] = (),
) -> dict[str, float]:
    """Reduce the metrics of a step's micro-batches, the step's only host synchronization.

    Every rank of `group` must call it once per step: one SUM all-reduce, and one MAX all-reduce
    unless `--pg-metrics none`. Ranks that do not contribute pass the identity.

    Args:
        config: the settings that the losses were computed with.
        micro_batches: the schedule's output on this rank, empty before the last stage.
        contributes: True on tensor-parallel rank 0 of the last pipeline stage. Its peers have the
            same numbers.
        device: the device for the reduction, the accelerator with NCCL.
        group: all ranks of the job. None: the default group, or no communication if
            torch.distributed is not initialized.
        policy_version: the policy version at the start of the step, counted like
            `Sample.policy_version`. Without it staleness is not reported.
        beside: further reports, such as the critic's `ValueStep.report`, to reduce in the same
            all-reduce. Their metrics are returned too.

    Returns:
        Metrics by name, equal on every rank. Means, maxima and minima are NaN for a step without an
        active token. Metrics of fields that no sample has are omitted. `effective_sample_size` is
        in tokens (gspo: in sequences).

    Raises:
        RuntimeError: under `check_aggregation`, the aggregation checksum is not 1.
    """
    rows, names = metrics_on(config), metric_names(config)
    counted = micro_batches if contributes else ()
    parts = [add_pairs(names, counted, device), *(other.sums.to(device) for other in beside)]
    pairs = torch.cat(parts)
    signs = {row.name: SIGNS[row.reduction] for row in rows if row.reduction in SIGNS}
    # Zero is not the identity of a maximum.
    nothing = torch.full((len(signs),), -torch.inf, dtype=torch.float64, device=device)
    batch_maxima = [getattr(metrics, "maxima", None) for metrics in counted]
    maxima = torch.stack([nothing, *(x for x in batch_maxima if x is not None)]).amax(0)
    if dist.is_initialized():
        dist.all_reduce(pairs, group=group)
        if signs:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    pairs, maxima = pairs.cpu(), maxima.cpu()
    pairs, *others = pairs.split(list(map(len, parts)))  # type: ignore[no-untyped-call]
    optional = {row.name for row in rows if row.reads}
    if (table := metric_table(config)).counts_accepted:
        of_terms = pairs[: len(table.terms), 1]
        of_terms[of_terms == 0] = 1  # no token was accepted
    reduced = quotients(names, pairs, optional)
    for (name, sign), value in zip(signs.items(), maxima.tolist(), strict=True):
        if value != -math.inf or name not in optional:
            reduced[name] = math.nan if value == -math.inf else sign * value
    if not math.isfinite(reduced["loss"]):
        report_nan_tokens(counted, "its logits, its log-probs (old, ref, rollout) and its teacher")
    reduced[CHECKSUM] = check_checksum(config, reduced, micro_batches)
    if config.kl_target is not None:
        reduced["kl_loss_coef"] = config.kl_loss_coef
    if policy_version is not None:
        reduced["current_policy_version"] = float(policy_version)
    for derived in DERIVED:
        if all(name in reduced for name in derived.of):
            reduced[derived.name] = derived.value(*(reduced[name] for name in derived.of))
    unreported = {row.name for row in METRICS if not row.is_reported}
    unreported |= {"current_policy_version", *CHECKSUMS[1:]}
    reduced = {name: value for name, value in reduced.items() if name not in unreported}
    for other, sums in zip(beside, others, strict=True):
        reduced |= other.metrics(sums)
    return reduced


def add_pairs(
    names: Sequence[str], micro_batches: Sequence[Mapping[str, Tensor]], device: torch.device | str
) -> Tensor:
    """Sum the pairs of micro-batches by name, [names, 2] float64."""
    pairs = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for metrics in micro_batches:
        pairs += torch.stack([metrics[name] for name in names])
    return pairs


def quotients(
    names: Sequence[str], pairs: Tensor, optional: Collection[str] = ()
) -> dict[str, float]:
    """Divide pairs [names, 2] by name, and omit optional ones that no sample has (0 / 0)."""
    values = zip(
        names, (pairs[:, 0] / pairs[:, 1]).tolist(), (pairs[:, 1] != 0).tolist(), strict=True
    )
    return {name: value for name, value, is_there in values if is_there or name not in optional}


def report_nan_tokens(micro_batches: Sequence[Mapping[str, Tensor]], suspects: str) -> None:
    """Log each micro-batch's first active token with a non-finite loss. Reads the device."""
    for index, metrics in enumerate(micro_batches):
        if not isinstance(metrics, MicroBatchMetrics):
            continue
        is_nan, batch = metrics.is_nan, metrics.batch
        if metrics.pairs.isnan().all():
            logger.error(
                f"micro-batch {index}: backward, which computes the loss, was not called. Use "
                "torch.no_grad() to evaluate."
            )
        elif is_nan is not None and is_nan.any() and batch is not None:
            tokens, window = is_nan.cpu().nonzero().flatten().tolist(), batch.window
            sample = int(window.window_segment_ids[tokens[0]])
            token = int(window.response_indices[tokens[0]]) - sum(window.response_lengths[:sample])
            logger.error(
                f"micro-batch {index}: {len(tokens)} active tokens on this rank have a NaN or "
                f"infinite loss. The first is response token {token} of sample {sample} "
                f"({batch.samples[sample].name}). Check {suspects}."
            )
