"""The main job, shortened: it learns, and leaves what the docs promise."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .trainer_run import steps_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documented job, with half of its warm start, ended after 24 of its 80 steps."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    own = {"VENV_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "RUN_DIR": str(folder)}
    own["WARM_START_STEPS"] = "200"
    command = ["bash", "examples/quickstart.sh", "--train-iters", "24", "--log-interval", "4"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | own, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DEPRECATED" not in done.stdout + done.stderr
    assert re.search(r"24 steps, held-out score 0\.\d\d -> 0", done.stdout)
    assert (
        len(re.findall(r"^    '\w+ -> .*  reward [01]'$", done.stdout, re.MULTILINE))
        == 2 * 6 + 2 * 4
    )
    return folder


def test_the_main_job_learns(run_dir: Path) -> None:
    """Rewards of six steps: five seeds reach 0.75 and more."""
    rewards = [step["reward"] for step in steps_of(run_dir)]
    assert rewards[0] < 0.5 and sum(rewards[-6:]) / 6 > 0.65, rewards
    lines = (run_dir / "held_out.jsonl").read_text().splitlines()
    scores = {line["step"]: line["score"] for line in map(json.loads, lines)}
    assert scores.keys() == {0, 24} and scores[24] > scores[0] + 0.2


def test_a_run_leaves_everything_that_the_docs_promise(run_dir: Path) -> None:
    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, 25))
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/metrics.md").read_text()))
    assert set(steps[0]) <= documented
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert sorted(path.name for path in run_dir.glob("iter_*")) == ["iter_0000020", "iter_0000024"]
    assert "prompts-per-step: 32" in (run_dir / "settings.yaml").read_text()


def test_the_rollouts_of_a_run_say_what_its_metrics_say(run_dir: Path) -> None:
    """With the log-probs of the policy that the step began with, of an eighth of its prompts."""
    for step in steps_of(run_dir):
        path = run_dir / f"rollouts/step_{step['step']:06d}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 8 * 8 and len({row["group_index"] for row in rows}) == 8
        pairs = (zip(row["new_log_probs"], row["log_probs"], strict=True) for row in rows)
        ratios = [[math.exp(new - old) for new, old in pair] for pair in pairs]
        means = [sum(of_row) / len(of_row) for of_row in ratios]
        assert sum(means) / len(means) == pytest.approx(step["ratio_new_old"], abs=0.02)
    page = (run_dir / "rollouts.html").read_text()
    assert "spell_backward" in page and '"name": "step 24"' in page


def test_every_sample_counts_once_and_the_first_step_is_on_policy(run_dir: Path) -> None:
    steps = steps_of(run_dir)
    for step in steps:
        assert step["aggregation_checksum"] == pytest.approx(1.0, abs=1e-6)
        assert step["grad_norm"] > 0.0
    # Odd steps train on answers of the policy as it is, even steps on the other half of the round,
    # one update later.
    for step in steps[::2]:
        assert step["ratio_new_old"] == pytest.approx(1.0, abs=1e-4)
        assert step["clipped_ratio_fraction"] == 0.0 and step["kl_new_old"] < 1e-8
    assert max(step["kl_new_old"] for step in steps[1::2]) > 1e-7
