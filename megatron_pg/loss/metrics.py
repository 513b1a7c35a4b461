"""Metrics of a step: sums and maxima per micro-batch, reduced over the world once a step. One row of the table each.

"Mean" is over the samples with an active token: the token mean of each, then the mean of those over the step. As an
active token then weighs 1 / its sample's active tokens, a mean is one more weighted sum, whatever the packing or the
context parallelism.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.checksum import CHECKSUM, CHECKSUMS, checksum_of, samples_at_fault
from megatron_pg.loss.corrections import Scored, correction_metric_names
from megatron_pg.loss.masking import masked
from megatron_pg.loss.objectives import OBJECTIVES
from megatron_pg.loss.reducer import token_weights
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.totals import StepTotals

logger = logging.getLogger("megatron_pg")

EFFECTIVE_SAMPLE_SIZE = "effective_sample_size"
SIGNS = {"maximum": 1.0, "minimum": -1.0}
"""What an extreme is multiplied by, so that the all-reduce of maxima finds it."""


def _log_ratio(scored: Scored) -> Tensor:
    """The log-ratio log r, [window] float64, before any clamp; only of an objective whose row has a ratio."""
    return _given(scored.outcome.log_ratio).double()


def _given(values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("the objective's row promises values that the objective did not return")
    return values


@dataclass(frozen=True)
class Metric:
    """One metric, made of a value for every token of the window."""

    name: str
    help: str
    value: Callable[[Scored], Tensor]
    """The value of each token, [window]; read at active tokens alone."""
    kind: Literal["mean", "sum", "ratio sum", "maximum", "minimum"] = "mean"
    """A mean over samples, a sum over active tokens, the same over sequences where the ratio is one number a sequence, or
    an extreme over active tokens."""
    of_ratio: bool = False
    """Whether there must be a ratio to report it."""
    when: Callable[[PolicyLossConfig], bool] = lambda config: True


of_ratio = functools.partial(Metric, of_ratio=True)

METRICS = [
    Metric("new_logprobs", "log-prob under the policy in training", lambda s: s.log_probs),
    Metric("advantage", "advantage", lambda s: s.batch.advantages),
    Metric(
        "num_tokens", "T, the active tokens", lambda s: torch.ones_like(s.batch.advantages), "sum"
    ),
    of_ratio(
        "old_logprobs",
        "log-prob under the policy that the step starts from",
        lambda s: _given(s.batch.old_log_probs),
    ),
    of_ratio("ratio_new_old", "r before any clamp or clip", lambda s: _log_ratio(s).exp()),
    of_ratio(
        "kl_new_old",
        "r - 1 - log r, whose mean over tokens of the old policy estimates KL(old || new), not KL(new || old)",
        lambda s: _log_ratio(s).expm1() - _log_ratio(s),
    ),
    of_ratio(
        "clipped_ratio_fraction",
        "r outside the clip range",
        lambda s: _given(s.outcome.is_clipped).float(),
    ),
    of_ratio(
        "clipped_ratio_effective_fraction",
        "r outside on the side that the sign of A makes active: above for A > 0, below for A < 0",
        lambda s: _given(s.outcome.is_effectively_clipped).float(),
    ),
    of_ratio("ratio_new_old_sum", "r", lambda s: _log_ratio(s).exp(), "ratio sum"),
    of_ratio("ratio_new_old_squared_sum", "r^2", lambda s: (2 * _log_ratio(s)).exp(), "ratio sum"),
    Metric(
        "entropy",
        "entropy of the whole vocabulary, in nats; under --pg-metrics with_entropy",
        lambda s: _given(s.entropy),
        when=lambda config: config.pg_metrics == "with_entropy",
    ),
    Metric("max_advantage", "largest advantage", lambda s: s.batch.advantages, "maximum"),
    Metric("min_advantage", "smallest advantage", lambda s: s.batch.advantages, "minimum"),
]
"""What `--pg-metrics` reports beside the terms of the loss, the checksum and the metrics of the corrections that are on."""


def metrics_on(config: PolicyLossConfig) -> list[Metric]:
    """The rows that these settings report; the config alone decides, so that ranks without a loss agree."""
    if config.pg_metrics == "none":
        return []
    has_ratio = _ratio_of(config) != "none"
    rows = [row for row in METRICS if row.when(config) and (has_ratio or not row.of_ratio)]
    for name in correction_metric_names(config):
        rows.append(Metric(name, "", lambda s, name=name: s.corrected.metrics[name]))  # type: ignore[misc]
    return rows


class MicroBatchMetrics(dict[str, Tensor]):
    """Metrics of a micro-batch, name -> [2] float64 (numerator, denominator), detached.

    They are added over micro-batches and over data and context parallel ranks, then divided: what `train_step` of Megatron's
    `training.py` does with two-element values. What it cannot do is carried beside the dict, for `reduce_metrics`.
    """

    maxima: Tensor | None = None
    """[extremes] float64 over active tokens, minima negated: the largest advantage and the largest negated one. Minus
    infinity, the identity of the maximum, for no token; None without metrics."""
    is_nan: Tensor | None = None
    """The active tokens whose loss is NaN, [window] bool; None without metrics."""
    batch: PackedBatch | None = None
    """The micro-batch, to name such a token, and samples that the checksum is about."""
    totals: StepTotals | None = None
    """The totals of its step, for the same."""
    table: Tensor | None = None
    """[names, 2] behind the pairs where backward fills them in; None where they were known at once."""

    @classmethod
    def awaited(cls, config: PolicyLossConfig, device: torch.device) -> MicroBatchMetrics:
        """The metrics of a micro-batch whose loss is computed in backward: NaN until `fill`."""
        names = metric_names(config)
        table = torch.full((len(names), 2), math.nan, dtype=torch.float64, device=device)
        metrics = cls(zip(names, table.unbind(), strict=True))
        metrics.table = table
        return metrics

    def fill(self, found: MicroBatchMetrics) -> None:
        """Takes over what `found` holds, in place: who has taken a tensor out of the dict by now sees it too."""
        torch.stack([found[name] for name in self], out=self.table)
        self.maxima, self.is_nan, self.batch = found.maxima, found.is_nan, found.batch
        self.totals = found.totals


def step_sums(values: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Quantities whose sum over ranks and micro-batches is the step's: denominators add up to 1."""
    return {
        name: _pair(value, torch.full_like(value, share, dtype=torch.float64))
        for name, value in values.items()
    }


class HasSums(Protocol):
    """What travels beside the policy's sums."""

    @property
    def sums(self) -> Tensor:
        """The pairs [names, 2] float64 of this rank."""

    def metrics(self, reduced: Tensor) -> dict[str, float]:
        """The metrics by name, from the pairs of the whole world."""


def _ratio_of(config: PolicyLossConfig) -> str:
    """What the ratio is one number of; "none" for a function of the user's own, of whose ratio nothing is known."""
    return next((row.ratio for row in OBJECTIVES.rows_on(config)), "none")


@torch.no_grad()
def policy_metrics(scored: Scored, *, share: float = 1.0) -> MicroBatchMetrics:
    """The metrics of one micro-batch on one rank, over the tokens active before any rejection.

    The names are those of `metric_names`, which the config alone decides. Empty under `--pg-metrics none`.
    """
    config, rows, metrics = scored.config, metrics_on(scored.config), MicroBatchMetrics()
    if not rows:
        return metrics
    batch, loss_mask = scored.batch, scored.batch.loss_mask
    values = torch.stack([masked(row.value(scored), loss_mask).double() for row in rows])
    # [rows, window] @ [window, 2] -> of each row the numerator of the mean over samples, and the plain sum.
    masks = [sample.loss_mask for sample in batch.samples]
    sample_weights = token_weights(batch.window, masks, AGGREGATIONS["sample_mean"])
    columns = torch.stack([to_device(sample_weights, values.device), loss_mask.double()], dim=1)
    sums, num_samples = values @ columns, columns[:, 0].sum()
    is_of_sequence = _ratio_of(config) == "sequence"
    step, extremes = {}, []
    for row, (of_samples, of_tokens), of_window in zip(rows, sums.unbind(), values, strict=True):
        if row.kind == "mean":
            metrics[row.name] = _pair(of_samples, num_samples)
        elif row.kind in SIGNS:
            extremes.append(SIGNS[row.kind] * of_window)
        else:
            over_sequences = row.kind == "ratio sum" and is_of_sequence
            step[row.name] = of_samples if over_sequences else of_tokens
    metrics |= step_sums(step, share)
    candidates = torch.stack(extremes).masked_fill(~loss_mask, -torch.inf)
    metrics.maxima = pad(candidates, (0, 1), value=-torch.inf).amax(dim=1)
    metrics.is_nan = torch.isnan(_given(scored.corrected and scored.corrected.pg_loss))
    return metrics


def metric_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """The (numerator, denominator) metrics of a step under these settings, as they are packed."""
    names = ["loss", "pg_loss"]
    names += ["kl_loss"] if config.kl_loss_coef else []
    names += ["entropy_loss"] if config.entropy_coef else []
    names += CHECKSUMS if config.custom_pg_loss_reducer_function_path is None else []
    return (*names, *(row.name for row in metrics_on(config) if row.kind not in SIGNS))


def reduce_metrics(
    config: PolicyLossConfig,
    micro_batches: Sequence[Mapping[str, Tensor]],
    *,
    contributes: bool,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
    critic: HasSums | None = None,
) -> dict[str, float]:
    """The step's metrics from those of its micro-batches. The step's only host synchronisation.

    Every rank of `group` must call it once a step: one SUM all-reduce, and one MAX all-reduce unless
    `--pg-metrics none`. A rank that does not contribute brings the identity of each.

    Args:
        config: the settings that the losses were computed with.
        micro_batches: what the schedule returned: the metrics of this rank's micro-batches; empty
            before the last pipeline stage.
        contributes: True on tensor-parallel rank 0 of the last pipeline stage, whose peers hold the
            same numbers.
        device: where the packed numbers are reduced; the accelerator under NCCL.
        group: all ranks of the job; None means the default group, or no communication where
            torch.distributed is not initialised.
        critic: the critic's `ValueStep.report`, to travel in the same all-reduce; its metrics are among those returned.

    Returns:
        By name; the same on every rank. Means, maxima and minima are NaN for a step without an
        active token. `effective_sample_size` is (sum r)^2 / sum r^2, in tokens (sequences: gspo).

    Raises:
        RuntimeError: under `check_aggregation`, the aggregation checksum is not 1.
    """
    names = metric_names(config)
    extremes = [row for row in metrics_on(config) if row.kind in SIGNS]
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    maxima = torch.full((len(extremes),), -torch.inf, dtype=torch.float64, device=device)
    if contributes:
        for metrics in micro_batches:
            sums += torch.stack([metrics[name] for name in names])
            if extremes and isinstance(metrics, MicroBatchMetrics):
                maxima = maxima if metrics.maxima is None else maxima.maximum(metrics.maxima)
    if critic is not None:
        sums = torch.cat([sums, critic.sums.to(device)])
    if dist.is_initialized():
        dist.all_reduce(sums, group=group)
        if extremes:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    sums, of_critic = sums.tensor_split([len(names)])
    values = torch.cat([sums[:, 0] / sums[:, 1], maxima]).tolist()
    reduced = dict(zip((*names, *(row.name for row in extremes)), values, strict=True))
    for row in extremes:  # minus infinity: no active token
        largest = reduced[row.name]
        reduced[row.name] = math.nan if largest == -math.inf else SIGNS[row.kind] * largest
    if "ratio_new_old_sum" in reduced:
        total, of_squares = reduced["ratio_new_old_sum"], reduced["ratio_new_old_squared_sum"]
        reduced[EFFECTIVE_SAMPLE_SIZE] = total**2 / of_squares if of_squares else math.nan
    if contributes and reduced["loss"] != reduced["loss"]:
        report_nan_tokens(micro_batches, "its logits, old_log_probs and rollout_log_probs")
    check_checksum(config, reduced, micro_batches)
    if CHECKSUM in reduced:
        reduced[CHECKSUM], _ = checksum_of(reduced)
        for name in CHECKSUMS[1:]:
            del reduced[name]
    if config.rejection_denominator == "accepted" and reduced.get("rejected_fraction", 0.0) > 0:
        _warn_once(
            "rejection_denominator",
            "--rejection-denominator accepted, and the loss still rejected tokens that the step's "
            "totals count: call accepted_samples(config, samples) before step_totals and pack",
        )

    return reduced if critic is None else reduced | critic.metrics(of_critic)


def report_nan_tokens(micro_batches: Sequence[Mapping[str, Tensor]], suspects: str) -> None:
    """Names the first active token of each micro-batch whose loss is NaN. Reads the device: the step is lost."""
    for index, metrics in enumerate(micro_batches):
        table, is_nan, batch = (
            getattr(metrics, name, None) for name in ("table", "is_nan", "batch")
        )
        if table is not None and table.isnan().all():
            logger.error(
                f"micro-batch {index}: its loss is computed in backward, and none has come: evaluate under torch.no_grad()"
            )
        elif is_nan is not None and is_nan.any() and batch is not None:
            tokens, window = is_nan.cpu().nonzero().flatten().tolist(), batch.window
            sample = int(window.window_segment_ids[tokens[0]])
            token = int(window.response_indices[tokens[0]]) - sum(window.response_lengths[:sample])
            logger.error(
                f"micro-batch {index}: {len(tokens)} active tokens of this rank have a NaN loss, the first is response token "
                f"{token} of sample {sample} ({batch.samples[sample].name}): look at {suspects}"
            )


def check_checksum(
    config: PolicyLossConfig,
    metrics: Mapping[str, float],
    micro_batches: Sequence[Mapping[str, Tensor]] = (),
) -> None:
    """An error under --check-aggregation, else a warning, where samples were not each counted once; those that this rank's
    micro-batches tell of are named."""
    _, problem = checksum_of(metrics)
    if not problem:
        return
    message = problem + samples_at_fault(micro_batches)
    if config.check_aggregation:
        raise RuntimeError(message)
    _warn_once(CHECKSUM, f"{message} --check-aggregation makes it an error.")


_warned_of: set[str] = set()


def _warn_once(subject: str, message: str) -> None:
    """A line the first time in this process that there is something to say of the subject."""
    if subject not in _warned_of:
        _warned_of.add(subject)
        logger.warning("%s (said once)", message)


def _pair(numerator: Tensor, denominator: Tensor) -> Tensor:
    # stack copies: Megatron rescales the returned loss in place, and a view of it with it.
    return torch.stack([numerator.detach().double(), denominator.detach().double()])
