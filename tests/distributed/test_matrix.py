"""A covering array of the matrix; the whole of it is `python -m tests.distributed.matrix --all`."""

import pytest

from .covering import covering_cases
from .matrix import run_all

CASES = covering_cases()


@pytest.fixture(scope="module")
def results():
    return {result.case: result for result in run_all(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sharded_step_equals_the_unsharded_reference(case, results) -> None:
    for run, comparison in zip(case.runs, results[case].comparisons, strict=True):
        assert comparison.passed, f"{run}: {comparison}"
