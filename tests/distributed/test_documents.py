"""Steps of n documents over real data-parallel ranks: the same steps at every size, and after resuming at another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_pg import Sample
from megatron_pg.rollout_files import CollectorState, StepCollector
from tests.lanes import in_one_lane

from .launch import run_ranks

pytestmark = in_one_lane

GROUP_SIZES = (3, 1, 5, 2, 2, 4, 1, 1, 6, 3, 3, 2)
BAD_ROWS = frozenset({4, 17, 18})


def rows() -> list[Sample | None]:
    groups = [group for group, size in enumerate(GROUP_SIZES) for _ in range(size)]
    return rows_of([None if row in BAD_ROWS else group for row, group in enumerate(groups)])


def rows_of(groups: Sequence[int | None]) -> list[Sample | None]:
    """A sample of each group; None is a bad row."""
    return [
        None if group is None else Sample([row, 0], 1, [1], group_index=group)
        for row, group in enumerate(groups)
    ]


class RowSource:
    """Row i belongs to rank i % size, counted from where this run began, as for rollout files."""

    can_reshard = True

    def __init__(
        self, rows: list[Sample | None], group: dist.ProcessGroup | None = dist.group.WORLD
    ) -> None:
        self._rows = rows
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._next = 0

    @property
    def position(self) -> int:
        return self._next

    def seek(self, position: Any) -> None:
        self._next = position

    def pull(self, count: int) -> list[Sample | None]:
        window = self._rows[self._next : self._next + count * self._size]
        self._next = min(self._next + count * self._size, len(self._rows))
        return window[self._rank :: self._size]


def collector(mode: str, docs_per_step: int, keep: bool) -> StepCollector:
    return StepCollector(
        RowSource(rows()),
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


NUM_RANDOM_STREAMS = 12
SIZES = (1, 2, 3)
CASES = [(a, b, c) for a in SIZES for b in SIZES for c in SIZES if a != b]


def random_groups(generator: random.Random) -> list[int | None]:
    """Some 40 rows in groups of one to five, a third of the rows bad, several in a row at times."""
    groups: list[int | None] = []
    for group in range(9):
        for _ in range(generator.randint(1, 5)):
            while generator.random() < 0.35:
                groups.append(None)
            groups.append(group)
    return groups


def whole_groups(groups: Sequence[int | None], docs_per_step: int) -> list[list[int]]:
    steps: list[list[int]] = [[]]
    for group in range(9):
        if len(steps[-1]) >= docs_per_step:
            steps.append([])
        steps[-1] += [row for row, other in enumerate(groups) if other == group]
    return steps


def resume_random_streams() -> list[str]:
    """Runs that are stopped and go on at another size, and again at a third; what went wrong."""
    process_groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    wrong = []
    for seed in range(NUM_RANDOM_STREAMS):
        generator = random.Random(seed)
        groups, docs_per_step = random_groups(generator), generator.randint(1, 6)
        for case in generator.sample(CASES, 4):
            states: list[CollectorState] = []
            steps: list[list[int]] = []
            for size, num_steps in zip(case, (2, generator.randint(0, 1), 100), strict=True):
                part, states = collect_part(
                    rows_of(groups), docs_per_step, states, num_steps, process_groups[size], size
                )
                steps += part
            if dist.get_rank() == 0 and steps != whole_groups(groups, docs_per_step):
                wrong.append(f"seed {seed}, sizes {case}: {steps}")
    return wrong


def collect_part(
    stream: list[Sample | None],
    docs_per_step: int,
    states: list[CollectorState],
    num_steps: int,
    process_group: dist.ProcessGroup,
    size: int,
) -> tuple[list[list[int]], list[CollectorState]]:
    """Rows of each step on the first `size` ranks, told to all; and their states."""
    found: Any = ([], None)
    if dist.get_rank() < size:
        part = StepCollector(
            RowSource(stream, process_group),
            docs_per_step=docs_per_step,
            mode="exact",
            keep_prompt_groups=True,
            data_parallel_group=process_group,
        )
        if states:
            part.load_states(states)
        steps: list[list[int]] = []
        while len(steps) < num_steps and (step := part.collect()) is not None:
            steps.append([int(sample.tokens[0]) for sample in step.samples])
        found = (steps, part.state())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    of_ranks = [steps for steps, _ in gathered[:size]]
    merged = [
        sorted(row for rows_of_step in parts for row in rows_of_step)
        for parts in zip(*of_ranks, strict=True)
    ]
    return merged, [state for _, state in gathered[:size]]


def test_resuming_at_other_sizes_among_bad_rows_goes_on_with_the_same_steps() -> None:
    assert run_ranks(resume_random_streams, max(SIZES))[0] == []


class BrokenSource(RowSource):
    """Rank 1 fails where it pulls, or where it goes on."""

    def __init__(self, error: Exception, fails_at: str) -> None:
        super().__init__(rows())
        self._error, self._fails_at = error, fails_at

    def seek(self, position: Any) -> None:
        self._fail_at("seek")
        super().seek(position)

    def pull(self, count: int) -> list[Sample | None]:
        self._fail_at("pull")
        return super().pull(count)

    def _fail_at(self, place: str) -> None:
        if dist.get_rank() == 1 and place == self._fails_at:
            raise self._error


def collect_from_broken(error: Exception, fails_at: str) -> tuple[str, str]:
    broken = StepCollector(
        BrokenSource(error, fails_at), docs_per_step=2, data_parallel_group=dist.group.WORLD
    )
    try:
        if fails_at == "seek":
            broken.load_states([broken.state()] * dist.get_world_size())
        broken.collect()
    except Exception as found:
        return type(found).__name__, str(found)
    return "", ""


ERRORS = {
    "a bad row": ValueError("rollouts.jsonl row 3: reward is 'high', expected a number"),
    "a disk": OSError(5, "Input/output error", "rollouts.jsonl"),
    "a fault": RecursionError("maximum recursion depth exceeded"),
}


@pytest.mark.parametrize("fails_at", ("pull", "seek"))
@pytest.mark.parametrize("case", ERRORS)
def test_an_error_on_one_rank_stops_all(case: str, fails_at: str) -> None:
    error = ERRORS[case]
    first, failing, third = run_ranks(collect_from_broken, 3, error, fails_at)
    assert failing == (type(error).__name__, str(error))
    if isinstance(error, ValueError):
        told = ("ValueError", f"data-parallel rank 1: {error}")
    else:
        told = ("OtherRankError", f"data-parallel rank 1: {type(error).__name__}: {error}")
    assert first == third == told
