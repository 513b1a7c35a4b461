"""Megatron's scaling of a returned loss, and the factor that undoes it. Both are only in this file.

Let s be the local loss of one micro-batch on one rank. The final gradient must be the gradient of
the sum of s over all ranks and micro-batches. DP is the data-parallel size without context
parallelism, CP the context-parallel size, M the number of micro-batches of this data-parallel rank.
Sources: pipeline_parallel/schedules.py (forward_step_calc_loss),
distributed/distributed_data_parallel.py and distributed/finalize_model_grads.py of megatron-core
0.16.1 and 0.19.2:

1. calculate_per_token_loss off, loss_func returns (loss, metrics):
   the schedule multiplies by CP and divides by M, and data parallelism averages over DP * CP ranks.
   Together they multiply by `CP / (M * DP * CP) = 1 / (DP * M)`, so DP * M * s is returned.
2. calculate_per_token_loss on, loss_func returns (loss, n, metrics):
   the schedule does not scale the loss, data parallelism sums, and finalize_model_grads divides by
   the sum of n over ranks and micro-batches. So s * sum_n is returned.

Two other forms are never returned: two values in per-token mode are an unnormalized sum, and three
values outside of per-token mode have no factor CP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config import versions
from megatron_pg.config.aggregation import routers_have_loss
from megatron_pg.step.totals import StepTotals

Metrics = Mapping[str, Tensor]
ScheduleOutput = tuple[Tensor, Metrics] | tuple[Tensor, Tensor, Metrics]
"""The result of a Megatron loss_func: (loss, metrics), or (loss, number of tokens, metrics) in
per-token mode."""
FACTORS = {False: ("DP M", "CP / M", "1 / (DP CP)"), True: ("sum of n", "1", "1 / sum of n")}
"""The three factors of a `ScaleContract` as formulas, by whether per-token mode is on."""


@dataclass(frozen=True)
class ScaleContract:
    """The scaling of a step's losses on one rank, for the schedule and data parallelism to undo."""

    calculate_per_token_loss: bool
    """The mode of the *model's* config, which a trainer may force regardless of flags."""
    factor: float
    """The factor of the local loss."""
    counts_all_tokens: bool
    """True if n of per-token mode counts all local tokens of a micro-batch except padding, False if
    only active tokens."""
    schedule_factor: float
    """The schedule's factor of the returned loss: CP / M, or 1 in per-token mode."""
    gradient_factor: float
    """Megatron's factor of the gradients' sum over ranks: 1 / (DP CP), or 1 / sum of n in per-token
    mode."""

    def apply(
        self, loss: Tensor, metrics: Metrics, num_active_tokens: int, num_tokens: int
    ) -> ScheduleOutput:
        """Return the schedule's tuple for one micro-batch on this rank: 0-d loss, metrics and
        tokens.
        """
        scaled = loss * self.factor
        if not self.calculate_per_token_loss:
            return scaled, metrics
        count = num_tokens if self.counts_all_tokens else num_active_tokens
        # The schedule adds it to an int32 accumulator and clamps it.
        n = torch.full((), count, dtype=torch.int32, device=loss.device)
        return scaled, n, metrics


def scale_contract(
    model_config: Any,
    totals: StepTotals,
    *,
    calculate_per_token_loss: bool,
    data_parallel_size: int,
    context_parallel_size: int,
    num_microbatches: int,
) -> ScaleContract:
    """Build the contract of one step on one rank.

    Args:
        model_config: the model's TransformerConfig, or None if unknown.
        totals: the totals of the step.
        calculate_per_token_loss: the mode of the model's config.
        data_parallel_size: DP, without context parallelism.
        context_parallel_size: CP.
        num_microbatches: M of this data-parallel rank.

    Raises:
        ValueError: M below 1, or per-token mode with a mixture-of-experts auxiliary loss and no
            `totals.num_tokens`.
        NotImplementedError: per-token mode with multi-token prediction.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}: expected 1 or more")
    if not calculate_per_token_loss:
        return ScaleContract(
            calculate_per_token_loss=False,
            factor=float(data_parallel_size * num_microbatches),
            counts_all_tokens=False,
            schedule_factor=context_parallel_size / num_microbatches,
            gradient_factor=1 / (data_parallel_size * context_parallel_size),
        )
    if getattr(model_config, "mtp_num_layers", None) and versions.derives_multi_token_labels():
        raise NotImplementedError(
            "--calculate-per-token-loss with --mtp-num-layers: megatron-core multiplies the "
            "multi-token loss by the ratio of a rank's tokens before and after the shift (14/12 "
            "with two sequences of 8), and no loss function can undo it. Turn per-token mode off "
            "(the policy gradient is the same)"
        )
    if not has_router_loss(model_config):
        sum_of_n = float(max(totals.num_active_tokens, 1))
        return ScaleContract(True, sum_of_n, False, 1.0, 1 / sum_of_n)
    if totals.num_tokens is None:
        raise ValueError(
            "--calculate-per-token-loss with a mixture-of-experts auxiliary loss requires "
            "StepTotals.num_tokens, all tokens of the step: Megatron weights each micro-batch's "
            "auxiliary loss by its tokens. Plan the step with plan_step(), which counts them, or "
            "turn per-token mode off (the policy gradient is the same)"
        )
    sum_of_n = float(max(totals.num_tokens, 1))
    return ScaleContract(True, sum_of_n, True, 1.0, 1 / sum_of_n)


def has_router_loss(model_config: Any) -> bool:
    """Tell whether per-token mode scales an auxiliary loss of this model's experts by local
    tokens.
    """
    has_experts = bool(getattr(model_config, "num_moe_experts", None))
    return has_experts and routers_have_loss(vars(model_config))
