"""Run cases of the matrix: one launch for each world size, one reference for each model."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from .cases import Case
from .compare import Comparison, compare, gradient_tolerance
from .launch import run_ranks
from .models import ModelOptions
from .one_step import Outcome, build, train_step
from .reference import reference_steps
from .steps import Run


@dataclass(frozen=True)
class Result:
    """One case: how far each of its steps was from the reference."""

    case: Case
    comparisons: tuple[Comparison, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(comparison.passed for comparison in self.comparisons)

    @property
    def worst(self) -> tuple[Run, Comparison]:
        """The step with the largest gradient error."""
        pairs = zip(self.case.runs, self.comparisons, strict=True)
        return max(pairs, key=lambda pair: pair[1].gradient_error)


References = dict[tuple[ModelOptions, Run], Outcome]


def without_cut(run: Run) -> Run:
    """The reference does not depend on how a step is cut."""
    return replace(run, cut="")


def compute_references(cases: list[Case]) -> References:
    """Every reference that the cases need."""
    wanted: dict[ModelOptions, dict[Run, None]] = defaultdict(dict)
    for case in cases:
        wanted[case.options.unsharded].update(dict.fromkeys(map(without_cut, case.runs)))
    references = {}
    for options, runs in wanted.items():
        outcomes = run_ranks(reference_steps, 1, options, list(runs))[0]
        references.update({(options, run): o for run, o in zip(runs, outcomes, strict=True)})
    return references


def run_case(case: Case, references: References) -> Result | None:
    """On every rank: build the model, run the steps; rank 0 compares."""
    started = time.monotonic()
    chunks = build(case.sharding, case.options)
    comparisons = []
    for run in case.runs:
        outcome = train_step(chunks, case.sharding, run)
        if outcome is not None:
            expected = references[(case.options.unsharded, without_cut(run))]
            comparisons.append(compare(outcome, expected, gradient_tolerance(case.options)))
    if not comparisons:
        return None
    return Result(case, tuple(comparisons), time.monotonic() - started)


def _run_cases(cases: list[Case], references: References) -> list[Result | None]:
    return [run_case(case, references) for case in cases]


def run_all(cases: list[Case], parallel: int = 1, per_launch: int = 8) -> Iterator[Result]:
    """Results of the cases, those of one world size together.

    Args:
        parallel: launches at a time, each of as many processes as its cases have ranks.
        per_launch: cases of a launch.
    """
    references = compute_references(cases)
    by_size: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_size[case.sharding.world_size].append(case)
    batches = [
        same_size[first : first + per_launch]
        for _, same_size in sorted(by_size.items())
        for first in range(0, len(same_size), per_launch)
    ]

    def launch(batch: list[Case]) -> list[Result]:
        world_size = batch[0].sharding.world_size
        results: list[Result] = run_ranks(_run_cases, world_size, batch, references)[0]
        return results

    with ThreadPoolExecutor(parallel) as pool:
        for results in pool.map(launch, batches):
            yield from results
