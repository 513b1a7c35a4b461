"""Metrics of a step: per micro-batch (numerator, denominator) pairs, reduced once a step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.arguments.config import PolicyLossConfig
from megatron_pg.batch import PackedBatch
from megatron_pg.corrections import Corrected
from megatron_pg.objectives import ObjectiveOutput
from megatron_pg.reducers import WeightedSum, token_weights
from megatron_pg.reduction import StepReduction

logger = logging.getLogger("megatron_pg")

CHECKSUM = "aggregation_checksum"
CHECKSUM_TOLERANCE = 1e-5


class MicroBatchMetrics(dict[str, Tensor]):
    """name -> [2] (numerator, denominator), detached. Added over micro-batches and over data and context parallel
    ranks, then divided: what ``train_step`` of Megatron's ``training.py`` does with two-element values."""


def step_sums(values: Mapping[str, Tensor], step_share: float) -> MicroBatchMetrics:
    """Quantities whose sum over ranks and micro-batches is the step's: their denominators add up to 1."""
    return MicroBatchMetrics(
        {name: _pair(value, torch.full_like(value, step_share)) for name, value in values.items()}
    )


def checksum(
    reduction: StepReduction, step_share: float, device: torch.device
) -> MicroBatchMetrics:
    """The weights that were used over what the totals say they must add up to; 1 when every sample counted once."""
    if reduction.inner_weight is None or not isinstance(reduction.inner_sum, WeightedSum):
        return MicroBatchMetrics()
    # The weights were made on the host, from the samples' masks: reading them there waits for nothing.
    used = float(reduction.inner_sum.weights.sum())
    # A step without an active token has nothing to count and is right.
    value = used / reduction.inner_weight if reduction.inner_weight else used + step_share
    return step_sums({CHECKSUM: torch.full((), value, device=device)}, step_share)


def policy_metrics(
    config: PolicyLossConfig,
    batch: PackedBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    outcome: ObjectiveOutput,
    corrected: Corrected,
) -> MicroBatchMetrics:
    """Means over documents with an active token of the per-document token means."""
    if config.pg_metrics == "none":
        return MicroBatchMetrics()
    masks = [sample.loss_mask for sample in batch.samples]
    weights = WeightedSum(token_weights(batch.window, masks, aggregation="sample_mean"))
    document_weights, _ = weights.weights_like(log_probs)
    denominator = document_weights.sum()
    values = {"new_logprobs": log_probs.detach()}
    if outcome.is_clipped is not None:
        values["clipped_ratio_fraction"] = outcome.is_clipped.float()
    return MicroBatchMetrics(
        {name: _pair(weights(value), denominator) for name, value in values.items()}
    )


def metric_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """The metrics that a step reports under these settings, in the order in which they are packed."""
    names = ["loss", "pg_loss"]
    names += ["kl_loss"] if config.kl_loss_coef else []
    names += ["entropy_loss"] if config.entropy_coef else []
    names += [CHECKSUM] if config.custom_pg_loss_reducer_function_path is None else []
    names += ["new_logprobs", "clipped_ratio_fraction"] if config.pg_metrics != "none" else []
    return tuple(names)


def reduce_metrics(
    config: PolicyLossConfig,
    micro_batches: Sequence[Mapping[str, Tensor]],
    *,
    contributes: bool,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """The step's metrics from those of its micro-batches, by one all-reduce. The step's only host synchronisation.

    Every rank of `group` must call it once a step.

    Args:
        config: the settings that the losses were computed with.
        micro_batches: what the schedule returned: the metrics of this rank's micro-batches; empty before the last
            pipeline stage.
        contributes: True on tensor-parallel rank 0 of the last pipeline stage, whose peers hold the same numbers.
        device: where the packed numbers are reduced; the accelerator under NCCL.
        group: all ranks of the job; None means the default group, or no communication where there is none.

    Raises:
        RuntimeError: under ``check_aggregation``, the aggregation checksum is not 1.
    """
    names = metric_names(config)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    if contributes:
        for metrics in micro_batches:
            sums += torch.stack([metrics[name] for name in names]).to(torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums, group=group)
    values = (sums[:, 0] / sums[:, 1]).tolist()
    reduced = dict(zip(names, values, strict=True))
    check_checksum(config, reduced)
    return reduced


def check_checksum(config: PolicyLossConfig, metrics: Mapping[str, float]) -> None:
    """Says so where the step's samples were not each counted once: an error under --check-aggregation, else a warning."""
    value = metrics.get(CHECKSUM, 1.0)
    if abs(value - 1.0) <= CHECKSUM_TOLERANCE:
        return
    message = (
        f"{CHECKSUM} is {value:.6f}, expected 1: the weights of the tokens that reached the loss add up to "
        f"{value:.6f} times what the step's totals hold. Above 1, samples were trained on twice or are missing from "
        "step_totals(); below 1, samples were dropped; either, a micro-batch was packed for another context-parallel "
        "rank than the one that ran it."
    )
    if config.check_aggregation:
        raise RuntimeError(message)
    _warn_once(message)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(
        "%s (this warning is given once; --check-aggregation makes it an error)", message
    )


def _pair(numerator: Tensor, denominator: Tensor) -> Tensor:
    # stack copies: Megatron rescales the returned loss in place, and a view of it would be rescaled with it.
    return torch.stack([numerator.detach().float(), denominator.detach().float()])
