"""Steps of n documents over real data-parallel ranks: the same steps at every size, and after resuming at another."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_pg import Sample
from megatron_pg.planning import CollectorState, StepCollector

from .launch import run_ranks

GROUP_SIZES = (3, 1, 5, 2, 2, 4, 1, 1, 6, 3, 3, 2)
BAD_ROWS = frozenset({4, 17, 18})


def rows() -> list[Sample | None]:
    groups = [group for group, size in enumerate(GROUP_SIZES) for _ in range(size)]
    return [
        None if row in BAD_ROWS else Sample([row, 0], 1, [1], group_index=g, rollout_id=None)
        for row, g in enumerate(groups)
    ]


class RowSource:
    """Row i belongs to rank i % size, counted from where this run began, as for rollout files."""

    can_reshard = True

    def __init__(self) -> None:
        self._rows = rows()
        self._next = 0

    @property
    def position(self) -> int:
        return self._next

    def seek(self, position: Any) -> None:
        self._next = position

    def pull(self, count: int) -> list[Sample | None]:
        size = dist.get_world_size()
        window = self._rows[self._next : self._next + count * size]
        self._next = min(self._next + count * size, len(self._rows))
        return window[dist.get_rank() :: size]


def collector(mode: str, docs_per_step: int, keep: bool) -> StepCollector:
    return StepCollector(
        RowSource(),
        docs_per_step=docs_per_step,
        mode=mode,
        keep_prompt_groups=keep,
        data_parallel_group=dist.group.WORLD,
    )


Steps = list[tuple[list[int], int, int]]


def collect(
    mode: str, docs_per_step: int, keep: bool, states: list[CollectorState], num_steps: int
) -> tuple[Steps, CollectorState, int]:
    """Rows, achieved count and skipped rows of each step on this rank, its state, and the exchanges it took."""
    source = collector(mode, docs_per_step, keep)
    if states:
        source.load_states(states)
    steps: Steps = []
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
        while len(steps) < num_steps and (step := source.collect()) is not None:
            rows_of_step = [int(sample.tokens[0]) for sample in step.samples]
            steps.append((rows_of_step, step.num_documents, step.num_skipped))
    return steps, source.state(), exchange.call_count


def over_ranks(results: list[tuple[Steps, CollectorState, int]]) -> list[list[int]]:
    """The rows of each step over all ranks; every rank must name the same count, and every row be held once."""
    merged = []
    for parts in zip(*(steps for steps, _, _ in results), strict=True):
        rows_of_step = sorted(row for part, _, _ in parts for row in part)
        assert {count for _, count, _ in parts} == {len(rows_of_step)}
        merged.append(rows_of_step)
    return merged


def good_rows() -> list[int]:
    return [row for row in range(sum(GROUP_SIZES)) if row not in BAD_ROWS]


@pytest.mark.parametrize("world_size", (2, 3))
def test_exact_steps_are_the_rows_in_order_at_every_size(world_size: int) -> None:
    results = run_ranks(collect, world_size, "exact", 6, False, [], 100)
    good = good_rows()
    assert over_ranks(results) == [good[i : i + 6] for i in range(0, len(good), 6)]
    assert {sum(skipped for _, _, skipped in steps) for steps, _, _ in results} == {len(BAD_ROWS)}
    # One window a step, one more where bad rows left it short, and one that finds the end.
    assert results[0][2] <= len(results[0][0]) + len(BAD_ROWS) + 1


def kept_groups(docs_per_step: int) -> list[list[int]]:
    steps: list[list[int]] = [[]]
    first = 0
    for size in GROUP_SIZES:
        steps[-1] += [row for row in range(first, first + size) if row not in BAD_ROWS]
        first += size
        if len(steps[-1]) >= docs_per_step:
            steps.append([])
    return [step for step in steps if step]


@pytest.mark.parametrize("world_size", (2, 3))
def test_whole_groups_over_ranks(world_size: int) -> None:
    results = run_ranks(collect, world_size, "exact", 5, True, [], 100)
    assert over_ranks(results) == kept_groups(5)
    results = run_ranks(collect, world_size, "at_least", 5, True, [], 100)
    steps = over_ranks(results)
    assert sorted(row for step in steps for row in step) == good_rows()
    assert all(len(step) >= 5 for step in steps[:-1])
    groups = [{sample.group_index for i in step if (sample := rows()[i])} for step in steps]
    assert sum(len(group) for group in groups) == len({s.group_index for s in rows() if s})


@pytest.mark.parametrize("sizes", ((2, 2), (2, 3), (3, 2), (2, 1)))
def test_resuming_at_another_size_goes_on_with_the_same_steps(sizes: tuple[int, int]) -> None:
    before = run_ranks(collect, sizes[0], "exact", 5, True, [], 2)
    states = [state for _, state, _ in before]
    assert any(state.carried for state in states)
    after = run_ranks(collect, sizes[1], "exact", 5, True, states, 100)
    assert over_ranks(before) + over_ranks(after) == kept_groups(5)


class BrokenSource(RowSource):
    """Rank 1 finds a bad row."""

    def pull(self, count: int) -> list[Sample | None]:
        if dist.get_rank() == 1:
            raise ValueError("rollouts.jsonl row 3: reward is 'high', expected a number")
        return super().pull(count)


def collect_from_broken() -> str:
    broken = StepCollector(BrokenSource(), docs_per_step=2, data_parallel_group=dist.group.WORLD)
    try:
        broken.collect()
    except ValueError as error:
        return str(error)
    return ""


def test_a_bad_row_on_one_rank_stops_all() -> None:
    messages = run_ranks(collect_from_broken, 2, timeout=60.0)
    assert all("rollouts.jsonl row 3: reward is 'high'" in message for message in messages)
