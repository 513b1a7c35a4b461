"""The count of the step that an inner sum is divided by: a user's reducer, and a step without samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.reducer import Reducer, get_pg_loss_reducer
from megatron_pg.loss.weights import MicroBatchWeights
from megatron_pg.step.batch import pack
from megatron_pg.step.totals import step_totals
from tests import oracle
from tests.cut_steps import DIVISOR, assert_same
from tests.random_steps import package_samples, random_losses, random_step


def mean_of_each_sample(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[Tensor],
    calculate_per_token_loss: bool,
    *,
    cp_rank: int,
    cp_size: int,
    cp_partition_mode: str,
    pad_to_multiple: int,
) -> Reducer:
    """As reducers of the field do: the token mean of every sample, or the token sum in per-token mode."""
    return get_pg_loss_reducer(
        total_lengths,
        response_lengths,
        loss_masks,
        calculate_per_token_loss,
        cp_rank=cp_rank,
        cp_size=cp_size,
        cp_partition_mode=cp_partition_mode,
        pad_to_multiple=pad_to_multiple,
    )


def mean_by_rank_alone(total, response, masks, per_token, *, cp_rank, cp_size): ...


def custom_config(per_token: bool) -> PolicyLossConfig:
    return PolicyLossConfig(
        custom_pg_loss_reducer_function_path=f"{__name__}:mean_of_each_sample",
        calculate_per_token_loss=per_token,
    )


@pytest.mark.parametrize("per_token", (False, True))
@pytest.mark.parametrize("cp_size", (1, 2, 4))
@pytest.mark.parametrize("mode", ("zigzag", "contiguous"))
def test_the_sum_of_a_users_reducer_is_divided_by_rollouts_or_tokens(
    mode: str, cp_size: int, per_token: bool
) -> None:
    """Fully masked rollouts count in N, and a rollout of two samples counts once."""
    step = random_step(seed=50)
    samples, losses = package_samples(step), random_losses(step)
    totals = step_totals(samples, allow_different_group_sizes=True)
    found = torch.zeros((), dtype=torch.float64)
    for members in (range(4), range(4, len(step))):
        flat = torch.cat([losses[index] for index in members])
        for cp_rank in range(cp_size):
            batch = pack(
                [samples[index] for index in members],
                cp_rank=cp_rank,
                cp_size=cp_size,
                pad_to_multiple=3 * cp_size,
                cp_partition_mode=mode,
            )
            weights = MicroBatchWeights.build(custom_config(per_token), batch, totals, 1.0)
            found = found + weights.loss(flat[batch.window.response_indices])

    everything = range(len(step))
    rollouts = oracle.rollouts(step)
    assert totals.num_active_rollouts < len(rollouts) < len(step)
    if per_token:
        expected = oracle.token_mean(step, losses)
    else:
        alone = [[index] for index in everything]
        means = oracle.mean_of_token_means(step, losses, alone) * len(step)
        expected = means / len(rollouts)
    assert_same(found, expected, losses)


def sum_without_gradient(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[Tensor],
    calculate_per_token_loss: bool,
) -> Reducer:
    return lambda x: x.detach().sum()


def test_a_users_reducer_that_loses_the_gradient_is_refused() -> None:
    samples = package_samples(random_step(seed=50))
    batch = pack(samples)
    path = f"{__name__}:sum_without_gradient"
    config = PolicyLossConfig(custom_pg_loss_reducer_function_path=path)
    weights = MicroBatchWeights.build(
        config, batch, step_totals(samples, allow_different_group_sizes=True), 1.0
    )
    x = torch.ones(len(batch.window))
    assert float(weights.inner_sum(x)) == len(x)
    with pytest.raises(ValueError, match="the reducer returned a tensor without a gradient"):
        weights.inner_sum(x.requires_grad_())


def sum_over_samples(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[Tensor],
    calculate_per_token_loss: bool,
) -> Reducer:
    """As trainers write it that have no empty micro-batch: Python's sum over samples, of none the int 0."""
    torch.stack([mask.sum() for mask in loss_masks])
    return lambda x: sum(  # type: ignore[return-value]
        (part * mask).sum()
        for part, mask in zip(x.split(response_lengths), loss_masks, strict=True)
    )


CONFIGS = {
    "custom": custom_config(per_token=False),
    "custom_over_samples": PolicyLossConfig(
        custom_pg_loss_reducer_function_path=f"{__name__}:sum_over_samples"
    ),
    "custom_per_token": custom_config(per_token=True),
    **{
        name: PolicyLossConfig(
            loss_aggregation=name, loss_aggregation_divisor=DIVISOR if name == "constant" else None
        )
        for name in oracle.AGGREGATIONS
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_without_samples_is_zero_and_connected(name: str) -> None:
    """0 / 0 on a rank whose filters left nothing would make every gradient NaN."""
    losses = torch.zeros(0, requires_grad=True)
    weights = MicroBatchWeights.build(
        CONFIGS[name], pack([]), step_totals([], allow_different_group_sizes=True), 1.0
    )
    assert weights.scalars[0] == 1
    objective = weights.loss(losses)
    objective.backward()
    assert objective.item() == 0.0 and losses.grad is not None


def test_a_reducer_that_cannot_know_its_slice_is_refused() -> None:
    step = package_samples(random_step(seed=50))
    config = PolicyLossConfig(custom_pg_loss_reducer_function_path=f"{__name__}:mean_by_rank_alone")
    batch = pack(step, cp_rank=0, cp_size=2, cp_partition_mode="contiguous")
    with pytest.raises(ValueError, match="name cp_partition_mode and pad_to_multiple"):
        MicroBatchWeights.build(
            config, batch, step_totals(step, allow_different_group_sizes=True), 1.0
        )
