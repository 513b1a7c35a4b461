"""Group sizes by plan beside Megatron's own scheduler and one context-parallel size for all, by the cost model.

    python -m benchmarks.hybrid_context

The samples and the model of `benchmarks.balance` on 16 DP * CP ranks that hold 8,192 tokens each. One size for all is what the
longest sequence needs, with samples dealt and packed as `assign_to_data_parallel_ranks` and `plan_step` do it. Megatron's is
`BalancedCPScheduler` of the installed megatron-core: a micro-batch a sample, and all ranks wait for the slowest at the end of
each of its groups of samples. Slowest: what a step takes over the mean rank's work, waiting included. Ranks of a token: over
how many it lies in the mean, which is what communication grows with. Nothing is timed.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from benchmarks.balance import COST, distributions
from megatron_pg.step import plan_bins
from megatron_pg.step.hybrid_context import micro_batches_of_rank
from megatron_pg.step.token_window import Layout

RANKS, BUDGET = 16, 8192
Phases = list[list[list[tuple[tuple[int, ...], int]]]]
"""Between waits of all ranks, of each rank its micro-batches: samples, and the ranks that hold them."""


def planned(lengths: list[int]) -> Phases:
    return [
        [
            [
                (members, size)
                for members, _, size in micro_batches_of_rank(
                    lengths, Layout(rank, RANKS), BUDGET, COST
                )
            ]
            for rank in range(RANKS)
        ]
    ]


def of_megatron(lengths: list[int]) -> Phases:
    scheduler = BalancedCPScheduler(BUDGET, SimpleNamespace(size=lambda: RANKS))  # type: ignore[arg-type]
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    phases: Phases = []
    for group in groups:
        count = np.bincount([sample for mine in group for sample in mine], minlength=len(lengths))
        phases.append([[((sample,), int(count[sample])) for sample in mine] for mine in group])
    return phases


def one_size(lengths: list[int]) -> Phases:
    size = 1 << (-(-max(lengths) // BUDGET) - 1).bit_length()
    grid = []
    for chosen in plan_bins(lengths, sum(lengths), multiple=RANKS // size, cost=COST):
        bins = plan_bins([lengths[i] for i in chosen], BUDGET * size, cost=COST)
        grid += [[(tuple(chosen[members].tolist()), size) for members in bins]] * size
    return [grid]


def measures(phases: Phases, lengths: list[int]) -> tuple[float, float, float, float]:
    """Slowest, most micro-batches of a rank, ranks of a token, the fullest micro-batch of a rank over the budget."""
    costs, tokens = COST.of_lengths(lengths), np.array(lengths)
    times = [[sum(costs[list(m)].sum() / s for m, s in mine) for mine in phase] for phase in phases]
    held = [(m, s) for phase in phases for mine in phase for m, s in mine]
    counts = np.sum([[len(mine) for mine in phase] for phase in phases], axis=0)
    return (
        sum(map(max, times)) / (costs.sum() / RANKS),
        int(counts.max()),
        # A micro-batch of s ranks is listed s times.
        sum(tokens[list(m)].sum() for m, s in held) / tokens.sum(),
        max(tokens[list(m)].sum() / s for m, s in held) / BUDGET,
    )


def main() -> None:
    planners: dict[str, Callable[[list[int]], Phases]] = {
        "one size for all": one_size,
        "Megatron's scheduler": of_megatron,
        "plan_hybrid_cp_step": planned,
    }
    print("| lengths | samples | planner | slowest | micro-batches | ranks of a token | budget |")
    print("|---|---|---|---|---|---|---|")
    for what, count in itertools.product(distributions(0), (1024, 64)):
        for name, plan in planners.items():
            each = (distributions(seed)[what][:count] for seed in range(5))
            found = [measures(plan(lengths), lengths) for lengths in each]
            slowest, most, ranks, fullest = np.mean(found, axis=0)
            print(
                f"| {what} | {count} | {name} | {slowest:.3f} | {most:.0f} | {ranks:.2f} | {fullest:.2f} |"
            )


if __name__ == "__main__":
    main()
