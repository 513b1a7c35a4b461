"""The studies of the quickstart: their statistics against plain integration, their tables and
figures, what they run again.
"""

import json
import math
import statistics
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import study  # noqa: E402


def test_an_interval_by_hand() -> None:
    centre, width = study.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert centre == 3.0
    assert width == pytest.approx(2.7764451051977987 * math.sqrt(2.5) / math.sqrt(5))
    with pytest.raises(ValueError, match="1 seeds: .*--seeds"):
        study.interval([1.0])


def write_run(folder: Path, offset: float, learns_at: int | None = None) -> None:
    """20 steps; the reward is 1 from one of them on where that is given, else the offset. Wrong
    answers are missing in every third, as where all answers are right.
    """
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, 21):
        reward = offset if learns_at is None else float(step >= learns_at)
        wrong = None if step % 3 == 0 else 8.0 + offset
        lengths = {"response_length_right": 7.0, "response_length_wrong": wrong}
        lines.append({"step": step, "reward": reward, "grad_norm": 1.0, **lengths})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "summary.json").write_text(json.dumps({"held_out_after": offset}))


def run_study(folder: Path, patch: pytest.MonkeyPatch, run, *seeds_and_flags: str) -> None:
    """A study, in the place of whose commands a function is called that gives their status."""

    def called(command: list[str], **kwargs: object) -> object:
        return study.subprocess.CompletedProcess(command, run(command))

    patch.setattr(study.subprocess, "run", called)
    patch.setattr(sys, "argv", ["study.py", "--out", str(folder), "--seeds", *seeds_and_flags])
    study.main()


def test_finished_runs_are_read_and_not_repeated(tmp_path, monkeypatch, capsys) -> None:
    for number, mode in enumerate(study.STUDIES["aggregations"].modes):
        for seed in (1, 2, 3):
            # Seeds differ by 0.1, modes by 0.01 whatever the seed.
            write_run(tmp_path / f"{mode}-seed-{seed}", 0.1 * seed + 0.01 * number)
    run_study(tmp_path, monkeypatch, lambda command: pytest.fail("a run"), "1", "2", "3")
    table = (tmp_path / "study.md").read_text()
    assert "by seed | 1 | 2 | 3 |\n|---|---|---|---|\n| `sample_mean` | 21 | 21 | 21 |" in table
    width = 4.302652729911275 * statistics.stdev([0.1, 0.2, 0.3]) / math.sqrt(3)
    assert f"| `sample_mean` | 0.200 ± {width:.3f} |" in table
    assert "| reward by step | 4 | 8 | 12 | 16 | 20 |" in table
    assert "| `sample_mean` | 0.20 | 0.20 | 0.20 | 0.20 | 0.20 |" in table
    assert f"| 8.200 ± {width:.3f} |" in table, "the mean over the steps that have wrong answers"
    assert "| `constant - sample_mean` | +0.030 ± 0.000 |" in table, "paired: the seeds fall out"
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    assert table in capsys.readouterr().out


def test_a_student_is_run_after_its_teacher(tmp_path, monkeypatch, capsys) -> None:
    commands = []

    def run(command: list[str]) -> int:
        commands.append(command)
        folder = Path(command[command.index("--run-dir") + 1])
        way = folder.name.split("-seed-")[0]
        write_run(folder, 0.5, {"teacher": 9, "distilled": 12}.get(way, 99))
        return 0

    run_study(tmp_path, monkeypatch, run, "1", "2", "--study", "distillation")
    of_seed = [command for command in commands if command[command.index("--seed") + 1] == "2"]
    teacher, *_, distilled = (Path(each[each.index("--run-dir") + 1]) for each in of_seed)
    assert of_seed[-1][of_seed[-1].index("--teacher") + 1] == str(teacher)
    assert distilled.name == "distilled-seed-2"
    # The mean of the 4 steps before, the step and 3 after is 0.8 when 7 of 8 have it; never is one
    # more than there are.
    shown = capsys.readouterr().out
    for row in ("`teacher` | 12 | 12", "`rewards` | 21 | 21", "`distilled` | 15 | 15"):
        assert f"| {row} |\n" in shown


def test_a_run_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def fail(command: list[str]) -> int:
        commands.append(command)
        return 3

    with pytest.raises(SystemExit) as end:
        run_study(tmp_path, monkeypatch, fail, "1", "2")
    assert str(end.value).count("failed: see") == len(commands) == 8
    assert all("--resume" in command for command in commands), "a stopped run goes on"
    constant = next(command for command in commands if "constant" in command)
    assert constant[constant.index("--loss-aggregation-divisor") + 1] == "8"
