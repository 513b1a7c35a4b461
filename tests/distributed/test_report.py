"""The picture of runs, and lines of a run that are damaged."""

import json
import re
from pathlib import Path

import pytest
from report import Run, read_lines, read_run, report, summary

pytestmark = pytest.mark.full


def write_run(folder: Path, rewards: list[float | None]) -> Path:
    folder.mkdir()
    lines = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_curves_are_means_of_the_last_sixteenth() -> None:
    steps = [{"step": step, "reward": float(step % 2)} for step in range(1, 33)]
    numbers, values, means = Run("run", {}, steps, []).smoothed("reward")
    assert numbers == list(range(1, 33)) and values[:3] == [1.0, 0.0, 1.0]
    assert means == [1.0] + [0.5] * 31


def test_runs_are_drawn_in_one_picture(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [0.25, None, 0.75]) for name in ("one", "two")]
    held_out = ({"step": step, "score": step / 4} for step in (0, 3))
    text = "".join(json.dumps(line) + "\n" for line in held_out)
    (folders[0] / "held_out.jsonl").write_text(text)
    assert summary(folders[0]) == "3 steps, held-out score 0.00 -> 0.75"
    assert summary(folders[1]) == "3 steps, mean reward 0.25 -> 0.75 (first, last tenth)"
    report([read_run(folder) for folder in folders], tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_a_run_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no step in metrics.jsonl"):
        read_run(tmp_path)


@pytest.mark.parametrize("garbage", ["no JSON", '{"reward": 1}', "[1]", '{"step": null}', ""])
def test_garbage_in_the_metrics_is_named(tmp_path: Path, garbage: str) -> None:
    """A last line without its end is a killed run's, and is none."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{garbage}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path} line 2 is not a step of a run")):
        read_lines(path)
    path.write_text(f'{{"step": 1}}\n{garbage}')
    assert read_lines(path) == [{"step": 1}]
