"""The representative part of the matrix; the whole of it is `python -m tests.distributed.matrix`."""

from __future__ import annotations

import pytest

from .cases import Case, representative_cases
from .run_cases import Result, run_all

CASES = representative_cases()


@pytest.fixture(scope="module")
def results() -> dict[Case, Result]:
    return {result.case: result for result in run_all(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sharded_step_equals_the_unsharded_reference(
    case: Case, results: dict[Case, Result]
) -> None:
    failures = [
        f"{run}: {comparison}"
        for run, comparison in zip(case.runs, results[case].comparisons, strict=True)
        if not comparison.passed
    ]
    assert not failures, "\n".join(failures)
