"""Metrics of a step: sums and maxima per micro-batch, reduced over the world once a step.

"Mean" is over documents (samples) with an active token: the token mean of each, then the mean of those
over the step. As an active token then weighs 1 / its document's active tokens, a mean is one more
weighted sum, whatever the packing or the context parallelism.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.corrections import Corrected, correction_metric_names
from megatron_pg.loss.masking import masked
from megatron_pg.loss.not_a_number import NaNTokens
from megatron_pg.loss.objectives import ObjectiveOutput, has_ratio
from megatron_pg.loss.reducer import WeightedSum, token_weights
from megatron_pg.loss.reduction import StepReduction
from megatron_pg.step.batch import PackedBatch

logger = logging.getLogger("megatron_pg")

CHECKSUM = "aggregation_checksum"
CHECKSUM_TOLERANCE = 1e-5

RATIO_MEANS = ("old_logprobs", "ratio_new_old", "kl_new_old")
RATIO_MEANS_OF_CLIPPING = ("clipped_ratio_fraction", "clipped_ratio_effective_fraction")
RATIO_SUMS = ("ratio_new_old_sum", "ratio_new_old_squared_sum")
EFFECTIVE_SAMPLE_SIZE = "effective_sample_size"
MAXIMA = ("max_advantage", "min_advantage")


class MicroBatchMetrics(dict[str, Tensor]):
    """name -> [2] float64 (numerator, denominator), detached. Added over micro-batches and over data
    and context parallel ranks, then divided: what ``train_step`` of Megatron's ``training.py`` does
    with two-element values. What it cannot do is carried beside the dict, for `reduce_metrics`.
    """

    maxima: Tensor | None = None
    """[2] float64: the largest advantage and the largest negated advantage; None without metrics."""
    nan_tokens: NaNTokens | None = None
    """Which active tokens have a NaN loss; None without metrics."""

    def add(self, other: MicroBatchMetrics) -> None:
        """Takes over what `other` holds."""
        self.update(other)
        self.maxima = self.maxima if other.maxima is None else other.maxima
        self.nan_tokens = self.nan_tokens if other.nan_tokens is None else other.nan_tokens


def step_sums(values: Mapping[str, Tensor], step_share: float) -> MicroBatchMetrics:
    """Quantities whose sum over ranks and micro-batches is the step's: denominators add up to 1."""
    return MicroBatchMetrics(
        {
            name: _pair(value, torch.full_like(value, step_share, dtype=torch.float64))
            for name, value in values.items()
        }
    )


def checksum(
    reduction: StepReduction, step_share: float, device: torch.device
) -> MicroBatchMetrics:
    """The weights used over what the totals say they add up to; 1 when every sample counted once."""
    if reduction.inner_weight is None or not isinstance(reduction.inner_sum, WeightedSum):
        return MicroBatchMetrics()
    # The weights were made on the host, from the samples' masks: reading them waits for nothing.
    used = float(reduction.inner_sum.weights.sum())
    # A step without an active token has nothing to count and is right.
    value = used / reduction.inner_weight if reduction.inner_weight else used + step_share
    value_on_device = torch.full((), value, dtype=torch.float64, device=device)
    return step_sums({CHECKSUM: value_on_device}, step_share)


@torch.no_grad()
def policy_metrics(
    config: PolicyLossConfig,
    batch: PackedBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    outcome: ObjectiveOutput,
    corrected: Corrected,
    *,
    step_share: float = 1.0,
) -> MicroBatchMetrics:
    """The metrics of one micro-batch on one rank, over the tokens active before any rejection.

    Sums over tokens are sums over sequences for gspo, whose ratio is one per sequence. The names are
    those of `metric_names`, which the config alone decides. Empty under ``--pg-metrics none``.
    """
    if config.pg_metrics == "none":
        return MicroBatchMetrics()
    means = {"new_logprobs": log_probs, "advantage": batch.advantages, **corrected.metrics}
    means |= _ratio_means(batch, outcome)
    if config.pg_metrics == "with_entropy" and entropy is not None:
        means["entropy"] = entropy
    rows = [masked(values, batch.loss_mask).double() for values in means.values()]
    squared_ratio_row = len(rows)
    if outcome.log_ratio is not None:
        rows.append(masked((2 * outcome.log_ratio.double()).exp(), batch.loss_mask))

    # [rows, window] @ [window, 2] -> per row the document mean's numerator, and the plain sum.
    document_weights = _document_weights(batch)
    columns = torch.stack([document_weights, batch.loss_mask.double()], dim=1)
    sums = torch.stack(rows) @ columns
    num_documents, num_tokens = columns.sum(0).unbind()

    pairs = torch.stack([sums[:, 0], num_documents.expand(len(rows))], dim=1)
    metrics = MicroBatchMetrics(zip(means, pairs[: len(means)].unbind(), strict=True))
    step = {"num_tokens": num_tokens}
    if outcome.log_ratio is not None:
        column = 0 if outcome.is_ratio_of_sequence else 1
        step["ratio_new_old_sum"] = sums[list(means).index("ratio_new_old"), column]
        step["ratio_new_old_squared_sum"] = sums[squared_ratio_row, column]
    metrics.add(step_sums(step, step_share))
    metrics.maxima = _largest_and_negated_smallest(batch.advantages, batch.loss_mask)
    metrics.nan_tokens = NaNTokens.of(batch, corrected.pg_loss)
    return metrics


def _ratio_means(batch: PackedBatch, outcome: ObjectiveOutput) -> dict[str, Tensor]:
    """[window] each. The ratio is that before any clamp, hence in float64."""
    if outcome.log_ratio is None or batch.old_log_probs is None:
        return {}
    log_ratio = outcome.log_ratio.double()
    means = {
        "old_logprobs": batch.old_log_probs,
        "ratio_new_old": log_ratio.exp(),
        # r - 1 - log r, whose mean over tokens of the old policy estimates KL(old || new).
        "kl_new_old": log_ratio.expm1() - log_ratio,
    }
    if outcome.is_clipped is not None and outcome.is_effectively_clipped is not None:
        means["clipped_ratio_fraction"] = outcome.is_clipped.float()
        means["clipped_ratio_effective_fraction"] = outcome.is_effectively_clipped.float()
    return means


def _document_weights(batch: PackedBatch) -> Tensor:
    """[window] float64: 1 / active tokens of the token's whole document, 0 where masked."""
    masks = [sample.loss_mask for sample in batch.samples]
    weights = WeightedSum(token_weights(batch.window, masks, aggregation="sample_mean"))
    return weights.weights_like(torch.empty(0, dtype=torch.float64, device=batch.loss_mask.device))[
        0
    ]


def _largest_and_negated_smallest(values: Tensor, loss_mask: Tensor) -> Tensor:
    """[2] float64 over active tokens; minus infinity, the identity of the maximum, for none."""
    values = values.double()
    candidates = torch.stack([values, -values]).masked_fill(~loss_mask, -torch.inf)
    return torch.cat([candidates, candidates.new_full((2, 1), -torch.inf)], dim=1).amax(dim=1)


def metric_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """The (numerator, denominator) metrics of a step under these settings, as they are packed."""
    names = ["loss", "pg_loss"]
    names += ["kl_loss"] if config.kl_loss_coef else []
    names += ["entropy_loss"] if config.entropy_coef else []
    names += [CHECKSUM] if config.custom_pg_loss_reducer_function_path is None else []
    if config.pg_metrics == "none":
        return tuple(names)
    names += ["new_logprobs", "advantage", "num_tokens"]
    if has_ratio(config):
        names += [*RATIO_MEANS, *RATIO_MEANS_OF_CLIPPING, *RATIO_SUMS]
    names += correction_metric_names(config)
    names += ["entropy"] if config.pg_metrics == "with_entropy" else []
    return tuple(names)


def reduce_metrics(
    config: PolicyLossConfig,
    micro_batches: Sequence[Mapping[str, Tensor]],
    *,
    contributes: bool,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """The step's metrics from those of its micro-batches. The step's only host synchronisation.

    Every rank of `group` must call it once a step: one SUM all-reduce, and one MAX all-reduce unless
    ``--pg-metrics none``. A rank that does not contribute brings the identity of each.

    Args:
        config: the settings that the losses were computed with.
        micro_batches: what the schedule returned: the metrics of this rank's micro-batches; empty
            before the last pipeline stage.
        contributes: True on tensor-parallel rank 0 of the last pipeline stage, whose peers hold the
            same numbers.
        device: where the packed numbers are reduced; the accelerator under NCCL.
        group: all ranks of the job; None means the default group, or no communication where
            torch.distributed is not initialised.

    Returns:
        By name; the same on every rank. Means, maxima and minima are NaN for a step without an
        active token. ``effective_sample_size`` is (sum r)^2 / sum r^2, in tokens (sequences: gspo).

    Raises:
        RuntimeError: under ``check_aggregation``, the aggregation checksum is not 1.
    """
    names = metric_names(config)
    maxima_names = MAXIMA if config.pg_metrics != "none" else ()
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    maxima = torch.full((len(maxima_names),), -torch.inf, dtype=torch.float64, device=device)
    if contributes:
        for metrics in micro_batches:
            sums += torch.stack([metrics[name] for name in names])
            if maxima_names and isinstance(metrics, MicroBatchMetrics):
                maxima = maxima if metrics.maxima is None else maxima.maximum(metrics.maxima)
    if dist.is_initialized():
        dist.all_reduce(sums, group=group)
        if maxima_names:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    values = torch.cat([sums[:, 0] / sums[:, 1], maxima]).tolist()
    reduced = dict(zip((*names, *maxima_names), values, strict=True))
    _derive(reduced)
    check_checksum(config, reduced)
    if config.rejection_denominator == "accepted" and reduced.get("rejected_fraction", 0.0) > 0:
        _warn_once(
            "rejection_denominator",
            "--rejection-denominator accepted, and the loss still rejected tokens that the step's "
            "totals count: call accepted_samples(config, samples) before step_totals and pack",
        )
    if contributes and reduced["loss"] != reduced["loss"]:
        _report_nan_tokens(micro_batches)
    return reduced


def _derive(reduced: dict[str, float]) -> None:
    """Adds what is computed from reduced values, in place."""
    if "min_advantage" in reduced:
        reduced["min_advantage"] = -reduced["min_advantage"]
        if reduced["max_advantage"] < reduced["min_advantage"]:  # no active token
            reduced["max_advantage"] = reduced["min_advantage"] = float("nan")
    if "ratio_new_old_sum" in reduced:
        squared_sum = reduced["ratio_new_old_squared_sum"]
        size = reduced["ratio_new_old_sum"] ** 2 / squared_sum if squared_sum else float("nan")
        reduced[EFFECTIVE_SAMPLE_SIZE] = size


def _report_nan_tokens(micro_batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Names the first token of each micro-batch whose loss is NaN. Reads the device: the step is lost."""
    for index, metrics in enumerate(micro_batches):
        nan_tokens = metrics.nan_tokens if isinstance(metrics, MicroBatchMetrics) else None
        description = None if nan_tokens is None else nan_tokens.describe()
        if description is not None:
            logger.error("micro-batch %d: %s", index, description)


def check_checksum(config: PolicyLossConfig, metrics: Mapping[str, float]) -> None:
    """An error under --check-aggregation, else a warning, where samples were not each counted once."""
    value = metrics.get(CHECKSUM, 1.0)
    if abs(value - 1.0) <= CHECKSUM_TOLERANCE:
        return
    message = (
        f"{CHECKSUM} is {value:.6f}, expected 1: the weights of the tokens that reached the loss add "
        f"up to {value:.6f} times what the step's totals hold. Above 1, samples were trained on twice "
        "or are missing from step_totals(); below 1, samples were dropped; either, num_microbatches is "
        "not the number that the schedule runs, or a micro-batch was packed for another context-parallel rank than the "
        "one that ran it."
    )
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
