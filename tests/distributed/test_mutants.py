"""Every mutant of the loss is told from the reference by a step through Megatron."""

from __future__ import annotations

import pytest

from tests.lanes import in_one_lane

from .compare import assert_equal, compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .mutants import FRESH_ZERO, MUTANTS, PER_TOKEN, Mutant
from .one_step import Outcome, build, run_steps, train_step
from .reference import reference_steps
from .steps import Run

pytestmark = in_one_lane

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
    """Its context-parallel peers wait in the attention's backward for a partner that never comes. The same step with the
    package's loss ends.
    """
    run_ranks(run_short_step, SHARDING.world_size, False, patience=10)
    with pytest.raises(TimeoutError, match="hang"):
        run_ranks(run_short_step, SHARDING.world_size, True, patience=10)
