"""The real losses of slime and miles under each aggregation: gradients equal to float64 loops, at CP 2 and DP 2 as at one rank."""

import pytest

from megatron_pg.integrations.miles import MILES
from megatron_pg.integrations.slime import SLIME
from megatron_pg.integrations.trainer import found_sources
from tests.distributed.launch import run_ranks

from . import miles_ranks, slime_ranks, sources
from .ranks import CASES, MUTANTS, Steps, sum_over_ranks
from .rollout import Case, largest_error

TRAINERS = {"slime": (SLIME, slime_ranks.all_cases), "miles": (MILES, miles_ranks.all_cases)}
"""With what each integration was proven, and the trainer's way from samples to gradients on a rank."""
PARAMETERS = [pytest.param(name, marks=sources.needs_tree(name)) for name in TRAINERS]


@pytest.fixture(scope="module", params=PARAMETERS)
def trainer(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(trainer: str) -> dict[Case, Steps]:
    results: dict[Case, Steps] = {}
    for world_size in (1, 2):
        ranks = run_ranks(TRAINERS[trainer][1], world_size)
        results |= {case: sum_over_ranks([steps[case] for steps in ranks]) for case in ranks[0]}
    return results


@pytest.mark.parametrize("case", CASES + MUTANTS, ids=str)
def test_gradients_equal_plain_loops_and_those_of_mutants_do_not(case, trainer, found):
    error = largest_error(found[case], case.aggregation)
    print(f"{trainer}: {case}: {error:.1e}{', as it must fail' if case.mutant else ''}")
    assert error > 1e-4 if case.mutant else error <= 1e-6


def test_the_fingerprints_are_those_of_the_commit_that_they_name(trainer: str) -> None:
    tree, proven = sources.TRAINERS / trainer, TRAINERS[trainer][0]
    sources.skip_other_commits(tree, proven.proven_with)
    assert found_sources(tree / trainer, proven.sources) == proven.sources
