"""Plans over real data-parallel ranks: they agree where they must, and one exchange is enough."""

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_pg import Sample, StepPlan, plan_step, step_totals

from .launch import run_ranks

BUDGET = 64
OWNERS = 3


def whole_step() -> list[Sample]:
    """Prompt groups and two-sample rollouts that are spread over the ranks, unevenly."""
    rng = random.Random(0)
    samples = []
    for index in range(24):
        response = rng.randrange(30)
        mask = [int(rng.random() < 0.7) for _ in range(response)]
        group = index // 4
        ids = {"group_index": group, "rollout_id": group if index % 4 < 2 else None}
        tokens = [0] * (response + 2)
        samples.append(Sample(tokens, response, mask, **ids, id_source="the test"))
    return samples


def samples_of(rank: int) -> list[Sample]:
    """Rank 0 holds about half of the samples, rank 2 none in the first groups."""
    owners = [((0, 1, 0, 1) if index < 12 else (0, 0, 1, 2))[index % 4] for index in range(24)]
    return [sample for sample, own in zip(whole_step(), owners, strict=True) if own == rank]


def plan_on_rank(ragged: bool) -> tuple[StepPlan, int]:
    mine = samples_of(dist.get_rank())
    task: dict[str, Any] = {"max_tokens_per_microbatch": BUDGET, "cp_size": 2, "ragged": ragged}
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
        plan = plan_step(mine, data_parallel_group=dist.group.WORLD, **task)
    calls = exchange.call_count
    own_group = dist.new_group(backend="gloo")
    with ThreadPoolExecutor(1) as planner:
        upcoming = planner.submit(plan_step, mine, data_parallel_group=own_group, **task)
        for number in range(20):  # the step that runs meanwhile, on another group
            numbers = torch.full((4,), float(number))
            dist.all_reduce(numbers)
            assert numbers.tolist() == [float(number * OWNERS)] * 4
        assert upcoming.result() == plan
    # All of the step on one rank.
    held = whole_step() if dist.get_rank() == 1 else []
    skewed = step_totals(held, data_parallel_group=dist.group.WORLD)
    assert skewed == step_totals(whole_step())
    return plan, calls


def test_ranks_agree_on_totals_and_microbatches() -> None:
    results = run_ranks(plan_on_rank, OWNERS, False)
    plans = [plan for plan, _ in results]
    assert [calls for _, calls in results] == [1] * OWNERS
    assert len({plan.num_microbatches for plan in plans}) == 1
    assert () in plans[2].microbatches

    expected = step_totals(whole_step())
    num_tokens = sum(sample.total_length for sample in whole_step())
    for rank, plan in enumerate(plans):
        assert plan.totals.num_tokens == num_tokens
        assert dataclasses.replace(plan.totals, num_tokens=None) == expected
        local = samples_of(rank)
        indices = sorted(index for microbatch in plan.microbatches for index in microbatch)
        assert indices == list(range(len(local)))
        for name in ("rollout_denominators", "group_denominators"):
            found, wanted = (getattr(totals, name)(local) for totals in (plan.totals, expected))
            assert found.tolist() == wanted.tolist()


def test_ragged_ranks_run_what_they_have() -> None:
    plans = [plan for plan, _ in run_ranks(plan_on_rank, OWNERS, True)]
    assert plans[0].num_microbatches > plans[2].num_microbatches
    assert all(indices for plan in plans for indices in plan.microbatches)
    num_tokens = sum(sample.total_length for sample in whole_step())
    assert {plan.totals.num_tokens for plan in plans} == {num_tokens}
