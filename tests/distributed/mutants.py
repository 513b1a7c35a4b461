"""Wrong losses that a step through Megatron must reveal. Each names a mistake made in the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg import AGGREGATIONS, PackedBatch, StepTotals, pack
from megatron_pg.megatron import ParallelGroups
from tests.random_steps import uneven_totals
from tests.step_loss import step_loss

from .models import ModelOptions
from .one_step import LossFactory
from .steps import Run

PER_TOKEN = ModelOptions(calculate_per_token_loss=True)


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation, the step that reveals it, and how the damage looks."""

    loss: LossFactory = step_loss
    pack_batch: Callable[..., PackedBatch] = pack
    run: Run = Run()
    options: ModelOptions = ModelOptions()
    gradient_ratio: float | None = None
    """Times the right gradient, where the mistake is a factor on a world of CP 2, DP 2, M 3."""


def scaled(
    factor: Callable[[ParallelGroups, int], float],
    totals_of: Callable[[StepTotals, PackedBatch], StepTotals] = lambda totals, batch: totals,
) -> LossFactory:
    """The package's loss of some totals, times a factor of the process groups and the number of micro-batches."""

    def factory(config, batch, totals, *, num_microbatches, model):
        step = {"num_microbatches": num_microbatches, "model": model}
        right = step_loss(config, batch, totals_of(totals, batch), **step)
        number = factor(ParallelGroups.from_model(model), num_microbatches)

        def loss_func(output: Tensor) -> Any:
            loss, *rest = right(output)
            return (loss * number, *rest)

        return loss_func

    return factory


def with_totals(change: Callable[[StepTotals, PackedBatch], StepTotals]) -> LossFactory:
    """The package's loss from other totals than the step's."""
    return scaled(lambda groups, count: 1.0, change)


def changed_output(
    change: Callable[[tuple[Any, ...], PackedBatch], tuple[Any, ...]],
) -> LossFactory:
    """Something else returned to the schedule."""

    def factory(config, batch, totals, **keywords):
        right = step_loss(config, batch, totals, **keywords)
        return lambda output: change(right(output), batch)

    return factory


def local_denominators(totals: StepTotals, batch: PackedBatch) -> StepTotals:
    """Active tokens of a rollout or group counted in this micro-batch alone."""
    here = uneven_totals(batch.samples)
    return replace(
        totals,
        rollout_active_tokens={**totals.rollout_active_tokens, **here.rollout_active_tokens},
        group_active_tokens={**totals.group_active_tokens, **here.group_active_tokens},
    )


def phantom_tokens(totals: StepTotals, batch: PackedBatch) -> StepTotals:
    """One active token for every rollout that has none."""
    active = AGGREGATIONS["sample_mean"].expected_sums(totals)[0]
    phantoms = totals.num_rollouts - round(active)
    return replace(totals, num_active_tokens=totals.num_active_tokens + phantoms)


def own_totals(totals: StepTotals, batch: PackedBatch) -> StepTotals:
    """Each micro-batch normalized by itself."""
    return uneven_totals(batch.samples)


MEAN_OF_MEANS = scaled(lambda groups, count: 1 / (groups.data_size * count), own_totals)
"""Each micro-batch normalized by itself, then averaged by the schedule and over data."""


def two_values(result: tuple[Any, ...], batch: PackedBatch) -> tuple[Any, ...]:
    """The token count of per-token mode left out."""
    return result[0], result[-1]


def metric_without_clone(config, batch, totals, *, num_microbatches, model):
    """The reported loss shares memory with the returned one, which the schedule rescales in place."""
    right = step_loss(config, batch, totals, num_microbatches=num_microbatches, model=model)
    factor = ParallelGroups.from_model(model).data_size * num_microbatches

    def loss_func(output: Tensor) -> Any:
        loss, metrics = right(output)
        # The pair as the package reports it, times the factor that is already in the loss.
        pair = torch.stack([loss, loss.new_tensor(factor * float(metrics["loss"][1]))])
        return pair[0], {**metrics, "loss": pair.detach()}

    return loss_func


def fresh_zero(result: tuple[Any, ...], batch: PackedBatch) -> tuple[Any, ...]:
    """A loss of its own, not connected to the model, on a rank without response tokens."""
    if len(batch.window) > 0:
        return result
    # Not a leaf: the schedule rescales the loss in place.
    return (torch.zeros((), requires_grad=True) * 1.0, *result[1:])


def off_by_one_window(*args: Any, **keywords: Any) -> PackedBatch:
    """Every response token is scored by the logits of its own position, not of the one before."""
    batch = pack(*args, **keywords)
    last = batch.window.local_tokens - 1
    rows = (batch.logit_rows + 1).clamp(max=last)
    targets, row_mask = torch.zeros_like(batch.targets), torch.zeros_like(batch.row_mask)
    targets[rows] = batch.targets[batch.logit_rows]
    row_mask[rows] = batch.row_mask[batch.logit_rows]
    return replace(batch, logit_rows=rows, targets=targets, row_mask=row_mask)


MUTANTS: dict[str, Mutant] = {
    "extra context-parallel factor": Mutant(
        scaled(lambda groups, count: groups.context_size), gradient_ratio=2.0
    ),
    "mean over context parallelism instead of a sum": Mutant(
        scaled(lambda groups, count: 1 / groups.context_size), gradient_ratio=0.5
    ),
    "data-parallel size dropped": Mutant(
        scaled(lambda groups, count: 1 / groups.data_size), gradient_ratio=0.5
    ),
    "number of micro-batches dropped": Mutant(
        scaled(lambda groups, count: 1 / count), gradient_ratio=1 / 3
    ),
    "extra context-parallel factor in per-token mode": Mutant(
        scaled(lambda groups, count: groups.context_size), options=PER_TOKEN, gradient_ratio=2.0
    ),
    "denominators of the micro-batch, sample_mean": Mutant(with_totals(local_denominators)),
    "denominators of the micro-batch, prompt_mean": Mutant(
        with_totals(local_denominators), run=Run("prompt_mean")
    ),
    "phantom token for a masked sample": Mutant(with_totals(phantom_tokens), run=Run("token_mean")),
    "mean of micro-batch means, token_mean": Mutant(MEAN_OF_MEANS, run=Run("token_mean")),
    "mean of micro-batch means, sample_mean": Mutant(
        MEAN_OF_MEANS, run=Run("sample_mean", cut="ragged")
    ),
    "two values in per-token mode": Mutant(
        changed_output(two_values), run=Run("token_mean"), options=PER_TOKEN
    ),
    "window off by one": Mutant(pack_batch=off_by_one_window),
    "metric detached without a clone": Mutant(metric_without_clone, run=Run(cut="ragged")),
}

FRESH_ZERO = Mutant(changed_output(fresh_zero), run=Run("sample_mean", shape="short"))
