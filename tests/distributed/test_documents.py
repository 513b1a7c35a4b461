"""Steps of n documents over real data-parallel ranks: the same steps at every size, and after
resuming at another; and from a rollout file rows, rewards, plan and totals as one process has
them.
"""

import functools
import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_pg import Sample
from megatron_pg.rollout_files import (
    CollectorState,
    RolloutFiles,
    StepCollector,
    with_group_advantages,
)
from megatron_pg.step import plan_step

from .launch import refusal, run_ranks

GROUPS: list[int | None] = [
    group for group, size in enumerate((3, 1, 5, 2, 2, 4, 1, 1, 6, 3, 3, 2)) for _ in range(size)
]
for bad_row in (4, 17, 18):
    GROUPS[bad_row] = None
GOOD_ROWS = [row for row, group in enumerate(GROUPS) if group is not None]


class RowSource:
    """A sample of each group, None being a bad row. Row i belongs to rank i % size, counted from
    where this run began, as for rollout files.
    """

    is_shared = True

    def __init__(self, groups: Sequence[int | None], process_group: Any = dist.group.WORLD) -> None:
        self._rows = [
            None if group is None else Sample([row, 0], 1, [1], group_index=group)
            for row, group in enumerate(groups)
        ]
        self._rank, self._size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.position = 0

    def seek(self, num_slots: int) -> None:
        self.position = num_slots

    def pull(self, count: int) -> list[Sample | None]:
        window = self._rows[self.position : self.position + count * self._size]
        self.position = min(self.position + count * self._size, len(self._rows))
        return window[self._rank :: self._size]


Steps = list[tuple[list[int], int, int]]
"""Rows, achieved count and skipped rows of each step on a rank."""


def steps_of(collector: StepCollector, num_steps: int = 100) -> Steps:
    steps: Steps = []
    while len(steps) < num_steps and (step := collector.collect()) is not None:
        rows = [int(sample.tokens[0]) for sample in step.samples]
        steps.append((rows, step.num_documents, step.num_skipped))
    return steps


def collect(**keywords: Any) -> tuple[Steps, int]:
    collector = StepCollector(RowSource(GROUPS), data_parallel_group=dist.group.WORLD, **keywords)
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
        return steps_of(collector), exchange.call_count


def over_ranks(ranks: Sequence[Steps]) -> list[list[int]]:
    """The rows of each step over all ranks; every rank must name the same count, and every row be
    held once.
    """
    merged = []
    for parts in zip(*ranks, strict=True):
        rows = sorted(row for part, _, _ in parts for row in part)
        assert {count for _, count, _ in parts} == {len(rows)}
        merged.append(rows)
    return merged


@pytest.mark.parametrize("world_size", (2, 3))
def test_exact_steps_are_the_rows_in_order_at_every_size(world_size) -> None:
    worker = functools.partial(collect, docs_per_step=6, mode="exact")
    ranks, (exchanges, *_) = zip(*run_ranks(worker, world_size), strict=True)
    assert over_ranks(ranks) == [GOOD_ROWS[i : i + 6] for i in range(0, len(GOOD_ROWS), 6)]
    num_bad = len(GROUPS) - len(GOOD_ROWS)
    assert {sum(skipped for _, _, skipped in steps) for steps in ranks} == {num_bad}
    # One window a step, one more where bad rows left it short, and one that finds the end.
    assert exchanges <= len(ranks[0]) + num_bad + 1


def whole_groups(groups: Sequence[int | None], docs_per_step: int) -> list[list[int]]:
    steps: list[list[int]] = [[]]
    for group in dict.fromkeys(group for group in groups if group is not None):
        if len(steps[-1]) >= docs_per_step:
            steps.append([])
        steps[-1] += [row for row, other in enumerate(groups) if other == group]
    return steps


@pytest.mark.parametrize("world_size", (2, 3))
def test_whole_groups_over_ranks(world_size) -> None:
    exact, at_least = (
        over_ranks([steps for steps, _ in run_ranks(worker, world_size)])
        for worker in (
            functools.partial(collect, docs_per_step=5, mode=mode, keep_prompt_groups=True)
            for mode in ("exact", "at_least")
        )
    )
    assert exact == whole_groups(GROUPS, 5)
    assert sorted(row for step in at_least for row in step) == GOOD_ROWS
    assert all(len(step) >= 5 for step in at_least[:-1])
    groups = [group for step in at_least for group in {GROUPS[row] for row in step}]
    assert len(groups) == len(set(groups)), "a group is cut"


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


def resume_random_streams() -> list[str]:
    """Runs that are stopped and go on at another size, and again at a third; what went wrong."""
    process_groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    wrong = []
    for seed in range(NUM_RANDOM_STREAMS):
        generator = random.Random(seed)
        groups, docs_per_step = random_groups(generator), generator.randint(1, 6)
        for case in generator.sample(CASES, 4):
            state: CollectorState | None = None
            steps: list[list[int]] = []
            for size, num_steps in zip(case, (2, generator.randint(0, 1), 100), strict=True):
                source = (groups, process_groups[size])
                part, state = collect_part(source, docs_per_step, state, num_steps, size)
                steps += part
            if dist.get_rank() == 0 and steps != whole_groups(groups, docs_per_step):
                wrong.append(f"seed {seed}, sizes {case}: {steps}")
            if state is None or state.start != len(groups):  # rows may be appended
                wrong.append(f"seed {seed}, sizes {case}: the end is at {state}")
    return wrong


def collect_part(
    source: tuple[list[int | None], Any],
    docs_per_step: int,
    state: CollectorState | None,
    num_steps: int,
    size: int,
) -> tuple[list[list[int]], CollectorState]:
    """Rows of each step on the first `size` ranks, told to all; and their state."""
    found: Any = ([], None)
    if dist.get_rank() < size:
        part = StepCollector(
            RowSource(*source),
            docs_per_step=docs_per_step,
            mode="exact",
            keep_prompt_groups=True,
            data_parallel_group=source[1],
        )
        if state:
            part.load_state(state)
        found = (steps_of(part, num_steps), part.state())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    ranks, states = zip(*gathered[:size], strict=True)
    assert len(set(states)) == 1
    return over_ranks(ranks), states[0]


def test_resuming_at_other_sizes_among_bad_rows_goes_on_with_the_same_steps() -> None:
    assert run_ranks(resume_random_streams, max(SIZES))[0] == []


def resume_at_the_same_size(is_forgetful: bool) -> int:
    """Count runs that stop, are saved again before a step, and go on with other steps than without
    the stops.
    """
    num_wrong = 0
    for seed in range(NUM_RANDOM_STREAMS):
        generator = random.Random(seed)
        groups, docs_per_step = random_groups(generator), generator.randint(1, 6)

        def collector() -> StepCollector:
            return StepCollector(
                RowSource(groups),  # noqa: B023
                docs_per_step=docs_per_step,  # noqa: B023
                keep_prompt_groups=True,
                data_parallel_group=dist.group.WORLD,
            )

        expected, found = steps_of(collector()), []
        parts = [collector() for _ in range(3)]
        for part, following in pairwise(parts):
            found += steps_of(part, 2 if part is parts[0] else 0)
            state = part.state()
            following.load_state(state._replace(carried=()) if is_forgetful else state)
        num_wrong += found + steps_of(parts[-1]) != expected
    return num_wrong


def test_resuming_at_the_same_size_goes_on_with_the_same_steps() -> None:
    """Also in `at_least` mode, in which the steps depend on the windows that are pulled."""
    assert run_ranks(resume_at_the_same_size, 3, False) == [0] * 3
    assert max(run_ranks(resume_at_the_same_size, 3, True)) > 0


class BrokenSource(RowSource):
    """Rank 1 fails where it pulls, or where it goes on."""

    def __init__(self, error: Exception, fails_at: str) -> None:
        super().__init__(GROUPS)
        if dist.get_rank() == 1:
            setattr(self, fails_at, mock.Mock(side_effect=error))


def collect_from_broken(error: Exception, fails_at: str) -> tuple[str, str]:
    source = BrokenSource(error, fails_at)
    broken = StepCollector(source, docs_per_step=2, data_parallel_group=dist.group.WORLD)
    with pytest.raises((ValueError, OSError, RuntimeError)) as raised:
        if fails_at == "seek":
            broken.load_state(broken.state())
        broken.collect()
    return raised.type.__name__, str(raised.value)


ERRORS = {
    "a bad row": ValueError("rollouts.jsonl row 3: reward is 'high', expected a number"),
    "a disk": OSError(5, "Input/output error", "rollouts.jsonl"),
    "a fault": RecursionError("maximum recursion depth exceeded"),
}


@pytest.mark.parametrize("fails_at", ("pull", "seek"))
@pytest.mark.parametrize("case", ERRORS)
def test_an_error_on_one_rank_stops_all(case, fails_at) -> None:
    error = ERRORS[case]
    first, failing, third = run_ranks(collect_from_broken, 3, error, fails_at)
    assert failing == (type(error).__name__, str(error))
    if isinstance(error, ValueError):
        told = ("ValueError", f"data-parallel rank 1: {error}")
    else:
        told = ("OtherRankError", f"data-parallel rank 1: {type(error).__name__}: {error}")
    assert first == third == told


REWARDS = (1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 2.0, 0.0, 1.0, 1.0, 1.0)
GROUPS_OF_FILE = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3)


def write(folder: Path, rewards: Sequence[float] = REWARDS) -> str:
    pytest.importorskip("pyarrow")
    path = folder / "rollouts.jsonl"
    with path.open("w") as file:
        for number, (reward, group) in enumerate(zip(rewards, GROUPS_OF_FILE, strict=True)):
            response = [1] * (number % 3 + 1)
            row = {"prompt_ids": [number], "response_ids": response, "reward": reward}
            file.write(json.dumps(row | {"group_index": group}) + "\n")
    return str(path)


def source_of(paths: list[str]) -> RolloutFiles:
    place = {"data_parallel_rank": dist.get_rank(), "data_parallel_size": dist.get_world_size()}
    return RolloutFiles(paths, **place)


def everywhere() -> dict[str, Any]:
    """The prompt of a row here is its number."""
    return {"data_parallel_group": dist.group.WORLD, "allow_different_prompts": True}


Answer = list[tuple[int, float]]


def train(path: str) -> tuple[list[Answer], list[tuple[int, ...]]]:
    """Rows and advantages of each step on this rank; N, P, T and micro-batches of each step."""
    collector = StepCollector(
        source_of([path]),
        docs_per_step=4,
        mode="exact",
        keep_prompt_groups=True,
        data_parallel_group=dist.group.WORLD,
    )
    answers, counts = [], []
    while (step := collector.collect()) is not None:
        samples, _ = with_group_advantages(step.samples, method="dr_grpo", **everywhere())
        plan = plan_step(samples, max_tokens_per_microbatch=8, **everywhere())
        totals = plan.totals
        assert step.num_documents == totals.num_rollouts
        answers.append([(int(s.tokens[0]), float(s.advantages[0])) for s in samples])
        of_step = (totals.num_rollouts, totals.num_prompt_groups, totals.num_active_tokens)
        counts.append((*of_step, plan.num_microbatches))
    return answers, counts


def expected_advantages(rows: range) -> Answer:
    """Rewards minus the mean of their group."""
    of_group: dict[int, list[float]] = {}
    for reward, group in zip(REWARDS, GROUPS_OF_FILE, strict=True):
        of_group.setdefault(group, []).append(reward)
    groups = [of_group[GROUPS_OF_FILE[row]] for row in rows]
    pairs = zip(rows, groups, strict=True)
    return [(row, REWARDS[row] - sum(group) / len(group)) for row, group in pairs]


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_steps_from_a_file(tmp_path: Path, world_size: int) -> None:
    results = run_ranks(train, world_size, write(tmp_path))
    assert len({tuple(counts) for _, counts in results}) == 1
    steps = [range(0, 4), range(4, 9), range(9, 11)]
    for index, rows in enumerate(steps):
        found = sorted(pair for answers, _ in results for pair in answers[index])
        expected = expected_advantages(rows)
        assert [row for row, _ in found] == list(rows)
        assert [a for _, a in found] == pytest.approx([a for _, a in expected], abs=1e-6)
        num_tokens = sum(row % 3 + 1 for row in rows)
        num_groups = len({GROUPS_OF_FILE[row] for row in rows})
        assert results[0][1][index][:3] == (len(rows), num_groups, num_tokens)


def far_rewards(path: str) -> str:
    """The group of the first four rows has a reward too far off; rank 1 holds none of them."""
    samples = [sample for sample in RolloutFiles([path]).pull(11) if sample is not None]
    mine = samples[:4] if dist.get_rank() == 0 else samples[4:]
    return refusal(ValueError, with_group_advantages, mine, method="dr_grpo", **everywhere())


def test_rewards_without_advantages_in_float32_end_all_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, [*REWARDS[:2], 1e39, *REWARDS[3:]])
    first, second = run_ranks(far_rewards, 2, path)
    assert first == second and "rewards[2] is 1e+39, too far" in first


def of_rollouts(files: list[str]) -> list[Answer | str]:
    """Rows and advantages on this rank of files of rollouts, or why there are none."""
    found: list[Answer | str] = []
    for path in files:
        samples = [sample for sample in source_of([path]).pull(2) if sample is not None]
        try:
            replaced, _ = with_group_advantages(samples, method="dr_grpo", **everywhere())
            found.append([(int(s.tokens[0]), float(s.advantages[0])) for s in replaced])
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_rollout_on_two_ranks_counts_once_and_has_one_reward(tmp_path: Path) -> None:
    """Rows 0 to 2 are one rollout; rank 1 has row 1 and row 3."""
    pytest.importorskip("pyarrow")
    changes: list[dict[str, Any]] = [{}, {"reward": 0.5}, {"advantages": 1.0}]
    files = []
    for number, change in enumerate(changes):
        rows = [{"reward": reward, "rollout_id": 7} for reward in (1.0, 1.0, 1.0)]
        rows.append({"reward": 0.0})
        rows[1] |= change
        for row, fields in enumerate(rows):
            fields |= {"prompt_ids": [row], "response_ids": [1], "group_index": 5}
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = run_ranks(of_rollouts, 2, list(map(str, files)))
    assert first[0] == [(0, 0.5), (2, 0.5)] and second[0] == [(1, 0.5), (3, -0.5)]
    assert first[1:] == second[1:]
    assert "rollout_id 7 has the rewards 1.0 (1.jsonl row 0) and 0.5 (1.jsonl row 1)" in first[1]
    assert "2.jsonl row 1 has advantages and 2.jsonl row 0 only a reward" in first[2]
