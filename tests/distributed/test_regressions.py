"""Failures that users of other implementations report, each by its symptom."""

from dataclasses import replace

import pytest

from megatron_pg.step.sample import Sample
from tests.oracle import PlainSample

from .compare import assert_equal
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .reference import reference_log_probs, reference_steps
from .steps import AGGREGATIONS, CUTS, Run

MODES = [ModelOptions(), ModelOptions(calculate_per_token_loss=True)]


def steps(
    sharding: Sharding, runs: list[Run], samples: list[PlainSample] | None = None
) -> list[list[Outcome | None]]:
    outcomes = []
    for options in MODES:
        chunks = build(sharding, options)
        outcomes.append([train_step(chunks, sharding, run, samples=samples) for run in runs])
    return outcomes


RUNS = {
    # Half of it is lost where each rank divides by max(its own active tokens, 1).
    "CP2, one active token": [Run(name, "one active token") for name in AGGREGATIONS],
    # A mean of micro-batch means weighs a token by how many others its micro-batch has.
    "DP2, any number of micro-batches": [Run("token_mean", cut=cut) for cut in CUTS],
    # In per-token mode it is some thousand times too large where the loss function leaves the token
    # count out.
    "CP2, the norm in per-token mode": [Run("token_mean")],
}


@pytest.mark.parametrize("case", RUNS)
def test_the_gradient_is_neither_halved_nor_scaled(case) -> None:
    sharding, runs = Sharding.named(case), RUNS[case]
    references = run_ranks(reference_steps, 1, MODES[0], runs)[0]
    for outcomes in run_ranks(steps, sharding.world_size, sharding, runs)[0]:
        assert_equal(outcomes, references, runs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["CP2", "TP2", "PP2"])
def test_ratio_is_one_before_the_first_update(name, temperature) -> None:
    """It is not where the window is shifted by one token, or the temperature is left out."""
    run = Run("prompt_mean", temperature=temperature)
    samples = [
        replace(sample, old_log_probs=values)
        for sample, values in zip(
            run.samples, run_ranks(reference_log_probs, 1, run)[0], strict=True
        )
    ]
    for (outcome,) in run_ranks(steps, 2, Sharding.named(name), [run], samples)[0]:
        assert outcome.metrics["ratio_new_old"] == pytest.approx(1.0, abs=1e-6)
        assert outcome.metrics["kl_new_old"] == pytest.approx(0.0, abs=1e-9)
        assert outcome.metrics["clipped_ratio_fraction"] == 0.0


def test_a_step_without_an_active_token_has_a_gradient_of_exactly_zero() -> None:
    """NaN from a division by the number of active tokens ends a run weeks in."""
    runs = [Run(aggregation, "no active token", regularized=True) for aggregation in AGGREGATIONS]
    for outcomes in run_ranks(steps, 2, Sharding(context=2), runs)[0]:
        for outcome in outcomes:
            assert outcome.metrics["loss"] == 0.0
            assert all(not gradient.any() for gradient in outcome.gradients.values())


def test_a_mask_of_document_ids_is_refused_and_not_summed() -> None:
    """Packers number documents 1, 2, 3 in what looks like a mask."""
    with pytest.raises(ValueError, match=r"document 7: loss_mask\[1\] is 2"):
        Sample([5, 6, 7, 8], 3, [1, 2, 2], 1.0, name="document 7")
