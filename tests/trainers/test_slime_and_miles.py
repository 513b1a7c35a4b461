"""The real losses of slime and miles under each aggregation: gradients equal to float64 loops, at CP 2 and DP 2 as at one rank."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from megatron_pg.integrations.miles import MILES
from megatron_pg.integrations.slime import SLIME
from megatron_pg.integrations.trainer import found_sources
from tests.distributed.launch import run_ranks

from . import miles_ranks, slime_ranks, sources
from .ranks import CASES, MUTANTS, Steps, sum_over_ranks
from .rollout import Case, largest_error


class Trainer(NamedTuple):
    """A trainer, what its integration was proven with, and its way from samples to gradients on a rank."""

    name: str
    proven: Any
    all_cases: Callable[[], dict[Case, Steps]]


TRAINERS = [
    Trainer("slime", SLIME, slime_ranks.all_cases),
    Trainer("miles", MILES, miles_ranks.all_cases),
]
PARAMETERS = [pytest.param(t, id=t.name, marks=sources.needs_tree(t.name)) for t in TRAINERS]


@pytest.fixture(scope="module", params=PARAMETERS)
def trainer(request) -> Trainer:
    return request.param


@pytest.fixture(scope="module")
def found(trainer: Trainer) -> dict[Case, Steps]:
    results: dict[Case, Steps] = {}
    for ranks in (run_ranks(trainer.all_cases, world) for world in (1, 2)):
        for case in ranks[0]:
            results[case] = sum_over_ranks([steps[case] for steps in ranks])
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
    tree, proven = sources.TRAINERS / trainer.name, trainer.proven
    sources.skip_other_commits(tree, proven.proven_with)
    assert found_sources(tree / trainer.name, proven.sources) == proven.sources
