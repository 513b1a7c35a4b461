"""Metrics of a step: sums and maxima of each micro-batch, reduced over the world once a step.

The rows are in `metric_table.py`. An active token weighs 1 / its rollout's active tokens in the whole step, so that a mean over
documents is one more weighted sum, whatever the packing or the context parallelism.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.aggregation import COUNTS, Weights
from megatron_pg.loss.checksum import CHECKSUM, CHECKSUMS, check_checksum
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
from megatron_pg.loss.policy_loss import Terms
from megatron_pg.loss.tokens import Tokens
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.totals import StepTotals

logger = logging.getLogger("megatron_pg")

KINDS = {
    "mean": ("document", "document"),
    "token mean": ("active", "active"),
    "sum": ("active", "share"),
    "ratio sum": ("active", "share"),
    "sequence sum": ("sequence", "share"),
    "absent": ("", "nothing"),
}
"""The weight of a token in the numerator, and the denominator, by the kind of a metric; absent is one of fields that the
samples lack."""


@dataclass(frozen=True)
class PairTable:
    """The (numerator, denominator) pairs of a micro-batch; equal for settings of which a coefficient alone differs."""

    reported: tuple[str, ...]  # numbers of a micro-batch; denominators add up to 1 over the step
    rows: tuple[tuple[str, str], ...]  # the metrics of tokens, (name, kind)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return (*self.reported, *CHECKSUMS, *(name for name, _ in self.rows))

    def sums(self, values: Mapping[str, Tensor], weights: Weights, loss_mask: Tensor) -> Tensor:
        """Add up values [window], read at active tokens alone, and their denominators over this rank's window, float64."""
        active = loss_mask.double()
        by_name = {"document": weights.document, "sequence": weights.sequence, "active": active}
        # `where`, since 0 * NaN is NaN. Row by row, so that a compiler writes no row to memory.
        rows = [
            torch.where(loss_mask, values[name].double(), 0.0) * by_name[KINDS[kind][0]]
            for name, kind in self.rows
            if kind != "absent"
        ]
        return torch.stack([*rows, weights.document, active]).sum(1)

    def pairs(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the pairs together, [names, 2] float64, from checksums, result of `sums`, terms by `reported`, and `COUNTS`."""
        return torch.cat(list(parts))[_layout(self, parts[0].device)]


@functools.cache
def _layout(table: PairTable, device: torch.device) -> Tensor:
    """Place numerator and denominator of each name in what `PairTable.pairs` lays end to end, [names, 2] int64."""
    sums = [name for name, kind in table.rows if kind != "absent"]
    laid = [*CHECKSUMS, *sums, "document", "active", *table.reported, *COUNTS]
    pairs = [(name, "share") for name in (*table.reported, *CHECKSUMS)]
    pairs += [(name if name in sums else "nothing", KINDS[kind][1]) for name, kind in table.rows]
    places = torch.tensor([list(map(laid.index, pair)) for pair in pairs], device="cpu")
    return to_device(places, device)


def checksums(weights: Weights) -> Tensor:
    """Add up this rank's part of the two checksums, [2] float64."""
    rows = [weights.loss * weights.checksum_scale, weights.numbered * weights.numbers_scale]
    return torch.stack(rows).sum(1) + weights.checksum_offset


class MicroBatchMetrics(dict[str, Tensor]):
    """Metrics of a micro-batch, name -> [2] float64 (numerator, denominator), detached.

    They are added over micro-batches and over data and context parallel ranks, then divided: what `train_step` of Megatron's
    `training.py` does with two-element values. What it cannot do is carried beside the dict, for `reduce_metrics`.
    """

    maxima: Tensor | None = None
    """[extremes] float64 over active tokens, minima negated; minus infinity for no token. None without metrics."""
    is_nan: Tensor | None = None
    """The active tokens whose loss is NaN or infinite, [window] bool; None without metrics."""
    batch: PackedBatch | None = None
    """The micro-batch, for errors; without its side channels and experts, which would stay on the device."""
    totals: StepTotals | None = None
    table: Tensor  # [names, 2] behind the pairs

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        table: Tensor,
        batch: PackedBatch | None = None,
        totals: StepTotals | None = None,
    ) -> Self:
        """Make the metrics of a table [names, 2] float64."""
        metrics = cls(zip(names, table.unbind(), strict=True))
        metrics.table, metrics.totals = table, totals
        metrics.batch = (
            None if batch is None else replace(batch, side_channels={}, routed_experts=None)
        )
        return metrics

    @classmethod
    def awaited(cls, config: PolicyLossConfig, device: torch.device) -> Self:
        """Make the metrics of a micro-batch whose loss is computed in backward. They are NaN until `fill`."""
        names = metric_names(config)
        nothing = torch.full((len(names), 2), math.nan, dtype=torch.float64, device=device)
        return cls.of(names, nothing)

    def fill(self, other: Self) -> None:
        """Copy the values into these tensors, so that references taken earlier see them."""
        vars(self).update(vars(other), table=self.table.copy_(other.table))


@torch.no_grad()
def metric_parts(
    config: PolicyLossConfig, table: PairTable, tokens: Tokens, weights: Weights, terms: Terms
) -> tuple[Tensor | None, ...]:
    """Compute the report of a micro-batch: `maxima` and `is_nan` of its metrics, and the parts of its pairs but the counts.

    Metrics cover the tokens that are active before any rejection.
    """
    mask, rows = tokens.loss_mask, metrics_on(config)
    scored = Scored(config, tokens, terms.outcome, terms.corrected)
    values = {
        row.name: promised(row.value(scored))
        for row in rows
        if all(getattr(tokens, name) is not None for name in row.reads)
    }
    # Stacked, so that no term is the loss itself: an output that is another one loses its gradient.
    reported = torch.stack([terms.reported[name] for name in table.reported]).double()
    parts = checksums(weights), table.sums(values, weights, mask), reported
    if not rows:
        return None, None, *parts
    is_nan = ~terms.corrected.loss.isfinite()
    if config.kl_loss_coef:
        is_nan = is_nan | ~(tokens.log_probs - tokens.given("ref_log_probs")).isfinite()
    if config.distill_coef:
        is_nan = is_nan | ~tokens.given("divergence").isfinite()
    nothing = torch.full_like(mask, -torch.inf, dtype=torch.float64)
    extremes = [
        torch.where(mask, SIGNS[row.kind] * values[row.name].double(), -torch.inf)
        if row.name in values
        else nothing
        for row in rows
        if row.kind in SIGNS
    ]
    stacked = torch.stack(extremes)
    # Not `len`, which would make the size of a trace its only one.
    maxima = stacked.amax(1) if mask.shape[0] else stacked.new_full((len(extremes),), -torch.inf)
    return maxima, is_nan, *parts


def metric_table(config: PolicyLossConfig, lacking: frozenset[str]) -> PairTable:
    """Return the table of the policy loss under a config, for samples that lack the named fields."""
    # A turn's share of the step is not among a micro-batch's weights, which are those of samples.
    of_units = "absent" if config.sequence_unit == "turn" else "sequence sum"
    replaced = {"ratio sum": of_units} if ratio_of(config) == "sequence" else {}
    rows = tuple(
        (row.name, "absent" if lacking & {*row.reads} else replaced.get(row.kind, row.kind))
        for row in metrics_on(config)
        if row.kind not in SIGNS
    )
    coefficients = (config.kl_loss_coef, config.entropy_coef, config.distill_coef)
    terms = itertools.compress(("kl_loss", "entropy_loss", "distill_loss"), coefficients)
    return PairTable(("loss", "pg_loss", *terms), rows)


def metric_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """List the metrics of a micro-batch under a config."""
    return metric_table(config, frozenset()).names


class SumsReport(NamedTuple):
    """Sums of a step on this rank that travel beside the policy loss's, as a critic's do."""

    sums: Tensor  # pairs [names, 2] float64
    metrics: Callable[[Tensor], dict[str, float]]
    """Function from the world's pairs to metrics by name. A critic's raises a RuntimeError under `check_aggregation` where the
    checksum is not 1."""


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
    """Reduce the metrics of a step's micro-batches. This is the step's only host synchronisation.

    Every rank of `group` must call it once a step: one SUM all-reduce, and one MAX all-reduce unless
    `--pg-metrics none`. A rank that does not contribute brings the identity of each.

    Args:
        config: the settings that the losses were computed with.
        micro_batches: what the schedule returned on this rank; empty before the last pipeline stage.
        contributes: True on tensor-parallel rank 0 of the last pipeline stage, whose peers hold the same numbers.
        device: where the numbers are reduced; the accelerator under NCCL.
        group: all ranks of the job; None is the default group, or no communication where torch.distributed is not initialised.
        policy_version: the version of the policy that the step starts from, counted as `Sample.policy_version` is; without it
            no staleness is reported.
        beside: the critic's `ValueStep.report` and others, to travel in the same all-reduce; their metrics are returned too.

    Returns:
        By name; the same on every rank. Means, maxima and minima are NaN for a step without an active token; those of fields
        that no sample carries are left out. `effective_sample_size` is in tokens (sequences: gspo).

    Raises:
        RuntimeError: under `check_aggregation`, the aggregation checksum is not 1.
    """
    rows, names = metrics_on(config), metric_names(config)
    counted = micro_batches if contributes else ()
    parts = [add_pairs(names, counted, device), *(other.sums.to(device) for other in beside)]
    pairs = torch.cat(parts)
    num_extremes = sum(row.kind in SIGNS for row in rows)
    nothing = torch.full((num_extremes,), -torch.inf, dtype=torch.float64, device=device)
    batch_maxima = [getattr(metrics, "maxima", None) for metrics in counted]
    maxima = torch.stack([nothing, *(x for x in batch_maxima if x is not None)]).amax(0)
    if dist.is_initialized():
        dist.all_reduce(pairs, group=group)
        if len(maxima):
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    pairs, maxima = pairs.cpu(), maxima.cpu()
    pairs, *others = pairs.split(list(map(len, parts)))  # type: ignore[no-untyped-call]
    reduced = _by_name(rows, names, pairs, maxima)
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
    """Add up the pairs of micro-batches by name, [names, 2] float64."""
    pairs = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for metrics in micro_batches:
        pairs += torch.stack([metrics[name] for name in names])
    return pairs


def _by_name(
    rows: Sequence[Metric], names: Sequence[str], pairs: Tensor, maxima: Tensor
) -> dict[str, float]:
    """Return the quotients and the extremes of a step by name, without those of fields that no sample carries."""
    signs = {row.name: SIGNS[row.kind] for row in rows if row.kind in SIGNS}
    optional = {row.name for row in rows if row.reads}
    has_tokens = maxima != -torch.inf
    values = torch.cat([pairs[:, 0] / pairs[:, 1], maxima.masked_fill(~has_tokens, math.nan)])
    counts = torch.cat([pairs[:, 1], has_tokens])
    by_name = zip((*names, *signs), torch.stack([values, counts], 1).tolist(), strict=True)
    return {
        name: signs.get(name, 1.0) * value
        for name, (value, count) in by_name
        if count or name not in optional
    }


def report_nan_tokens(micro_batches: Sequence[Mapping[str, Tensor]], suspects: str) -> None:
    """Name the first active token of each micro-batch whose loss is NaN or infinite. Reads the device: the step is lost."""
    for index, metrics in enumerate(micro_batches):
        table, is_nan, batch = (getattr(metrics, x, None) for x in ("table", "is_nan", "batch"))
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
