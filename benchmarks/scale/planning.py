"""Curves of planning: `plan_step`, assignment to ranks, totals, the collector."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.balance import COST
from benchmarks.scale.played import heavy_tailed, measured, played, table
from megatron_pg import Sample, StepCollector, plan_step
from megatron_pg.rollout_files import IteratorSource
from megatron_pg.step import assign_to_data_parallel_ranks
from megatron_pg.step.counts import OPTIONAL, ROW

SIZES = ((10**3, 16), (10**4, 16), (10**4, 1024), (10**5, 1024), (10**5, 16384))
GOAL = 1_000_000, 16_384
BUDGET = 262_144
Row = Sequence[Any]


def sample_of(length: int, index: int) -> Sample:
    """Make a sample of one long response, in a group of eight."""
    values = torch.full((length - 1,), -1.0)
    tokens = torch.full((length,), index % 8)
    return Sample(
        tokens,
        length - 1,
        torch.ones(length - 1),
        1.0,
        old_log_probs=values,
        group_index=index // 8,
    )


def dealt(num_samples: int, num_ranks: int) -> tuple[np.ndarray[Any, Any], list[list[int]]]:
    lengths = heavy_tailed(num_samples)
    return lengths, assign_to_data_parallel_ranks(lengths, num_ranks, cost=COST)


def deals() -> Iterator[Row]:
    """Time the assignment of lengths to ranks, and compute the slowest rank by the cost model."""
    for num_samples, num_ranks in (
        *itertools.product((10**3, 10**4, 10**5), (16, 1024)),
        (10**5, 16384),
        GOAL,
    ):
        (lengths, ranks), seconds, mebibytes = measured(lambda: dealt(num_samples, num_ranks))  # noqa: B023
        costs = COST.of_lengths(lengths)
        times = np.array([costs[members].sum() for members in ranks])
        longest = costs.max() / times.mean()
        yield num_samples, num_ranks, seconds, mebibytes, times.max() / times.mean(), longest


def plans() -> Iterator[Row]:
    """Time one rank's `plan_step` of new samples, including prompt hashes. The other ranks are
    simulated.
    """
    for num_samples, num_ranks in (*SIZES, GOAL):
        lengths, ranks = dealt(num_samples, num_ranks)
        index = np.arange(num_samples)
        flat = np.zeros(num_samples, dtype=ROW)
        flat["num_active_tokens"], flat["filled"] = lengths, (1 << len(OPTIONAL)) - 1 - 32
        flat["group_index"], flat["rollout_id"] = index // 8, index
        flat["prompt_hash"], flat["number"] = index // 8, index
        flat["id_source"] = 7
        mine = [sample_of(int(lengths[i]), num_samples * 8 + 8 * i) for i in ranks[0]]
        answers = [(1, int(lengths[members].sum()), flat[members].tobytes()) for members in ranks]
        with played(answers) as wire:
            plan, seconds, mebibytes = measured(
                lambda: plan_step(  # noqa: B023
                    mine,  # noqa: B023
                    max_tokens_per_microbatch=BUDGET,
                    data_parallel_group=object(),  # type: ignore[arg-type]
                    allow_different_group_sizes=True,
                )
            )
        assert plan.totals.num_rollouts == num_samples
        yield (
            num_samples,
            num_ranks,
            len(mine),
            seconds,
            mebibytes,
            wire.bytes / num_samples,
            wire.collectives,
        )


def collected() -> Iterator[Row]:
    """Time one rank's `collect` of a step. The other ranks are simulated."""
    for num_samples, num_ranks in ((10**3, 16), (10**4, 1024), (10**5, 1024), (10**5, 16384), GOAL):
        count = -(-num_samples // num_ranks)
        ids = [[(rank * count + i, None) for i in range(count)] for rank in range(num_ranks)]
        mine = [sample_of(2, 8 * i) for i in range(count)]
        with played(ids) as wire:
            collector = StepCollector(
                IteratorSource(mine),
                docs_per_step=num_samples,
                data_parallel_group=object(),  # type: ignore[arg-type]
            )
            step, seconds, mebibytes = measured(collector.collect)
        assert step.num_documents == count * num_ranks
        yield num_samples, num_ranks, seconds, mebibytes, wire.bytes / num_samples, wire.collectives


def main() -> None:
    table(
        "Dealing lengths to ranks",
        "samples, ranks, seconds, MiB added, slowest rank, longest sample over the mean rank",
        deals(),
    )
    table(
        "plan_step of one rank",
        "samples, ranks, of this rank, seconds, MiB added, bytes per sample, collectives",
        plans(),
    )
    table(
        "The collector",
        "samples, ranks, seconds, MiB added, bytes per sample, collectives",
        collected(),
    )
