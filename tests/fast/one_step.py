"""The loss of a step from log-probs, what it reports, and the plainest reducer of a user's."""

from typing import Any

import torch
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, StepTotals, policy_loss_from_log_probs
from megatron_pg.loss.metrics import MicroBatchMetrics, reduce_metrics
from megatron_pg.loss.reducer import weighted_sum
from tests.random_steps import uneven_totals

PLAIN_SUM = {"custom_pg_loss_reducer_function_path": f"{__name__}:plain_sum"}


def plain_sum(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: weighted_sum(x, torch.cat(loss_masks))


def loss_of(
    config: PolicyLossConfig,
    batch: PackedBatch,
    log_probs: Tensor,
    entropy: Tensor | None = None,
    totals: StepTotals | None = None,
    **keywords: Any,
) -> tuple[Tensor, MicroBatchMetrics]:
    """Loss and metrics of a micro-batch, which is the whole step where no totals are given."""
    totals = uneven_totals(batch.samples) if totals is None else totals
    return policy_loss_from_log_probs(config, batch, log_probs, entropy, totals=totals, **keywords)


def reported(
    config: PolicyLossConfig, *micro_batches: MicroBatchMetrics, **keywords: Any
) -> dict[str, float]:
    """The metrics of a step of one rank."""
    keywords = {"contributes": True, "device": "cpu"} | keywords
    return reduce_metrics(config, micro_batches, **keywords)
