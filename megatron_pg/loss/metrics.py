"""Metrics of a step: sums and maxima per micro-batch, reduced over the world once a step. One row of the table each.

A document is a rollout, of one sample or several. "Mean" is over the documents with an active token: the token mean of
each, then the mean of those over the step. As an active token then weighs 1 / its rollout's active tokens in the whole
step, a mean is one more weighted sum, whatever the packing or the context parallelism.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.rows import read_off_rows
from megatron_pg.loss.checksum import CHECKSUM, CHECKSUMS, checksum_of, samples_at_fault
from megatron_pg.loss.metric_table import (
    DERIVED,
    METRICS,
    SIGNS,
    Metric,
    Scored,
    metrics_on,
    promised,
    ratio_of,
)
from megatron_pg.loss.pairs import Kind, PairTable, checksums
from megatron_pg.loss.policy_loss import Terms
from megatron_pg.loss.tokens import Tokens
from megatron_pg.loss.weights import Weights
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals

logger = logging.getLogger("megatron_pg")


class MicroBatchMetrics(dict[str, Tensor]):
    """Metrics of a micro-batch, name -> [2] float64 (numerator, denominator), detached.

    They are added over micro-batches and over data and context parallel ranks, then divided: what `train_step` of Megatron's
    `training.py` does with two-element values. What it cannot do is carried beside the dict, for `reduce_metrics`.
    """

    maxima: Tensor | None = None
    """[extremes] float64 over active tokens, minima negated: the largest advantage and the largest negated one. Minus
    infinity, the identity of the maximum, for no token; None without metrics."""
    is_nan: Tensor | None = None
    """The active tokens whose loss is NaN or infinite, [window] bool; None without metrics."""
    batch: PackedBatch | None = None
    """The micro-batch, to name such a token, and samples that the checksum is about; without its side channels, as a teacher's
    logits would stay on the device until the end of the step."""
    totals: StepTotals | None = None
    """The totals of its step, for the same."""
    table: Tensor | None = None
    """[names, 2] behind the pairs."""

    @classmethod
    def of(cls, names: Sequence[str], table: Tensor) -> MicroBatchMetrics:
        """Name the rows of a table of pairs [names, 2] float64."""
        metrics = cls(zip(names, table.unbind(), strict=True))
        metrics.table = table
        return metrics

    @classmethod
    def awaited(cls, config: PolicyLossConfig, device: torch.device) -> MicroBatchMetrics:
        """Make the metrics of a micro-batch whose loss is computed in backward. They are NaN until `fill`."""
        names = metric_names(config)
        table = torch.full((len(names), 2), math.nan, dtype=torch.float64, device=device)
        return cls.of(names, table)

    def fill(self, other: MicroBatchMetrics) -> None:
        """Copy other metrics into these tensors, so that references taken earlier see the values."""
        promised(self.table).copy_(promised(other.table))
        self.maxima, self.is_nan, self.batch = other.maxima, other.is_nan, other.batch
        self.totals = other.totals


class HasSums(Protocol):
    """Sums of another loss that travel beside the policy's."""

    @property
    def sums(self) -> Tensor:
        """The pairs [names, 2] float64 of this rank."""

    def metrics(self, reduced: Tensor) -> dict[str, float]:
        """Return the metrics by name, from the pairs of the whole world."""


class MetricParts(NamedTuple):
    """The tensors that the metrics of a micro-batch are made of, on one rank."""

    checksums: Tensor
    """The three checksums [3] float64."""
    sums: Tensor
    """The sums of `PairTable.sums`."""
    maxima: Tensor | None
    """See `MicroBatchMetrics`."""
    is_nan: Tensor | None
    """See `MicroBatchMetrics`."""


@torch.no_grad()
def metric_parts(
    config: PolicyLossConfig, table: PairTable, tokens: Tokens, weights: Weights, terms: Terms
) -> MetricParts:
    """Compute what a micro-batch reports, from the tensors of its loss. Metrics cover the tokens active before any rejection."""
    mask, values, extremes = tokens.loss_mask, {}, []
    scored = Scored(config, tokens, terms.outcome, terms.corrected)
    present = dict(table.present)
    for row in metrics_on(config):
        if row.kind in SIGNS:
            if any(getattr(tokens, name) is None for name in row.reads):
                extremes.append(torch.full_like(mask, -torch.inf, dtype=torch.float64))
                continue
            value = SIGNS[row.kind] * row.value(scored).double()
            extremes.append(value.masked_fill(~mask, -torch.inf))
        elif row.name in present:
            values[row.name] = row.value(scored)
    sums = (checksums(weights, tokens.positions), table.sums(values, weights, mask))
    if not extremes:
        return MetricParts(*sums, None, None)
    is_nan = ~terms.corrected.loss.isfinite()
    if config.kl_loss_coef:
        is_nan = is_nan | ~(tokens.log_probs - tokens.given("ref_log_probs")).isfinite()
    if config.distill_coef:
        is_nan = is_nan | ~tokens.given("divergence").isfinite()
    stacked = torch.stack(extremes)
    nothing = stacked.new_full((len(extremes),), -torch.inf)
    return MetricParts(*sums, stacked.amax(1) if mask.shape[0] else nothing, is_nan)


@read_off_rows
def metric_table(config: PolicyLossConfig, lacking: frozenset[str]) -> PairTable:
    """Return the table of the policy loss under a config, for samples that lack the named fields."""
    is_per_sequence = ratio_of(config) == "sequence"
    rows: list[tuple[str, Kind]] = []
    for row in metrics_on(config):
        if row.kind in SIGNS:
            continue
        kind: Any = "absent" if lacking.intersection(row.reads) else row.kind
        rows.append(
            (row.name, "sequence sum" if (kind, is_per_sequence) == ("ratio sum", True) else kind)
        )
    coefficients = {
        "kl_loss": config.kl_loss_coef,
        "entropy_loss": config.entropy_coef,
        "distill_loss": config.distill_coef,
    }
    terms = (name for name, coefficient in coefficients.items() if coefficient)
    return PairTable(("loss", "pg_loss", *terms), tuple(rows))


def metric_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """List the (numerator, denominator) metrics of a step under these settings, in the order of the table."""
    return metric_table(config, frozenset()).names


def reduce_metrics(
    config: PolicyLossConfig,
    micro_batches: Sequence[Mapping[str, Tensor]],
    *,
    contributes: bool,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
    policy_version: int | None = None,
    critic: HasSums | None = None,
) -> dict[str, float]:
    """Reduce the metrics of a step's micro-batches. This is the step's only host synchronisation.

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
        policy_version: the version of the policy that the step starts from, counted as
            `Sample.policy_version` is; without it no staleness is reported.
        critic: the critic's `ValueStep.report`, to travel in the same all-reduce; its metrics are among those returned.

    Returns:
        By name; the same on every rank. Means, maxima and minima are NaN for a step without an
        active token; those of fields that no sample carries are left out. `effective_sample_size`
        is in tokens (sequences: gspo).

    Raises:
        RuntimeError: under `check_aggregation`, the aggregation checksum is not 1.
    """
    pairs, maxima = _of_rank(config, micro_batches if contributes else (), device)
    if critic is not None:
        pairs = torch.cat([pairs, critic.sums.to(device)])
    if dist.is_initialized():
        dist.all_reduce(pairs, group=group)
        if len(maxima):
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    pairs, of_critic = pairs.tensor_split([len(metric_names(config))])
    reduced = _by_name(config, pairs, maxima)
    if contributes and not math.isfinite(reduced["loss"]):
        report_nan_tokens(
            micro_batches, "its logits, its log-probs (old, ref, rollout) and its teacher"
        )
    check_checksum(config, reduced, micro_batches)
    reduced[CHECKSUM], _ = checksum_of(reduced)
    for name in CHECKSUMS[1:]:
        del reduced[name]
    if config.rejection_denominator == "accepted" and reduced.get("rejected_fraction", 0.0) > 0:
        _warn_once(
            "rejection_denominator",
            "--rejection-denominator accepted, and the loss still rejected tokens that the step's "
            "totals count: call accepted_samples(config, samples) before step_totals and pack",
        )
    _derive(reduced, policy_version)
    return reduced if critic is None else reduced | critic.metrics(of_critic)


def _of_rank(
    config: PolicyLossConfig,
    micro_batches: Sequence[Mapping[str, Tensor]],
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Add up the pairs [names, 2] float64 of a rank's micro-batches, and take their maxima [extremes] float64."""
    names = metric_names(config)
    pairs = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    maxima = torch.full((len(_extremes(config)),), -torch.inf, dtype=torch.float64, device=device)
    for metrics in micro_batches:
        pairs += torch.stack([metrics[name] for name in names])
        of_batch = getattr(metrics, "maxima", None)
        maxima = maxima if of_batch is None else maxima.maximum(of_batch)
    return pairs, maxima


def _by_name(config: PolicyLossConfig, pairs: Tensor, maxima: Tensor) -> dict[str, float]:
    """Return the quotients and the extremes of a step by name, without those of fields that no sample carries."""
    names, extremes = metric_names(config), _extremes(config)
    values = torch.cat([pairs[:, 0] / pairs[:, 1], pairs[:, 1], maxima]).tolist()
    reduced = dict(zip(names, values, strict=False))
    counts = dict(zip(names, values[len(names) :], strict=False))
    for row, largest in zip(extremes, values[2 * len(names) :], strict=True):
        has_tokens = largest != -math.inf
        reduced[row.name] = SIGNS[row.kind] * largest if has_tokens else math.nan
        counts[row.name] = float(has_tokens)
    for row in metrics_on(config):
        if row.reads and not counts[row.name]:
            del reduced[row.name]
    return reduced


def _derive(reduced: dict[str, float], policy_version: int | None) -> None:
    """Add the metrics that are made of reduced rows, and drop the rows that only they read."""
    if policy_version is not None:
        reduced["current_policy_version"] = float(policy_version)
    for derived in DERIVED:
        if all(name in reduced for name in derived.of):
            reduced[derived.name] = derived.value(*(reduced[name] for name in derived.of))
    for name in ["current_policy_version", *(row.name for row in METRICS if not row.is_reported)]:
        reduced.pop(name, None)


def _extremes(config: PolicyLossConfig) -> list[Metric]:
    return [row for row in metrics_on(config) if row.kind in SIGNS]


def report_nan_tokens(micro_batches: Sequence[Mapping[str, Tensor]], suspects: str) -> None:
    """Names the first active token of each micro-batch whose loss is NaN or infinite. Reads the device: the step is lost."""
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
                f"micro-batch {index}: {len(tokens)} active tokens of this rank have a loss of NaN or infinity, the first is response token "
                f"{token} of sample {sample} ({batch.samples[sample].name}): look at {suspects}"
            )


def check_checksum(
    config: PolicyLossConfig,
    metrics: Mapping[str, float],
    micro_batches: Sequence[Mapping[str, Tensor]] = (),
) -> None:
    """Raise under --check-aggregation, or else warn, where the checksum says that samples were not each counted once.

    The message names the samples that this rank's micro-batches know of.
    """
    _, problem = checksum_of(metrics)
    if not problem:
        return
    message = problem + samples_at_fault(micro_batches)
    if config.check_aggregation:
        raise RuntimeError(message)
    _warn_once(CHECKSUM, f"{message} --check-aggregation makes it an error.")


_warned_of: set[str] = set()


def _warn_once(subject: str, message: str) -> None:
    """Log a warning the first time in this process that a subject has one."""
    if subject not in _warned_of:
        _warned_of.add(subject)
        logger.warning("%s (said once)", message)
