"""The main job, shortened: what it writes, and that a stopped run goes on as if it had not been stopped."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_grpo
from filelock import FileLock
from run_log import CURVES, Log, checkpoints, claim_folder, read_checkpoint, report

from megatron_pg import PolicyLossConfig, Sample
from tests.distributed.launch import run_ranks
from tests.distributed.quickstart_run import (
    output_of,
    start_script,
    steps_of,
    wait,
    wait_until_ended,
)
from tests.distributed.quickstart_run import start as start_short
from tests.lanes import in_one_lane
from tests.progress import communicate, wait_until

ROOT = Path(__file__).parents[2]
SHORT = (
    "--warm-start-iters 4 --warm-start-batch-size 16 --num-training-tasks 256 --num-held-out-tasks 16 "
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 16 --train-iters 12 --save-interval 4 "
    # A model this little trained answers nothing rightly; the entropy term gives its steps a gradient.
    "--max-tokens-per-microbatch 128 --entropy-coef 0.01"
)


DISTILL = "--policy-loss distill --distill-teacher hidden"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose quickstart.sh is the real one, and whose environment is the one that runs the tests."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples/quickstart.sh", folder / "examples")
    (folder / "examples/launch").mkdir()
    scripts = "train_grpo critic tasks sampler run_folder run_log teacher launch/torchrun"
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
    """Exit codes and output of the ranks that the launcher would start, forked from what has imported everything."""
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


@in_one_lane
def test_the_main_job_learns(project: Path, tmp_path: Path) -> None:
    """The documented job, ended after 24 of its 80 steps. Rewards of six steps: five seeds reach 0.74 to 0.82."""
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
    known = {
        "steps": 12,
        "loss_aggregation": "prompt_mean",
        "world_size": 2,
        "context_parallel_size": 2,
    }
    known |= {"reward_first": steps[0]["reward"], "reward_last": steps[-1]["reward"]}
    assert known.items() <= summary.items()
    assert re.fullmatch(r"0\.\d+\.\d+", summary["megatron_core"])
    assert summary["seconds"] > 0
    assert 0 <= summary["held_out_before"] <= 1 and 0 <= summary["held_out_after"] <= 1
    assert (uninterrupted / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((uninterrupted / "tensorboard").glob("events.*"))
    kept = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert kept == ["step_000004_000008", "step_000004_000012"]


def test_every_sample_counts_once_and_the_first_step_is_on_policy(uninterrupted: Path) -> None:
    steps = steps_of(uninterrupted)
    for step in steps:
        assert step["aggregation_checksum"] == pytest.approx(1.0, abs=1e-6)
        assert step["grad_norm"] > 0.0
    # Odd steps train on answers of the policy as it is: sampling without context parallelism and training with it
    # must agree on the log-probs. Even steps train on the other half of the round, one update later.
    for step in steps[::2]:
        assert step["ratio_new_old"] == pytest.approx(1.0, abs=1e-4)
        assert step["clipped_ratio_fraction"] == 0.0
        assert step["kl_new_old"] < 1e-8
    assert max(step["kl_new_old"] for step in steps[1::2]) > 1e-7


@in_one_lane
def test_a_resumed_run_equals_an_uninterrupted_one(project, uninterrupted, tmp_path):
    """SIGTERM to the launcher, then kill -9 of one worker's launcher: twice stopped, twice resumed."""
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


def test_the_reference_is_the_model_after_the_warm_start(project: Path, tmp_path: Path) -> None:
    finish(project, tmp_path / "run", "--kl-loss-coef", "0.1", "--train-iters", "4")
    first, *_, last = (step["kl_loss"] for step in steps_of(tmp_path / "run"))
    assert first == pytest.approx(0.0, abs=1e-7) and last > 1e-7


@in_one_lane
def test_a_finished_run_teaches_another_model(project, uninterrupted, tmp_path):
    """Rewards and advantages are not read: what moves the student is the divergence alone, and that falls."""
    flags = f"{DISTILL} --teacher {uninterrupted} --entropy-coef 0 --train-iters 2"
    sizes = "--num-layers 1 --hidden-size 32 --lr 1e-2"
    finish(project, tmp_path / "run", *flags.split(), *sizes.split())
    first, second = steps_of(tmp_path / "run")
    assert first["pg_loss"] == first["loss"] > 1e-3
    assert second["teacher_divergence"] < first["teacher_divergence"]
    weight = torch.load(checkpoints(uninterrupted)[-1] / "rank_0.pt")["model"]
    assert weight["output_layer.weight"].shape[1] == 128, "the teacher is wider"


def test_a_run_with_other_settings_is_not_resumed(project: Path, uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    flags = ("--resume", "--loss-aggregation", "token_mean")
    codes, output = run_without_launcher(project, uninterrupted, *flags)
    assert codes[0] == 1
    assert "was made with loss_aggregation prompt_mean and this run has token_mean" in output
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


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


@in_one_lane
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


def test_lengths_of_right_and_wrong_answers_are_means_over_all_ranks() -> None:
    for means, all_wrong in run_ranks(means_of_answers, 2):
        assert means == {
            "reward": 0.25,
            "response_length": (2 + 4 + 6 + 9) / 4,
            "response_length_right": 4,
            "response_length_wrong": (2 + 6 + 9) / 3,
        }
        assert all_wrong["response_length_right"] is None


def new_run(flags: str) -> train_grpo.Run:
    args = parse_for_two_ranks(flags)
    train_grpo.start_megatron(args)
    return train_grpo.Run(args)


def samples_of_lengths(*lengths: int, **fields: Any) -> list[Sample]:
    """Responses of three tokens each, all from one old policy."""
    given = {"loss_mask": torch.ones(3), "advantages": 1.0, "old_log_probs": torch.full((3,), -2.4)}
    return [
        Sample(tokens=torch.arange(n) % 11, response_length=3, group_index=n, **(given | fields))
        for n in lengths
    ]


def means_of_answers() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two answers on each of two data-parallel ranks; then only the wrong ones."""
    worker = new_run("").worker
    lengths, rewards = [((2, 4), (0.0, 1.0)), ((6, 9), (0.0, 0.0))][worker.groups.data_rank]
    answers = [Sample([1] * (n + 1), response_length=n, loss_mask=[1] * n) for n in lengths]
    wrong = [answer for answer, reward in zip(answers, rewards, strict=True) if not reward]
    return worker.means(answers, rewards), worker.means(wrong, [0.0] * len(wrong))


ONE_RIGHT = {  # advantages of the rewards 1, 0, 0, 0
    "grpo": [1.5, -0.5, -0.5, -0.5],
    "dr_grpo": [0.75, -0.25, -0.25, -0.25],
    "rloo": [1.0, -1 / 3, -1 / 3, -1 / 3],
}


def test_advantages_are_those_that_the_flag_names() -> None:
    for found in run_ranks(advantages_by_flag, 2, list(ONE_RIGHT)):
        for method, advantages in found.items():
            assert advantages == pytest.approx(ONE_RIGHT[method], rel=1e-5), method


def advantages_by_flag(methods: list[str]) -> dict[str, list[float]]:
    worker, found = new_run("").worker, {}
    rewards = itertools.cycle([1.0, 0.0, 0.0, 0.0])
    worker.tasks.reward = lambda entry, answer: next(rewards)
    for method in methods:
        worker.args = parse_for_two_ranks(f"--advantage {method}")
        samples, _ = worker.collect(worker.tasks.held_out[:2], 4)
        found[method] = [float(sample.advantages[0]) for sample in samples]
    return found


def test_a_step_without_an_active_token_updates_nothing() -> None:
    for before, metrics, unchanged in run_ranks(step_without_active_token, 2):
        assert before["grad_norm"] > 0.0
        assert metrics == {}
        assert unchanged


def step_without_active_token() -> tuple[dict[str, float], dict[str, float], bool]:
    run = new_run("--context-parallel-size 2")
    config = PolicyLossConfig(loss_aggregation="prompt_mean")
    first = run.train_step(config, samples_of_lengths(5, 7, 8), lr=1e-3)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    masked = samples_of_lengths(5, 7, 8, loss_mask=torch.zeros(3))
    metrics = run.train_step(config, masked, lr=1e-3)
    return first, metrics, all(map(torch.equal, before, run.model.parameters()))


def parse_for_two_ranks(flags: str) -> argparse.Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        small = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --run-dir run"
        patch.setattr(sys, "argv", ["train_grpo.py", *f"{small} {SHORT} {flags}".split()])
        return train_grpo.parse_arguments()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss-aggregation constant", "--loss-aggregation-divisor"),
        ("--context-parallel-size 3", "--context-parallel-size"),
        ("--context-parallel-size 2 --qkv-format bshd", "--qkv-format thd"),
        ("--global-batch-size 10", "--global-batch-size 10"),
        ("--global-batch-size 32 --n-samples-per-prompt 64", "--global-batch-size 32"),
        ("--train-iters 3 --global-batch-size 16", "--train-iters 3"),
        ("--save-interval 0", "--save-interval is 0"),
        ("--rollout-batch-size -1", "--rollout-batch-size is -1"),
        ("--context-parallel-size 0", "--context-parallel-size is 0"),
        ("--warm-start-stutter 0.6", "--warm-start-corruption 0.5 and --warm-start-stutter 0.6"),
        ("--lr nan", "--lr is nan"),
        ("--warm-start-lr inf", "--warm-start-lr is inf"),
        ("--eps-clip nan", "--eps-clip"),
        ("--num-training-tasks 4", "--rollout-batch-size 8"),
        ("--advantage gae --value-clip 0 --lam 2", "--value-clip must be a finite number > 0"),
        ("--whiten-advantages --gamma 0.9", "--gamma and --whiten-advantages: about the critic"),
        ("--critic-lr nan", "--critic-lr is nan"),
        ("--critic-lr 1e-4", "--critic-lr: about the critic of --advantage gae"),
        ("--teacher runs", "--teacher runs and --distill-teacher None"),
        (f"--teacher runs {DISTILL}", "--teacher runs is not the folder of a finished run"),
    ],
)
def test_bad_flags_are_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        parse_for_two_ranks(flags)


def test_gpus_that_are_not_there_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    message = "a GPU for each of the 2 processes here and torch sees 1: give --device cpu"
    with pytest.raises(ValueError, match=message):
        parse_for_two_ranks("--device cuda")


def test_a_student_in_its_teachers_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    flags = f"--teacher {tmp_path} --run-dir {tmp_path} {DISTILL}"
    with pytest.raises(ValueError, match="give another --run-dir"):
        parse_for_two_ranks(flags)


def test_a_resumed_run_that_finds_none_says_so(tmp_path, capsys):
    claim(tmp_path / "run", "--resume").release()
    assert "no run in" in capsys.readouterr().out
    claim(tmp_path / "run", "--resume").release()
    assert capsys.readouterr().out == ""


def test_the_script_explains_its_flags(monkeypatch, capsys):
    script = str(ROOT / "examples/train_grpo.py")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    # torch's @record makes a return of an exit with status 0.
    runpy.run_path(script, run_name="__main__")
    shown = capsys.readouterr().out
    assert "--loss-aggregation" in shown and "--context-parallel-size" in shown


def claim(folder: Path, *flags: str) -> FileLock:
    return claim_folder(parse_for_two_ranks(" ".join((*flags, f"--run-dir {folder}"))), 2)


def test_a_folder_is_claimed_by_one_run_and_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr("run_folder.LOCK_PATIENCE", 0.2)
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "run"
    folder.symlink_to(tmp_path / "elsewhere")
    first = claim(folder)
    with pytest.raises(ValueError, match="another run is writing"):
        claim(folder, "--resume")
    (folder / "metrics.jsonl").write_text("earlier")
    first.release()
    second = claim(folder, "--resume", "--save-interval 7")
    assert (folder / "metrics.jsonl").read_text() == "earlier"
    second.release()
    third = claim(folder)
    assert [child.name for child in folder.iterdir()] == ["settings.json"] and folder.is_symlink()
    assert (tmp_path / "elsewhere.1" / "metrics.jsonl").read_text() == "earlier"
    third.release()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no run"):
        claim(tmp_path)
    with pytest.raises(ValueError, match="--run-dir .*run cannot be written: .*notes.txt"):
        claim(tmp_path / "notes.txt" / "run")


@in_one_lane
def test_a_folder_that_is_refused_ends_both_ranks_without_a_traceback(tmp_path: Path) -> None:
    """Rank 0 alone looks at it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    flags = ["--context-parallel-size", "2", "--run-dir", str(tmp_path / "run")]
    ranks = start_script(flags, tmp_path / "run")
    wait_until_ended(ranks)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    said = output_of(tmp_path / "run").read_text()
    assert said.startswith("error: --run-dir") and "Traceback" not in said


def die_as_it_writes(path: Path, text: str) -> None:
    """In place of `Path.write_text`."""
    with path.open("w") as file:
        file.write(text[:5])
    raise KeyboardInterrupt


def test_a_log_that_is_cut_back_is_never_half_written(tmp_path, monkeypatch):
    """Killed as it writes, a resumed run leaves the steps that were there."""
    steps = "".join(f'{{"step": {number}}}\n' for number in range(1, 4))
    (tmp_path / "metrics.jsonl").write_text(steps)

    monkeypatch.setattr(Path, "write_text", die_as_it_writes)
    with pytest.raises(KeyboardInterrupt):
        Log(parse_for_two_ranks(f"--run-dir {tmp_path}"), {"warm_start": 0, "step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == steps


def test_only_what_the_run_wrote_is_a_checkpoint(tmp_path: Path) -> None:
    names = ["step_000004_999999", "step_000004_1000000", "step_000004_000008"]
    for name in (*names, "step_000004_1000000_keep", "step_best", "partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000009_000009").write_text("a plain file")
    found = [path.name for path in checkpoints(tmp_path)]
    assert found == ["step_000004_000008", "step_000004_999999", "step_000004_1000000"]


def checkpoint_of(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"step_000004_{step:06d}"
    folder.mkdir(parents=True)
    torch.save({"model": torch.arange(256.0), "progress": {"step": step}}, folder / "rank_0.pt")
    return folder


@pytest.mark.parametrize(
    "contents", [b"", b"no checkpoint", None], ids=["empty", "garbage", "gone"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before(tmp_path, contents):
    older, newest = checkpoint_of(tmp_path, 4), checkpoint_of(tmp_path, 8)
    path = newest / "rank_0.pt"
    path.unlink() if contents is None else path.write_bytes(contents)
    with pytest.raises(ValueError) as refused:
        read_checkpoint(newest, 0)
    assert f"{path} cannot be read" in str(refused.value)
    assert f"move {newest} elsewhere; the one before is {older}" in str(refused.value)
    assert read_checkpoint(older, 0)["progress"] == {"step": 4}
    (older / "rank_0.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="there is none before it"):
        read_checkpoint(older, 0)


def test_no_flipped_bit_of_a_checkpoint_goes_unseen(tmp_path: Path) -> None:
    """Every seventh byte: the state is as it was, or the file is refused. torch.load alone loads other weights."""
    folder = checkpoint_of(tmp_path, 4)
    path = folder / "rank_0.pt"
    contents, known = path.read_bytes(), torch.arange(256.0)
    changed_for_torch = 0
    for place in range(0, len(contents), 7):
        flipped = bytearray(contents)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with contextlib.suppress(Exception):
            changed_for_torch += not torch.equal(torch.load(path)["model"], known)
        try:
            state = read_checkpoint(folder, 0)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert torch.equal(state["model"], known) and state["progress"] == {"step": 4}
    assert changed_for_torch > 50, "the file has weights that a bit changes"


def test_damaged_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run does not damage them."""
    claim(tmp_path / "run").release()
    settings = tmp_path / "run/settings.json"
    whole = settings.read_text()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", die_as_it_writes)
        claim(tmp_path / "run", "--resume")
    assert settings.read_text() == whole
    for damaged in (whole[:100], "", "[1, 2]"):
        settings.write_text(damaged)
        with pytest.raises(ValueError, match=f"{re.escape(str(settings))} is damaged"):
            claim(tmp_path / "run", "--resume")
    settings.write_text(whole)
    claim(tmp_path / "run", "--resume").release()


@pytest.mark.parametrize("garbage", [b"\xff\x00garbage", b"3", b"{}", b'{"step": null}'])
def test_garbage_in_the_metrics_is_named(tmp_path: Path, garbage: bytes) -> None:
    """A last line without its end is a killed run's, and is removed."""
    metrics = tmp_path / "metrics.jsonl"
    args, whole = parse_for_two_ranks(f"--run-dir {tmp_path}"), b'{"step": 1}\n'
    metrics.write_bytes(whole + garbage + b"\n" + whole)
    with pytest.raises(ValueError, match=f"{re.escape(str(metrics))} line 2 is no line of a run"):
        Log(args, {"warm_start": 0, "step": 2})
    metrics.write_bytes(whole + garbage)
    Log(args, {"warm_start": 0, "step": 2})
    assert metrics.read_bytes() == whole


def metrics_become_a_folder(rank: int) -> None:
    """What a read-only folder is to anyone but root: nothing can be written there."""
    write = Log.write

    def write_until_step_2(log: Log, phase: str, *rest: Any) -> None:
        if phase == "step" and log._progress["step"] == 2:
            metrics = log._folder / "metrics.jsonl"
            metrics.unlink()
            metrics.mkdir()
        write(log, phase, *rest)

    Log.write = write_until_step_2


@in_one_lane
def test_a_folder_that_takes_no_more_ends_the_run_in_one_line(tmp_path: Path) -> None:
    flags = "--context-parallel-size 1 --train-iters 4"
    codes = wait(start_short(tmp_path / "run", flags, 1, metrics_become_a_folder))
    said = output_of(tmp_path / "run").read_text()
    assert codes == [1] and "Traceback" not in said
    assert f"error: {tmp_path / 'run'} cannot be written (rank 0): " in said


def test_a_number_that_is_rounded_to_0_has_no_sign(tmp_path: Path, capsys: Any) -> None:
    args = parse_for_two_ranks(f"--run-dir {tmp_path}")
    Log(args, {"warm_start": 0, "step": 1}).write("step", {"reward": 0.5, "loss": -1e-9})
    assert "step 1/12: reward 0.500 loss 0.000\n" in capsys.readouterr().out


@pytest.mark.parametrize("length", [0, 3, 80, 10_000])
def test_the_report_shows_every_curve_whole(length: int) -> None:
    """Whatever the rewards are; a long run has the mean over its last fiftieth too."""
    values = [-20.0 + 40.0 * (step % 7) for step in range(length)]
    curves = [dict.fromkeys(CURVES, value) | {"kl_new_old": None} for value in values]
    steps = [curve | {"step": number} for number, curve in enumerate(curves, 1)]
    panels = report(steps).axes
    titles = [panel.get_title() for panel in panels]
    assert [title.removesuffix(": not reported") for title in titles] == list(CURVES.values())
    assert f"{CURVES['kl_new_old']}: not reported" in titles
    drawn = [panel for panel in panels if not panel.get_title().endswith(": not reported")]
    assert len(drawn) == (len(CURVES) - 1 if length else 0)
    for panel in drawn:
        curve, *smooth = panel.get_lines()
        assert list(curve.get_xdata()) == [*range(1, length + 1)]
        assert list(curve.get_ydata()) == values
        low, high = panel.get_ylim()
        assert low < min(values) and max(values) < high
        assert (curve.get_marker() == "o") == (length == 3)
        assert all(tick == round(tick) for tick in panel.get_xticks())
        assert len(smooth) == (length == 10_000)
        for mean in smooth:
            assert mean.get_ydata()[-1] == pytest.approx(sum(values[-200:]) / 200)


@in_one_lane
def test_a_refused_run_says_why_in_one_line_and_writes_nothing(project, tmp_path):
    process = start(project, tmp_path / "run", "--loss-aggregation", "constant")
    output, _ = communicate(process)
    assert process.returncode != 0
    # A late rank may say the same line again. torch has a line of its own where CUDA is.
    (line,) = {line for line in output.splitlines() if "cpp_extension" not in line}
    assert re.match("error: .*--loss-aggregation-divisor", line), output
    assert not (tmp_path / "run").exists()
