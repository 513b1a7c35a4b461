"""A reducer together with the step's count that its inner sum is divided by."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.config.custom import (
    REDUCER_KEYWORDS,
    REDUCER_PARAMETERS,
    check_returned,
    load_function,
    named_keywords,
)
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.aggregation import get_aggregation
from megatron_pg.loss.reducer import Reducer, WeightedSum, token_weights
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals

_REDUCER_FLAG = "--custom-pg-loss-reducer-function-path"


@dataclass(frozen=True)
class StepReduction:
    """``inner_sum(x) / outer_count``: this rank's share of an aggregate over the whole step."""

    inner_sum: Reducer
    """x [window] -> 0-d, rank-local."""
    outer_count: int
    """The count of the step that the inner sum is divided by."""
    inner_weight: float | None = None
    """What the weights of the whole step must add up to; None where they are not known (a custom reducer)."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [window] -> 0-d. Summed over ranks and micro-batches it is the aggregate."""
        return self.inner_sum(x) / self.outer_count


def policy_gradient_reduction(
    config: PolicyLossConfig, batch: PackedBatch, totals: StepTotals
) -> StepReduction:
    """The aggregation that the config names, over the samples of one micro-batch."""
    if config.custom_pg_loss_reducer_function_path is not None:
        return _custom_reduction(config, batch, totals)
    return _aggregated(config.loss_aggregation, config.loss_aggregation_divisor, batch, totals)


def sample_mean_reduction(batch: PackedBatch, totals: StepTotals) -> StepReduction:
    """The sample mean, which KL and entropy terms use whatever the policy-gradient term does."""
    return _aggregated("sample_mean", None, batch, totals)


def _aggregated(
    aggregation: str, divisor: float | None, batch: PackedBatch, totals: StepTotals
) -> StepReduction:
    mode = get_aggregation(aggregation)
    weights = token_weights(
        batch.window,
        [sample.loss_mask for sample in batch.samples],
        aggregation=aggregation,
        divisor=divisor,
        denominators=mode.denominators(totals, batch.samples),
    )
    return StepReduction(
        inner_sum=WeightedSum(weights),
        outer_count=mode.outer_count(totals),
        inner_weight=mode.inner_weight(totals, divisor),
    )


def _custom_reduction(
    config: PolicyLossConfig, batch: PackedBatch, totals: StepTotals
) -> StepReduction:
    """A user's reducer; by the field's convention its inner sum is over rollouts, or tokens in per-token mode."""
    window = batch.window
    path = str(config.custom_pg_loss_reducer_function_path)
    function = load_function(
        path,
        flag=_REDUCER_FLAG,
        positional=REDUCER_PARAMETERS,
        keywords=REDUCER_KEYWORDS,
    )
    context_parallel = {"cp_rank": window.cp_rank, "cp_size": window.cp_size}
    all_masks = torch.cat([torch.zeros(0), *(sample.loss_mask for sample in batch.samples)])
    loss_masks = torch.split(all_masks.to(batch.loss_mask.device), list(window.response_lengths))
    reducer = function(
        list(window.total_lengths),
        list(window.response_lengths),
        list(loss_masks),
        config.calculate_per_token_loss,
        **{name: context_parallel[name] for name in named_keywords(function, REDUCER_KEYWORDS)},
    )
    if not callable(reducer):
        raise ValueError(
            f"{_REDUCER_FLAG} {path} returned a {type(reducer).__name__}, expected a function: x [window] -> its sum, 0-d"
        )
    per_token = config.calculate_per_token_loss
    return StepReduction(
        inner_sum=functools.partial(_checked_sum, reducer, f"{_REDUCER_FLAG} {path}: the reducer"),
        outer_count=max(totals.num_active_tokens if per_token else totals.num_rollouts, 1),
    )


def _checked_sum(reducer: Reducer, where: str, x: Tensor) -> Tensor:
    inner_sum = reducer(x)
    meaning = "the weighted sum of x over this rank's window"
    check_returned(inner_sum, (), where, meaning, differentiable_in=x)
    return inner_sum
