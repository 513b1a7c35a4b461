"""The main job, shortened: what it writes, and that a stopped run goes on as if it had not been
stopped.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_log import checkpoints

from tests.distributed.quickstart_run import SHORT, output_of, start_script, steps_of, wait
from tests.progress import communicate, wait_until

ROOT = Path(__file__).parents[2]
DISTILL = "--policy-loss distill --distill-teacher hidden"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose quickstart.sh is the real one, and whose environment is the one that runs the
    tests.
    """
    folder = tmp_path_factory.mktemp("project")
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples/quickstart.sh", folder / "examples")
    (folder / "examples/launch").mkdir()
    scripts = (
        "train_grpo other_models tasks sampler run_folder run_log live_line report rollout_log "
        "launch/torchrun"
    )
    for name in (f"{script}.py" for script in scripts.split()):
        (folder / "examples" / name).symlink_to(ROOT / "examples" / name)
    (folder / "ci").mkdir()
    stub = f"make_environment() {{ VENV_PYTHON=${{STARTED:-{sys.executable}}}; }}\n"
    (folder / "ci/environment.sh").write_text(stub)
    return folder


def start(
    project: Path, run_dir: Path, *flags: str, short: bool = True, **environment: str
) -> subprocess.Popen[str]:
    shortened = SHORT.split() if short else []
    return subprocess.Popen(
        ["bash", "examples/quickstart.sh", *shortened, "--run-dir", str(run_dir), *flags],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_without_launcher(
    project: Path, run_dir: Path, *flags: str, short: bool = True
) -> tuple[list[int], str]:
    """Exit codes and output of the ranks that the launcher would start, forked from what has
    imported everything.
    """
    line, _ = start(project, run_dir, *flags, short=short, STARTED="echo").communicate()
    launcher, _, arguments = line.partition(" examples/train_grpo.py ")
    assert launcher.endswith("--nproc-per-node 2")
    codes = wait(start_script(arguments.split(), run_dir))
    return codes, output_of(run_dir).read_text()


def finish(project: Path, run_dir: Path, *flags: str, short: bool = True) -> str:
    """The output of a run that must succeed."""
    codes, output = run_without_launcher(project, run_dir, *flags, short=short)
    assert codes == [0, 0], output
    return output


def test_the_main_job_learns(project: Path, tmp_path: Path) -> None:
    """The documented job, ended after 24 of its 80 steps. Rewards of six steps: five seeds reach
    0.74 to 0.82.
    """
    finish(project, tmp_path / "run", "--train-iters", "24", short=False)
    rewards = [step["reward"] for step in steps_of(tmp_path / "run")]
    assert rewards[0] < 0.5 and sum(rewards[-6:]) / 6 > 0.7


def interrupt(
    process: subprocess.Popen[str], run_dir: Path, at_step: int, send: Callable[[], None]
) -> str:
    metrics = run_dir / "metrics.jsonl"

    def is_logged() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return metrics.exists() and len(metrics.read_text().splitlines()) >= at_step

    wait_until(is_logged, [process.pid])
    send()
    return communicate(process)[0]


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def uninterrupted(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    process = start(project, run_dir)
    output, _ = communicate(process)
    assert process.returncode == 0, output
    return run_dir


def test_a_run_leaves_everything_that_the_docs_promise(uninterrupted: Path) -> None:
    steps = steps_of(uninterrupted)
    assert [step["step"] for step in steps] == list(range(1, 13))
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/metrics.md").read_text()))
    assert set(steps[0]) <= documented
    summary = summary_of(uninterrupted)
    known = {"steps": 12, "loss_aggregation": "prompt_mean"}
    known |= {"world_size": 2, "context_parallel_size": 2}
    known |= {"reward_first": steps[0]["reward"], "reward_last": steps[-1]["reward"]}
    assert known.items() <= summary.items()
    assert re.fullmatch(r"0\.\d+\.\d+", summary["megatron_core"])
    assert summary["seconds"] > 0
    assert 0 <= summary["held_out_before"] <= 1 and 0 <= summary["held_out_after"] <= 1
    assert (uninterrupted / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((uninterrupted / "tensorboard").glob("events.*"))
    kept = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert kept == ["step_000004_000008", "step_000004_000012"]


def test_the_rollouts_of_a_run_say_what_its_metrics_say(uninterrupted: Path) -> None:
    """Every answer of these small steps is in the files, with the log-probs of the policy that the
    step began with.
    """
    for step in steps_of(uninterrupted):
        path = uninterrupted / f"rollouts/step_{step['step']:06d}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 16
        assert sum(row["reward"] for row in rows) / 16 == pytest.approx(step["reward"])
        ratios = [
            sum(
                math.exp(new - old)
                for new, old in zip(row["new_log_probs"], row["log_probs"], strict=True)
            )
            / len(row["log_probs"])
            for row in rows
        ]
        assert sum(ratios) / 16 == pytest.approx(step["ratio_new_old"], abs=1e-5)
    page = (uninterrupted / "rollouts.html").read_text()
    assert "spell_backward" in page and '"name": "step 12"' in page and '"answers": 16' in page


def test_every_sample_counts_once_and_the_first_step_is_on_policy(uninterrupted: Path) -> None:
    steps = steps_of(uninterrupted)
    for step in steps:
        assert step["aggregation_checksum"] == pytest.approx(1.0, abs=1e-6)
        assert step["grad_norm"] > 0.0
    # Odd steps train on answers of the policy as it is: sampling without context parallelism and
    # training with it must agree on the log-probs. Even steps train on the other half of the round,
    # one update later.
    for step in steps[::2]:
        assert step["ratio_new_old"] == pytest.approx(1.0, abs=1e-4)
        assert step["clipped_ratio_fraction"] == 0.0
        assert step["kl_new_old"] < 1e-8
    assert max(step["kl_new_old"] for step in steps[1::2]) > 1e-7


@pytest.mark.full
def test_a_resumed_run_equals_an_uninterrupted_one(project, uninterrupted, tmp_path):
    """SIGTERM to the launcher, then kill -9 of one worker's launcher: twice stopped, twice
    resumed.
    """
    run_dir = tmp_path / "run"
    process = start(project, run_dir)
    output = interrupt(process, run_dir, at_step=2, send=process.terminate)
    assert process.returncode == 128 + signal.SIGTERM
    assert output.count("stopped as asked, after a checkpoint") == 1
    assert "Traceback" not in output
    stopped_at = len(steps_of(run_dir))
    checkpoint = max(path.name for path in (run_dir / "checkpoints").iterdir())
    assert checkpoint == f"step_000004_{stopped_at:06d}", "SIGTERM ends with a checkpoint"

    process = start(project, run_dir, "--resume")
    interrupt(process, run_dir, at_step=9, send=process.kill)
    assert process.returncode == -signal.SIGKILL
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 99, "rew')  # as if killed in the middle of a line
    newest = checkpoints(run_dir)[-1]
    shutil.copytree(newest, newest.with_name("partial"))
    (newest.with_name("partial") / "rank_1.pt").unlink()

    assert f"resuming from {newest}" in finish(project, run_dir, "--resume")
    assert steps_of(run_dir) == steps_of(uninterrupted)
    assert summary_of(uninterrupted) | {"seconds": 0} == summary_of(run_dir) | {"seconds": 0}
    rollouts = [
        {path.name: path.read_text() for path in (folder / "rollouts").iterdir()}
        for folder in (run_dir, uninterrupted)
    ]
    assert rollouts[0] == rollouts[1] and len(rollouts[0]) == 12


def test_the_reference_is_the_model_after_the_warm_start(project: Path, tmp_path: Path) -> None:
    finish(project, tmp_path / "run", "--kl-loss-coef", "0.1", "--train-iters", "4")
    first, *_, last = (step["kl_loss"] for step in steps_of(tmp_path / "run"))
    assert first == pytest.approx(0.0, abs=1e-7) and last > 1e-7


@pytest.mark.full
def test_a_finished_run_teaches_another_model(project, uninterrupted, tmp_path):
    """Rewards and advantages are not read: what moves the student is the divergence alone, and that
    falls.
    """
    flags = f"{DISTILL} --teacher {uninterrupted} --entropy-coef 0 --train-iters 2"
    sizes = "--num-layers 1 --hidden-size 32 --lr 1e-2"
    finish(project, tmp_path / "run", *flags.split(), *sizes.split())
    first, second = steps_of(tmp_path / "run")
    assert first["pg_loss"] == first["loss"] > 1e-3
    assert second["teacher_divergence"] < first["teacher_divergence"]
    weight = torch.load(checkpoints(uninterrupted)[-1] / "rank_0.pt")["model"]
    assert weight["output_layer.weight"].shape[1] == 128, "the teacher is wider"


@pytest.mark.full
def test_a_run_with_other_settings_is_not_resumed(project: Path, uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    flags = ("--resume", "--loss-aggregation", "token_mean")
    codes, output = run_without_launcher(project, uninterrupted, *flags)
    assert codes[0] == 1
    assert "was made with loss_aggregation prompt_mean and this run has token_mean" in output
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


@pytest.mark.full
def test_a_run_is_extended(project: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """What was done stays; from there on the learning rate is that of a run of the new length."""
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir)
    output = finish(project, run_dir, "--resume", "--train-iters", "16")
    steps = steps_of(run_dir)
    assert steps[:12] == steps_of(uninterrupted) and len(steps) == 16
    rates = [5e-4 * (16 - step["step"] + 1) / 16 for step in steps[12:]]
    assert [step["learning_rate"] for step in steps[12:]] == pytest.approx(rates)
    assert summary_of(run_dir)["steps"] == 16
    assert len(re.findall(r"^    \w+\W* -> ", output, re.MULTILINE)) == 3 * 4, output
    codes, output = run_without_launcher(project, run_dir, "--resume", "--train-iters", "12")
    assert codes[0] == 1 and "train_iters 16 and this run has 12" in output


@pytest.mark.full
def test_a_damaged_checkpoint_of_one_rank_ends_both_with_a_line(project, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir)
    older, newest = checkpoints(run_dir)
    (newest / "rank_1.pt").write_bytes(b"")
    codes, output = run_without_launcher(project, run_dir, "--resume")
    # A rank that waits for rank 0 to speak may be ended by the launcher.
    assert 1 in codes and set(codes) <= {1, -15} and "Traceback" not in output
    assert f"{newest}/rank_1.pt cannot be read" in output
    assert f"move {newest} elsewhere; the one before is {older}" in output
    newest.rename(tmp_path / "elsewhere")
    assert f"resuming from {older}" in finish(project, run_dir, "--resume")
    assert steps_of(run_dir) == steps_of(uninterrupted)


@pytest.mark.full
def test_a_refused_run_says_why_in_one_line_and_writes_nothing(project, tmp_path):
    process = start(project, tmp_path / "run", "--loss-aggregation", "constant")
    output, _ = communicate(process)
    assert process.returncode != 0
    # A late rank may say the same line again. torch has a line of its own where CUDA is.
    (line,) = {line for line in output.splitlines() if "cpp_extension" not in line}
    assert re.match("error: .*--loss-aggregation-divisor", line), output
    assert not (tmp_path / "run").exists()
