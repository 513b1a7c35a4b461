"""Failures that users of other implementations report, each by its symptom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pg.step.sample import Sample

from .compare import compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .reference import reference_log_probs, reference_steps
from .steps import AGGREGATIONS, Run

PER_MICRO_BATCH = ModelOptions()
PER_TOKEN = ModelOptions(calculate_per_token_loss=True)
MODES = [PER_MICRO_BATCH, PER_TOKEN]


def steps(
    sharding: Sharding, runs: list[Run], old_log_probs: list[list[float]] | None = None
) -> list[list[Outcome | None]]:
    """Outcomes of the runs in each loss mode."""
    outcomes = []
    for options in MODES:
        chunks = build(sharding, options)
        outcomes.append(
            [
                train_step(
                    chunks,
                    sharding,
                    run,
                    samples=None
                    if old_log_probs is None
                    else [
                        replace(sample, old_log_probs=values)
                        for sample, values in zip(run.samples, old_log_probs, strict=True)
                    ],
                )
                for run in runs
            ]
        )
    return outcomes


def check_against_reference(sharding: Sharding, runs: list[Run]) -> None:
    references = run_ranks(reference_steps, 1, PER_MICRO_BATCH, runs)[0]
    for outcomes in run_ranks(steps, sharding.world_size, sharding, runs)[0]:
        for run, outcome, expected in zip(runs, outcomes, references, strict=True):
            comparison = compare(outcome, expected)
            assert comparison.passed, f"{run}: {comparison}"
            assert comparison.gradient_ratio == pytest.approx(1.0, abs=1e-6)


def test_one_active_token_under_context_parallelism_does_not_halve_the_gradient() -> None:
    """Half of it is lost where each rank divides by max(its own active tokens, 1)."""
    runs = [Run(aggregation, "one active token") for aggregation in AGGREGATIONS]
    check_against_reference(Sharding(context=2), runs)


def test_gradient_does_not_depend_on_the_number_of_accumulated_micro_batches() -> None:
    """A mean of micro-batch means weighs a token by how many others its micro-batch has."""
    runs = [Run("token_mean", cut=cut) for cut in ("uniform", "ragged", "empty")]
    check_against_reference(Sharding(data=2), runs)


def test_gradient_norm_in_per_token_mode_is_that_of_the_other_mode() -> None:
    """It is some thousand times too large where the loss function leaves the token count out."""
    run = Run("token_mean")
    (per_micro_batch,), (per_token,) = run_ranks(steps, 2, Sharding(context=2), [run])[0]
    assert compare(per_token, per_micro_batch).passed


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "sharding", [Sharding(context=2), Sharding(tensor=2), Sharding(pipeline=2)], ids=str
)
def test_ratio_is_one_before_the_first_update(sharding: Sharding, temperature: float) -> None:
    """It is not where the window is shifted by one token, or the temperature is left out."""
    run = Run("prompt_mean", temperature=temperature)
    old_log_probs = run_ranks(reference_log_probs, 1, run)[0]
    for (outcome,) in run_ranks(steps, sharding.world_size, sharding, [run], old_log_probs)[0]:
        assert outcome.metrics["ratio_new_old"] == pytest.approx(1.0, abs=1e-6)
        assert outcome.metrics["kl_new_old"] == pytest.approx(0.0, abs=1e-9)
        assert outcome.metrics["clipped_ratio_fraction"] == 0.0


def test_a_step_without_an_active_token_has_a_gradient_of_exactly_zero() -> None:
    """NaN from a division by the number of active tokens ends a run weeks in."""
    runs = [Run(aggregation, "no active token", regularized=True) for aggregation in AGGREGATIONS]
    sharding = Sharding(context=2)
    for outcomes in run_ranks(steps, sharding.world_size, sharding, runs)[0]:
        for outcome in outcomes:
            assert outcome.metrics["loss"] == 0.0
            assert all(not gradient.any() for gradient in outcome.gradients.values())


def test_a_mask_of_document_ids_is_refused_and_not_summed() -> None:
    """Packers number documents 1, 2, 3 in what looks like a mask."""
    with pytest.raises(ValueError, match=r"document 7: loss_mask\[1\] is 2"):
        Sample(
            tokens=[5, 6, 7, 8],
            response_length=3,
            loss_mask=[1, 2, 2],
            advantages=1.0,
            name="document 7",
        )
