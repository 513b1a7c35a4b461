"""The training script from rollout files: its steps, and that a resumed run equals one that was never stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .rollout_run import (
    WHOLE_GROUPS,
    copy_after_step,
    output_of,
    run,
    start,
    steps_of,
    wait,
    write_rollouts,
)

pytest.importorskip("pyarrow")

STEPS = WHOLE_GROUPS + "--train-iters 6 --save-interval 3"


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", 40)


@pytest.fixture(scope="module")
def uninterrupted(rollouts: Path) -> Path:
    run_dir = rollouts.with_name("uninterrupted")
    run(rollouts, run_dir, STEPS)
    return run_dir


@pytest.fixture
def stopped(uninterrupted: Path, tmp_path: Path) -> Path:
    """The run as it was when its third step was done."""
    return copy_after_step(3, uninterrupted, tmp_path / "run")


def test_steps_hold_whole_groups_and_say_what_they_hold(uninterrupted: Path) -> None:
    steps = steps_of(uninterrupted)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(10 <= step["docs"] < 14 for step in steps)
    assert any(step["docs"] > 10 for step in steps)
    assert sum(step["skipped_rows"] for step in steps) > 0
    assert all(step["aggregation_checksum"] == pytest.approx(1.0, abs=1e-6) for step in steps)
    assert all(step["grad_norm"] > 0.0 for step in steps)
    assert all(0.0 <= step["reward"] <= 2.0 for step in steps)
    kept = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert kept == ["step_000000_000003", "step_000000_000006"]


def test_a_resumed_run_goes_on_in_the_middle_of_the_file(
    rollouts: Path, uninterrupted: Path, stopped: Path
) -> None:
    assert "resuming from" in run(rollouts, stopped, STEPS + " --resume")
    assert steps_of(stopped) == steps_of(uninterrupted)


@pytest.mark.parametrize(
    ("world_size", "flags"), [(2, "--context-parallel-size 2"), (1, "")], ids=["cp2", "dp1"]
)
def test_a_run_of_two_data_parallel_ranks_is_resumed_on_others(
    rollouts: Path, uninterrupted: Path, stopped: Path, world_size: int, flags: str
) -> None:
    run(rollouts, stopped, f"{STEPS} --resume {flags}", world_size)
    assert _is_close(steps_of(stopped), steps_of(uninterrupted))


def test_forgetting_a_part_of_the_checkpoint_is_noticed(
    rollouts: Path, uninterrupted: Path, stopped: Path
) -> None:
    """The mutant of the tests above: samples that were carried over are lost."""
    run(rollouts, stopped, STEPS + " --resume", prepare=_lose_carried_samples)
    assert not _is_close(steps_of(stopped), steps_of(uninterrupted))


def _lose_carried_samples(rank: int) -> None:
    from megatron_pg.planning import StepCollector

    load_states = StepCollector.load_states

    def load_less(self: StepCollector, states: Sequence[Any]) -> None:
        load_states(self, [dataclasses.replace(state, carried=()) for state in states])

    StepCollector.load_states = load_less  # type: ignore[method-assign]


def _is_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(found) == len(expected) and all(
        _known(one) == pytest.approx(_known(other), rel=1e-4, abs=1e-5)
        for one, other in zip(found, expected, strict=True)
    )


def _known(step: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in step.items() if value is not None}


def test_the_end_of_the_files_ends_the_run(tmp_path: Path) -> None:
    short = write_rollouts(tmp_path / "short.jsonl", 5)
    num_rows = len(short.read_text().splitlines())
    run_dir = tmp_path / "run"
    run(short, run_dir, WHOLE_GROUPS + "--train-iters 9 --keep-last-checkpoints 1")
    steps = steps_of(run_dir)
    assert sum(step["docs"] + step["skipped_rows"] for step in steps) == num_rows
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == len(steps) < 9
    kept = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert kept == [f"step_000000_{len(steps):06d}"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "is cut by the end of a step"),
        ("--loss-aggregation sample_mean", "give --keep-prompt-groups"),
        (
            WHOLE_GROUPS + "--seq-length 4 --max-position-embeddings 4",
            "more than --max-position-embeddings",
        ),
    ],
)
def test_what_a_step_cannot_hold_is_refused(
    rollouts: Path, tmp_path: Path, flags: str, message: str
) -> None:
    run_dir = tmp_path / "run"
    assert any(wait(start(rollouts, run_dir, "--train-iters 6 --docs-per-step 9 " + flags)))
    assert message in output_of(run_dir).read_text()
