"""The real losses and reports of slime and miles under each aggregation, against float64 loops, at
CP 2 and DP 2 as at one rank.
"""

import pytest

from tests.distributed.launch import run_ranks

from . import miles_ranks, slime_ranks, sources
from .ranks import CASES, MUTANTS, sum_over_ranks
from .rollout import Case, Steps, largest_error

TRAINERS = {"slime": slime_ranks.all_cases, "miles": miles_ranks.all_cases}
"""The trainer's way from samples to gradients on a rank."""
PARAMETERS = [pytest.param(name, marks=sources.needs_tree(name)) for name in TRAINERS]


@pytest.fixture(scope="module", params=PARAMETERS)
def trainer(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(trainer: str) -> dict[Case, tuple[Steps, dict[str, float]]]:
    results: dict[Case, tuple[Steps, dict[str, float]]] = {}
    for world_size in (1, 2):
        ranks = run_ranks(TRAINERS[trainer], world_size)
        results |= {case: sum_over_ranks([steps[case] for steps in ranks]) for case in ranks[0]}
    return results


@pytest.mark.parametrize("case", CASES + MUTANTS, ids=str)
def test_gradients_and_reports_equal_plain_loops_and_those_of_mutants_do_not(case, trainer, found):
    error = largest_error(*found[case], case)
    print(f"{trainer}: {case}: {error:.1e}{', as it must fail' if case.mutant else ''}")
    assert error > 1e-4 if case.mutant else error <= 1e-6
