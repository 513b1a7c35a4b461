"""The real losses of slime and miles under each aggregation: gradients equal to float64 loops, at CP 2 and DP 2 as at one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_pg.integrations.miles import MILES
from megatron_pg.integrations.slime import SLIME
from megatron_pg.integrations.source_fingerprints import found_sources
from tests.distributed.launch import run_ranks

from . import miles_ranks, slime_ranks, trees
from .ranks import CASES, MUTANTS, Steps, sum_over_ranks
from .rollout import Case, largest_error


@dataclass(frozen=True)
class Trainer:
    """A trainer, what its integration was proven with, and its way from samples to gradients on a rank."""

    name: str
    proven: Any
    all_cases: Callable[[], dict[Case, Steps]]


TRAINERS = [
    pytest.param(Trainer(name, *of_trainer), id=name, marks=trees.needs_tree(name))
    for name, *of_trainer in (
        ("slime", SLIME, slime_ranks.all_cases),
        ("miles", MILES, miles_ranks.all_cases),
    )
]


@pytest.fixture(scope="module", params=TRAINERS)
def trainer(request: pytest.FixtureRequest) -> Trainer:
    found: Trainer = request.param
    return found


@pytest.fixture(scope="module")
def found(trainer: Trainer) -> dict[Case, Steps]:
    results: dict[Case, Steps] = {}
    for world in (1, 2):
        of_ranks = run_ranks(trainer.all_cases, world)
        for case in of_ranks[0]:
            results[case] = sum_over_ranks([of_rank[case] for of_rank in of_ranks])
    return results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_plain_loops(case, trainer, found):
    error = largest_error(found[case], case.aggregation)
    print(f"{trainer.name}: {case}: {error:.1e}")
    assert error <= 1e-6


@pytest.mark.parametrize("case", MUTANTS, ids=str)
def test_mutants_fail(case: Case, trainer: Trainer, found: dict[Case, Steps]) -> None:
    error = largest_error(found[case], case.aggregation)
    print(f"{trainer.name}: {case}: {error:.1e}, as it must fail")
    assert error > 1e-4


def test_the_fingerprints_are_those_of_the_commit_that_they_name(trainer: Trainer) -> None:
    tree = trees.tree(trainer.name)
    assert tree is not None
    trees.skip_other_commits(tree, trainer.proven.proven_with)
    sources = trainer.proven.sources
    assert found_sources(Path(tree) / trainer.name, sources) == sources
