"""miles's real loss under each aggregation: gradients equal to float64 loops, at CP 2 and DP 2 as at one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_pg.integrations.miles import MILES
from megatron_pg.integrations.source_fingerprints import found_sources
from tests.distributed.launch import run_ranks

from . import miles_ranks, trees
from .ranks import CASES, MUTANTS, Steps, sum_over_ranks
from .rollout import Case, largest_error

pytestmark = trees.needs_tree("miles")


@pytest.fixture(scope="module")
def found() -> dict[Case, Steps]:
    results: dict[Case, Steps] = {}
    for world in (1, 2):
        of_ranks = run_ranks(miles_ranks.all_cases, world, timeout=600.0)
        for case in of_ranks[0]:
            results[case] = sum_over_ranks([of_rank[case] for of_rank in of_ranks])
    return results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_plain_loops(case: Case, found: dict[Case, Steps]) -> None:
    error = largest_error(found[case], case.aggregation)
    print(f"miles: {case}: {error:.1e}")
    assert error <= 1e-6


@pytest.mark.parametrize("case", MUTANTS, ids=str)
def test_mutants_fail(case: Case, found: dict[Case, Steps]) -> None:
    error = largest_error(found[case], case.aggregation)
    print(f"miles: {case}: {error:.1e}, as it must fail")
    assert error > 1e-4


def test_the_fingerprints_are_those_of_the_commit_that_they_name() -> None:
    tree = trees.tree("miles")
    assert tree is not None
    trees.skip_other_commits(tree, MILES.proven_with)
    assert found_sources(Path(tree) / "miles", MILES.sources) == MILES.sources
