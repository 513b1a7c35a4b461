"""Plans whose micro-batches have context-parallel groups of their own: every sample once, within the memory, in step."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pg import Sample, TokenWindow, step_totals
from megatron_pg.step import SampleCost, hybrid_context, plan_hybrid_cp_step
from megatron_pg.step.token_window import Layout
from tests.fast.refusals import assert_refused

MicroBatch = tuple[tuple[int, ...], int, int]
Plan = list[list[MicroBatch]]
"""Of each rank its micro-batches: samples, packed tokens, ranks."""

COST = SampleCost(3.0, 0.5)
LENGTHS = random.Random(3).choices((5, 9, 14, 29, 40, 75, 150), k=60)


def planned(lengths: list[int], num_ranks: int, budget: int, mode: str = "zigzag") -> Plan:
    return [
        hybrid_context.micro_batches_of_rank(lengths, Layout(rank, num_ranks, mode), budget, COST)
        for rank in range(num_ranks)
    ]


def run_in_step(
    plan: Plan, time_of: Callable[[MicroBatch], float]
) -> tuple[list[MicroBatch], float, float]:
    """Runs each micro-batch once all ranks of its aligned group have come to it.

    Returns:
        The micro-batches, the latest end, and the longest that a rank waited for its group.
    """
    clocks, left = [0.0] * len(plan), [list(mine) for mine in plan]
    ran: list[MicroBatch] = []
    waited = 0.0
    while any(left):
        before = len(ran)
        for first in range(len(plan)):
            if not left[first] or first % (size := left[first][0][2]):
                continue
            batch, group = left[first][0], range(first, first + size)
            if any(left[rank][:1] != [batch] for rank in group):
                continue
            begin = max(clocks[rank] for rank in group)
            waited = max(waited, begin - min(clocks[rank] for rank in group))
            for rank in group:
                clocks[rank] = begin + time_of(batch)
                del left[rank][0]
            ran.append(batch)
        assert len(ran) > before, "two groups wait for each other"
    return ran, max(clocks), waited


def check_plan(plan: Plan, lengths: list[int], budget: int, mode: str = "zigzag") -> None:
    def work(batch: MicroBatch) -> float:
        return sum(3.0 * lengths[i] + 0.5 * lengths[i] ** 2 for i in batch[0])

    ran, end, waited = run_in_step(plan, lambda batch: work(batch) / batch[2])
    assert sorted(i for members, *_ in ran for i in members) == list(range(len(lengths)))
    assert all(mine for mine in plan)
    for members, tokens, size in ran:
        window = TokenWindow.build(
            [lengths[i] for i in members], [0] * len(members), cp_size=size, cp_partition_mode=mode
        )
        assert window.num_tokens == tokens and window.local_tokens <= budget
    mean = sum(map(work, ran)) / len(plan)
    assert end <= 1.05 * mean * (1 + 1e-12), (end, mean)
    assert waited <= 1e-12 * mean


@settings(max_examples=100, deadline=None)
@given(data=st.data(), mode=st.sampled_from(("zigzag", "contiguous")))
def test_a_plan_runs_every_sample_once_within_the_memory_and_no_rank_waits(data, mode):
    num_ranks = data.draw(st.sampled_from((1, 2, 4, 8)))
    half_budget = data.draw(st.integers(1, 30))
    lengths = data.draw(st.lists(st.integers(1, 2 * half_budget * num_ranks), max_size=40))
    plan = planned(lengths, num_ranks, 2 * half_budget, mode)
    check_plan(plan, lengths, 2 * half_budget, mode)


def test_the_checks_see_a_plan_that_is_wrong(monkeypatch):
    plan = planned(LENGTHS, 8, 30)
    check_plan(plan, LENGTHS, 30)
    assert {size for mine in plan for *_, size in mine} == {1, 2, 4, 8}
    wrong = {
        "the smallest groups first": ([mine[::-1] for mine in plan], LENGTHS, 30),
        "every half takes the same samples": ([plan[0]] * 8, LENGTHS, 30),
    }
    # The ninth of nine is for all ranks; 75 tokens are 80 on four.
    for owner, setting, value, lengths, budget in (
        (hybrid_context, "SLACK", math.inf, [10] * 9, 30),
        (Layout, "padded_length", lambda layout, length: length, [75] * 9, 19),
    ):
        check_plan(planned(lengths, 8, budget), lengths, budget)
        with monkeypatch.context() as patched:
            patched.setattr(owner, setting, value)
            wrong[setting] = planned(lengths, 8, budget), lengths, budget
    for mutant, (plan, lengths, budget) in wrong.items():
        with pytest.raises(AssertionError):
            check_plan(plan, lengths, budget)
            pytest.fail(mutant, pytrace=False)


def groups_of(lengths: list[int], num_ranks: int, budget: int) -> list[int]:
    sizes = {
        i: size for mine in planned(lengths, num_ranks, budget) for m, _, size in mine for i in m
    }
    return [sizes[i] for i in range(len(lengths))]


def test_long_samples_lie_on_many_ranks_and_short_ones_on_few():
    # 64 would fit one rank, and end four times as late as the others.
    assert groups_of([64] + [8] * 40, 8, 64) == [4] + [1] * 40
    # 400 tokens need seven ranks of 64.
    assert groups_of([400] + [20] * 100, 8, 64) == [8] + [1] * 100
    # The ninth of nine equal ones.
    assert sorted(groups_of([10] * 9, 8, 100)) == [1] * 8 + [8]


def sample(length: int, index: int = 0) -> Sample:
    response = length - 1
    return Sample([0] * length, response, [1] * response, name=f"answer-{index}", group_index=0)


def test_a_rank_alone_has_all_samples():
    samples = [sample(length, i) for i, length in enumerate([4, 6, 3])]
    plan = plan_hybrid_cp_step(samples, max_tokens_per_rank=7)
    assert plan.microbatches == ((0, 2), (1,)) and plan.microbatch_tokens == (7, 6)
    assert plan.cp_sizes == (1, 1) and plan.totals == step_totals(samples)
    assert plan_hybrid_cp_step([], max_tokens_per_rank=7).microbatches == ((),)


def test_bad_input_is_named():
    words = "answer-3 takes 9 tokens | max_tokens_per_rank 7"
    assert_refused(words, plan_hybrid_cp_step, [sample(9, 3)], max_tokens_per_rank=7)
    for value in (0, "7"):
        words = f"max_tokens_per_rank is {value!r}"
        assert_refused(words, plan_hybrid_cp_step, [], max_tokens_per_rank=value)
