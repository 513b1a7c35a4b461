"""A step from a rollout file on two ranks: rows, rewards, plan and totals, as one process has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pg.rollout_files import RolloutFiles, StepCollector, with_group_advantages
from megatron_pg.step import plan_step
from tests.lanes import in_one_lane

from .launch import run_ranks

pytestmark = in_one_lane

pytest.importorskip("pyarrow")

REWARDS = (1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 2.0, 0.0, 1.0, 1.0, 1.0)
GROUPS = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3)


def write(folder: Path, rewards: Sequence[float] = REWARDS) -> str:
    path = folder / "rollouts.jsonl"
    with path.open("w") as file:
        for number, (reward, group) in enumerate(zip(rewards, GROUPS, strict=True)):
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
    answers = []
    for row in rows:
        rewards = [r for r, group in zip(REWARDS, GROUPS, strict=True) if group == GROUPS[row]]
        answers.append((row, REWARDS[row] - sum(rewards) / len(rewards)))
    return answers


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
        num_groups = len({GROUPS[row] for row in rows})
        assert results[0][1][index][:3] == (len(rows), num_groups, num_tokens)


def far_rewards(path: str) -> str:
    """The group of the first four rows has a reward too far off; rank 1 holds none of them."""
    samples = [sample for sample in RolloutFiles([path]).pull(11) if sample is not None]
    mine = samples[:4] if dist.get_rank() == 0 else samples[4:]
    with pytest.raises(ValueError) as error:
        with_group_advantages(mine, method="dr_grpo", **everywhere())
    return str(error.value)


def test_rewards_without_advantages_in_float32_end_all_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, [*REWARDS[:2], 1e39, *REWARDS[3:]])
    first, second = run_ranks(far_rewards, 2, path)
    assert first == second and "rewards[2] is 1e+39, too far" in first


def collect_from(paths: list[list[str]]) -> str:
    """What a rank is told that reads its own list of files."""
    source = source_of(paths[dist.get_rank()])
    collector = StepCollector(source, docs_per_step=2, data_parallel_group=dist.group.WORLD)
    with pytest.raises(ValueError) as error:
        collector.collect()
    return str(error.value)


def test_ranks_that_see_other_files_are_refused(tmp_path: Path) -> None:
    """A folder that is not shared, or not seen whole yet: row i would be lost, or taken twice."""
    (tmp_path / "more").mkdir()
    path = write(tmp_path)
    stale = [path, write(tmp_path / "more")]
    for rank in run_ranks(collect_from, 2, [[path], stale]):
        assert "data-parallel rank 1 reads other samples than rank 0" in rank
        assert "the same files on all nodes" in rank
