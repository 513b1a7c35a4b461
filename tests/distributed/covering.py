"""Few steps of the matrix that contain every pair of values of any two factors: a covering
array.
"""

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from .cases import Case, all_cases
from .steps import Run

LARGEST_WORLD = 4
"""Processes of a landing's cases; the larger ones of the matrix run in `ci/full.sh`."""


def factors(case: Case, run: Run) -> dict[str, Any]:
    """What a step varies, by name."""
    sharding, options = case.sharding, case.options
    return {
        "tensor": (sharding.tensor, sharding.sequence_parallel),
        "pipeline": (sharding.pipeline, sharding.virtual_pipeline),
        "context": sharding.context,
        "data": sharding.data,
        "experts": (sharding.expert, sharding.expert_tensor),
        "model": case.model,
        "per token": options.calculate_per_token_loss,
        "average in collective": options.average_in_collective,
        "distributed optimizer": options.distributed_optimizer,
        "overlap": options.overlap_grad_reduce,
        "dtype": options.dtype,
        "aggregation": run.aggregation,
        "samples": run.shape,
        "cut": run.cut,
        "regularized": getattr(run, "regularized", None),
    }


def pairs(case: Case, run: Run) -> list[Any]:
    return list(itertools.combinations(factors(case, run).items(), 2))


def covering_cases() -> list[Case]:
    """The first of the steps with the most pairs that no step chosen before has, until all pairs
    are there.

    Of a case come the chosen steps, with as few layers as its sharding takes.
    """
    candidates = [
        (case, run)
        for case in all_cases()
        if case.sharding.world_size <= LARGEST_WORLD
        for run in case.runs
    ]
    numbers: dict[Any, int] = {}
    rows = [
        [numbers.setdefault(pair, len(numbers)) for pair in pairs(*each)] for each in candidates
    ]
    has_pair = np.zeros((len(rows), len(numbers)), dtype=bool)
    for place, row in enumerate(rows):
        has_pair[place, row] = True
    chosen: dict[Case, list[Run]] = defaultdict(list)
    missing = np.ones(len(numbers), dtype=bool)
    while missing.any():
        best = int(has_pair[:, missing].sum(1).argmax())
        missing &= ~has_pair[best]
        case, run = candidates[best]
        chosen[case].append(run)
    return [with_few_layers(case, runs) for case, runs in chosen.items()]


def with_few_layers(case: Case, runs: list[Run]) -> Case:
    layers = max(2, case.sharding.num_chunks)
    steps = (replace(run, replay_layers=layers) if run.replay_layers else run for run in runs)
    return Case(case.sharding, replace(case.options, num_layers=layers), tuple(steps))
