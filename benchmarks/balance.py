"""The imbalance of a step over ranks and micro-batches by the cost model, for ours and other
partitioners.

    python -m benchmarks.balance [--slime FOLDER] [--verl]

A step of 1024 samples on 8 data-parallel ranks under a budget of 32,768 tokens, for the shape of a
7-billion-parameter model (28 layers of 3584, 28 heads, 4 key-value groups, gated 18,944, vocabulary
152,064). slime's `build_dp_schedule` comes from a checkout, verl's functions from the installed
package. Ranks: the slowest rank over the mean rank, the step time without pipeline and experts.
Lockstep: the same if micro-batch j of all ranks waits for the slowest, as with expert parallelism.
Pipeline: 1F1B over 4 stages, over the mean rank's work. Budget: the fullest micro-batch.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_pg.step import plan_bins
from megatron_pg.step.cost import TOKENS, SampleCost
from megatron_pg.step.plan import pipeline_order

RANKS, BUDGET, STAGES, SAMPLES = 8, 32768, 4, 1024
MODEL = SimpleNamespace(
    num_layers=28,
    hidden_size=3584,
    num_attention_heads=28,
    num_query_groups=4,
    kv_channels=128,
    ffn_hidden_size=18944,
    swiglu=True,
)
COST = SampleCost.of_model(MODEL, 152064)
Plan = list[list[list[int]]]
"""The sample indices of each rank's micro-batches."""


def distributions(seed: int) -> dict[str, list[int]]:
    """Return three distributions of lengths, including prompts."""
    rng = np.random.default_rng(seed)

    def clipped(values: Any) -> list[int]:
        return np.clip(values, 16, BUDGET).astype(int).tolist()

    turns = rng.geometric(0.25, SAMPLES)
    return {
        "log-normal, median 1500": clipped(rng.lognormal(np.log(1500), 0.8, SAMPLES)),
        "heavy tail to 32k": clipped(600 * (1 + rng.pareto(1.1, SAMPLES))),
        "multi-turn": clipped([rng.lognormal(np.log(900), 0.6, count).sum() for count in turns]),
    }


def ours(lengths: list[int], cost: SampleCost) -> Plan:
    """Plan like `assign_to_data_parallel_ranks` and `plan_step`, with the same number of
    micro-batches on every rank.
    """
    ranks = plan_bins(lengths, sum(lengths), multiple=RANKS, cost=cost)
    plan = []
    for rank in ranks:
        bins = tuple(plan_bins([lengths[i] for i in rank], BUDGET, cost=cost))
        plan.append([[int(rank[i]) for i in members] for members in pipeline_order(bins)])
    return plan


def first_fit(lengths: list[int]) -> Plan:
    """Assign samples to ranks in turn, each to the first micro-batch with enough space."""
    plan: Plan = [[] for _ in range(RANKS)]
    for index, length in enumerate(lengths):
        bins = plan[index % RANKS]
        for members in bins:
            if sum(lengths[i] for i in members) + length <= BUDGET:
                members.append(index)
                break
        else:
            bins.append([index])
    return plan


def of_slime(lengths: list[int], by_flops: bool) -> Plan:
    """Plan by slime's `--balance-data`, with or without `--balance-by-flops`."""
    from slime.utils.dp_schedule import build_dp_schedule

    args = SimpleNamespace(
        **vars(MODEL),
        vocab_size=152064,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=BUDGET,
        balance_data=True,
        balance_by_flops=by_flops,
        q_lora_rank=None,
        kv_lora_rank=None,
        num_experts=None,
        multi_latent_attention=False,
        moe_layer_freq=None,
    )
    sizes = {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    order = list(range(len(lengths)))
    partitions, micro_batches, *_ = build_dp_schedule(
        args, sizes, lengths, global_batch_size=len(lengths), rollout_indices=order
    )
    return [
        [[mine[i] for i in members] for members in bins]
        for mine, bins in zip(partitions, micro_batches, strict=True)
    ]


def of_verl(lengths: list[int]) -> Plan:
    """Plan by `_balance_batch` of verl's trainer, then `rearrange_micro_batches`, with its count
    and order.
    """
    import torch
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    work = calculate_workload(torch.tensor(lengths)).tolist()
    ranks = get_seqlen_balanced_partitions(work, RANKS, equal_size=True)
    count = max(-(-sum(lengths[i] for i in rank) // BUDGET) for rank in ranks)
    plan = []
    for rank in ranks:
        mine = [work[i] for i in rank]
        bins = get_seqlen_balanced_partitions(mine, count, equal_size=False)
        bins.sort(key=lambda members: sum(mine[i] for i in members), reverse=True)  # noqa: B023
        plan.append([[rank[i] for i in members] for members in bins[::2][::-1] + bins[1::2]])
    return plan


def pipelined(times: list[float], stages: int = STAGES) -> float:
    """Return the end time of 1F1B without interleaving. A third of a micro-batch's time is forward,
    spread over the stages.
    """
    count = len(times)
    forward = [time / 3 / stages for time in times]
    ends: dict[tuple[str, int, int], float] = {}
    orders = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, count)
        steps = [("forward", j) for j in range(warmup)]
        for j in range(count - warmup):
            steps += [("forward", warmup + j), ("backward", j)]
        orders.append(steps + [("backward", j) for j in range(count - warmup, count)])
    places, clocks = [0] * stages, [0.0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                what, j = order[places[stage]]
                before = (
                    ("forward", j, stage - 1) if what == "forward" else ("backward", j, stage + 1)
                )
                is_first = before[2] in (-1, stages)
                if not is_first and before not in ends:
                    break
                started = max(clocks[stage], 0.0 if is_first else ends[before])
                clocks[stage] = started + forward[j] * (1 if what == "forward" else 2)
                ends[what, j, stage] = clocks[stage]
                places[stage] += 1
    return max(clocks)


def measures(plan: Plan, lengths: list[int]) -> tuple[float, float, float, int, float]:
    """Return ranks, lockstep, pipeline, a rank's most micro-batches, and the fullest over the
    budget.
    """
    costs = COST.of_lengths(lengths)
    times = [[float(sum(costs[i] for i in members)) for members in bins] for bins in plan]
    mean = sum(map(sum, times)) / len(times)
    most = max(map(len, times))
    padded = [each + [0.0] * (most - len(each)) for each in times]
    fullest = max(sum(lengths[i] for i in members) for bins in plan for members in bins)
    return (
        max(map(sum, times)) / mean,
        sum(map(max, zip(*padded, strict=True))) / mean,
        max(map(pipelined, times)) * STAGES / mean,
        most,
        fullest / BUDGET,
    )


def planners(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[list[int]], Plan]]]:
    yield "first fit", first_fit
    if args.slime:
        sys.path.insert(0, args.slime)
        yield "slime --balance-data", lambda lengths: of_slime(lengths, False)
        yield "slime --balance-by-flops", lambda lengths: of_slime(lengths, True)
    if args.verl:
        yield "verl", of_verl
    yield "ours, tokens", lambda lengths: ours(lengths, TOKENS)
    yield "ours, time", lambda lengths: ours(lengths, COST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slime", help="a checkout")
    parser.add_argument("--verl", action="store_true", help="use the installed verl")
    args = parser.parse_args()
    print("| lengths | planner | ranks | lockstep | pipeline | micro-batches | budget |")
    print("|---|---|---|---|---|---|---|")
    for name, plan in planners(args):
        for what in distributions(0):
            found = [
                measures(plan(lengths), lengths)
                for lengths in (distributions(seed)[what] for seed in range(5))
            ]
            ranks, lockstep, pipeline, _, fullest = np.mean(found, axis=0)
            print(
                f"| {what} | {name} | {ranks:.3f} | {lockstep:.3f} | {pipeline:.3f} | "
                f"{max(each[3] for each in found)} | {fullest:.2f} |"
            )


if __name__ == "__main__":
    main()
