"""One step of GPTModel, DDP and schedule at CP=2 has the gradients of the unsharded model."""

from __future__ import annotations

import pytest

from .compare import compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .reference import reference_steps
from .steps import AGGREGATIONS, Run

SHARDING = Sharding(context=2)
RUNS = [
    Run(aggregation, regularized=regularized)
    for aggregation in AGGREGATIONS
    for regularized in (False, True)
]


def context_parallel_steps(per_token: bool) -> list[Outcome | None]:
    chunks = build(SHARDING, ModelOptions(calculate_per_token_loss=per_token))
    return [train_step(chunks, SHARDING, run) for run in RUNS]


@pytest.fixture(scope="module")
def references() -> list[Outcome]:
    return run_ranks(reference_steps, 1, ModelOptions(), RUNS)[0]


@pytest.fixture(scope="module", params=[False, True], ids=["per_sequence", "per_token"])
def outcomes(request: pytest.FixtureRequest) -> list[Outcome]:
    return run_ranks(context_parallel_steps, SHARDING.world_size, request.param)[0]


@pytest.mark.parametrize("index", range(len(RUNS)), ids=map(str, RUNS))
def test_gradients_and_metrics_equal_the_unsharded_reference(
    index: int, outcomes: list[Outcome], references: list[Outcome]
) -> None:
    comparison = compare(outcomes[index], references[index])
    assert comparison.passed, str(comparison)
