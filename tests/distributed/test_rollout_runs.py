"""The training script from rollout files: its steps, and that a resumed run equals one that was never stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .rollout_run import TIMEOUT_SECONDS, finish, output_of, start, steps_of, write_rollouts

pytest.importorskip("pyarrow")

STEPS = ("--train-iters", "6", "--save-interval", "3")


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", 40)


@pytest.fixture(scope="module")
def uninterrupted(rollouts: Path) -> Path:
    run_dir = rollouts.with_name("uninterrupted")
    finish(start(rollouts, run_dir, *STEPS), run_dir)
    return run_dir


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


@pytest.mark.parametrize("flags", [(), ("--context-parallel-size", "2")], ids=["dp2", "cp2"])
def test_a_resumed_run_goes_on_in_the_middle_of_the_file(
    rollouts: Path, uninterrupted: Path, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Resumed with the same ranks it gives the same bits; with context parallelism the same to rounding."""
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    name = "checkpoints/step_000000_000003"
    (run_dir / name).symlink_to(uninterrupted / name)
    for log in ("metrics.jsonl", "warm_start.jsonl"):
        (run_dir / log).write_bytes((uninterrupted / log).read_bytes())
    output = finish(start(rollouts, run_dir, *STEPS, "--resume", *flags), run_dir)
    assert "resuming from" in output
    resumed, expected = steps_of(run_dir), steps_of(uninterrupted)
    if not flags:
        assert resumed == expected
    assert len(resumed) == len(expected)
    for found, step in zip(resumed, expected, strict=True):
        assert found["docs"] == step["docs"]
        assert found == pytest.approx(step, rel=1e-4, abs=1e-6)


def test_the_end_of_the_files_ends_the_run(tmp_path: Path) -> None:
    short = write_rollouts(tmp_path / "short.jsonl", 5)
    num_rows = len(short.read_text().splitlines())
    run_dir = tmp_path / "run"
    finish(start(short, run_dir, "--train-iters", "9", "--keep-last-checkpoints", "1"), run_dir)
    steps = steps_of(run_dir)
    assert sum(step["docs"] + step["skipped_rows"] for step in steps) == num_rows
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == len(steps) < 9
    kept = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert kept == [f"step_000000_{len(steps):06d}"]


def test_a_cut_prompt_group_is_refused(rollouts: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = "--train-iters 2 --docs-per-step 10".split()
    process = start(rollouts, run_dir, *flags, drop="--keep-prompt-groups")
    assert process.wait(timeout=TIMEOUT_SECONDS) != 0
    assert "is cut by the end of a step" in output_of(run_dir).read_text()
    assert not (run_dir / "metrics.jsonl").read_text()
