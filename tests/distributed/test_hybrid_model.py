"""The loss does not lean on GPTModel: HybridModel, which 0.19 names as its successor."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from .compare import compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .reference import reference_steps
from .steps import AGGREGATIONS, Run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.models.hybrid") is None,
    reason="this version of Megatron-Core has no HybridModel",
)
OPTIONS = ModelOptions(hybrid=True, num_layers=4)
RUNS = [Run(aggregation, cut="empty") for aggregation in AGGREGATIONS]


def steps(sharding: Sharding) -> list[Outcome | None]:
    """From logits, and through the fused head."""
    chunks = build(sharding, OPTIONS)
    runs = [replace(run, fused_lm_head=is_fused) for is_fused in (False, True) for run in RUNS]
    return [train_step(chunks, sharding, run) for run in runs]


@pytest.mark.parametrize(
    "sharding",
    [Sharding(context=2), Sharding(tensor=2, sequence_parallel=True, context=2)],
    ids=str,
)
def test_a_sharded_hybrid_model_equals_the_unsharded_reference(sharding: Sharding) -> None:
    references = run_ranks(reference_steps, 1, OPTIONS, RUNS)[0]
    outcomes = run_ranks(steps, sharding.world_size, sharding)[0]
    for run, outcome, expected in zip(2 * RUNS, outcomes, 2 * references, strict=True):
        comparison = compare(outcome, expected)
        assert comparison.passed, f"{run}: {comparison}"
