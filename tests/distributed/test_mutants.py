"""Wrong losses, each a mistake made in the field, are told from the reference by a step through
Megatron.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import AGGREGATIONS, PackedBatch, StepTotals, pack
from megatron_pg.megatron import ParallelGroups
from tests.random_steps import uneven_totals
from tests.step_loss import step_loss

from .compare import assert_equal, compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import LossFactory, Outcome, build, run_steps, train_step
from .reference import reference_steps
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
    """The package's loss of some totals, times a factor of the process groups and the number of
    micro-batches.
    """

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
    """The reported loss shares memory with the returned one, which the schedule rescales in
    place.
    """
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


SHARDING = Sharding(context=2, data=2)


def run_all(mutants: dict[str, Mutant]) -> dict[str, Outcome | None]:
    """The step of each, those of one model after each other on it."""
    found: dict[str, Outcome | None] = {}
    for options in dict.fromkeys(mutant.options for mutant in mutants.values()):
        chunks = build(SHARDING, options)
        for name, mutant in mutants.items():
            if mutant.options == options:
                step = (mutant.run, mutant.loss)
                found[name] = train_step(chunks, SHARDING, *step, pack_batch=mutant.pack_batch)
    return found


def run_mutants() -> dict[str, Outcome | None]:
    return run_all(MUTANTS)


def run_short_step(cut_off: bool) -> None:
    run_all({"": FRESH_ZERO if cut_off else Mutant(run=FRESH_ZERO.run)})


@pytest.fixture(scope="module")
def references() -> dict[Run, Outcome]:
    runs = list(dict.fromkeys(mutant.run for mutant in [*MUTANTS.values(), FRESH_ZERO]))
    return dict(zip(runs, run_ranks(reference_steps, 1, ModelOptions(), runs)[0], strict=True))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_ranks(run_mutants, SHARDING.world_size)[0]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, outcomes, references) -> None:
    mutant = MUTANTS[name]
    comparison = compare(outcomes[name], references[mutant.run])
    assert not comparison.passed, str(comparison)
    if name == "metric detached without a clone":
        assert comparison.worst_metric == "loss" and comparison.metric_error > 1e-3
    else:
        assert comparison.gradient_error > 1e-3, str(comparison)
    if mutant.gradient_ratio is not None:
        assert comparison.gradient_ratio == pytest.approx(mutant.gradient_ratio, rel=1e-5)


@pytest.mark.parametrize("options", [ModelOptions(), PER_TOKEN], ids=["", "per token"])
def test_the_steps_that_reveal_mutants_are_right_without_them(options, references) -> None:
    """Else a mutant could be caught by a step that never passes."""
    runs = list(references)
    outcomes = run_ranks(run_steps, SHARDING.world_size, SHARDING, options, runs)[0]
    assert_equal(outcomes, list(references.values()), runs)


def test_a_loss_cut_off_from_the_model_on_an_empty_rank_hangs() -> None:
    """Its context-parallel peers wait in the attention's backward for a partner that never comes.
    The same step with the package's loss ends.
    """
    run_ranks(run_short_step, SHARDING.world_size, False, patience=10)
    with pytest.raises(TimeoutError, match="hang"):
        run_ranks(run_short_step, SHARDING.world_size, True, patience=10)
