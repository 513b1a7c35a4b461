"""The main job, shortened: what it writes, and that a stopped run goes on as if it had not been stopped."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from quickstart.arguments import parse_arguments
from quickstart.errors import RunError
from quickstart.identity import identity_of
from quickstart.refusals import refuse
from quickstart.run_directory import RunDirectory, die_with_launcher

from megatron_pg import PolicyLossConfig
from megatron_pg.config.versions import has_megatron_training
from tests.distributed.launch import fork_server, run_ranks
from tests.distributed.rollout_run import output_of, start_script, steps_of, wait
from tests.lanes import in_one_lane

ROOT = Path(__file__).parents[2]
SHORT = (
    "--warm-start-iters 4 --warm-start-batch-size 16 --num-training-tasks 256 --num-held-out-tasks 16 "
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 16 --train-iters 12 --save-interval 4 "
    # A model this little trained answers nothing rightly; the entropy term gives its steps a gradient.
    "--max-tokens-per-microbatch 128 --lr-warmup-iters 2 --entropy-coef 0.01"
)
TIMEOUT_SECONDS = 300


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose quickstart.sh is the real one, and whose environment is the one that runs the tests."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples/quickstart.sh", folder / "examples")
    (folder / "examples/train_grpo.py").symlink_to(ROOT / "examples/train_grpo.py")
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


def finish(process: subprocess.Popen[str]) -> str:
    """The output of a run that must succeed."""
    output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, output
    return output


def run_without_launcher(project: Path, run_dir: Path, *flags: str) -> tuple[list[int], str]:
    """Exit codes and output of the ranks that the launcher would start, forked from what has imported everything."""
    line, _ = start(project, run_dir, *flags, STARTED="echo").communicate()
    launcher, _, arguments = line.partition(" examples/train_grpo.py ")
    assert launcher.endswith("--nproc-per-node 2")
    codes = wait(start_script(arguments.split(), run_dir))
    return codes, output_of(run_dir).read_text()


@in_one_lane
def test_the_main_job_learns(project: Path, tmp_path: Path) -> None:
    """The documented job, ended after 24 of its 80 steps. Rewards of six steps: five seeds reach 0.74 to 0.82."""
    finish(start(project, tmp_path / "run", "--train-iters", "24", short=False))
    rewards = [step["reward"] for step in steps_of(tmp_path / "run")]
    assert rewards[0] < 0.5
    assert sum(rewards[-6:]) / 6 > 0.7


def interrupt(
    process: subprocess.Popen[str], run_dir: Path, at_step: int, send: Callable[[], None]
) -> None:
    """Waits for a step to be logged, interrupts, and waits for the end."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < at_step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the step was not reached in time"
        time.sleep(0.01)
    send()
    process.communicate(timeout=TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def uninterrupted(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    finish(start(project, run_dir))
    return run_dir


def test_a_run_leaves_everything_that_the_docs_promise(uninterrupted: Path) -> None:
    steps = steps_of(uninterrupted)
    assert [step["step"] for step in steps] == list(range(1, 13))
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/metrics.md").read_text()))
    assert set(steps[0]) <= documented
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["loss_aggregation"] == "prompt_mean"
    assert summary["world_size"] == summary["context_parallel_size"] == 2
    assert summary["reward_first"] == steps[0]["reward"]
    assert summary["reward_last"] == steps[-1]["reward"]
    assert re.fullmatch(r"0\.\d+\.\d+", summary["megatron_core"])
    assert 0 < summary["seconds"] < TIMEOUT_SECONDS
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


@in_one_lane  # kill_runs.py does as much in both, without the launcher
def test_a_resumed_run_equals_an_uninterrupted_one(
    project: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """SIGTERM to the launcher, then kill -9 of one worker's launcher: twice stopped, twice resumed."""
    run_dir = tmp_path / "run"
    process = start(project, run_dir)
    interrupt(process, run_dir, at_step=2, send=process.terminate)
    assert process.returncode != 0
    stopped_at = len(steps_of(run_dir))
    checkpoint = max(path.name for path in (run_dir / "checkpoints").iterdir())
    assert checkpoint == f"step_000004_{stopped_at:06d}", "SIGTERM ends with a checkpoint"

    process = start(project, run_dir, "--resume")
    interrupt(process, run_dir, at_step=9, send=process.kill)
    assert process.returncode == -signal.SIGKILL
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 99, "rew')  # as if killed in the middle of a line
    newest = max((run_dir / "checkpoints").glob("step_*"))
    shutil.copytree(newest, newest.with_name("partial_step_000004_000099"))
    (newest.with_name("partial_step_000004_000099") / "model" / "metadata.json").unlink()

    codes, output = run_without_launcher(project, run_dir, "--resume")
    assert codes == [0, 0], output
    assert f"resuming from {newest}" in output
    assert steps_of(run_dir) == steps_of(uninterrupted)
    before, after = (
        json.loads((folder / "summary.json").read_text()) for folder in (uninterrupted, run_dir)
    )
    assert before | {"seconds": 0} == after | {"seconds": 0}


def test_a_run_with_other_settings_is_not_resumed(project: Path, uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    flags = ("--resume", "--loss-aggregation", "token_mean")
    codes, output = run_without_launcher(project, uninterrupted, *flags)
    assert codes == [1, 1]
    assert "was made with loss_aggregation 'prompt_mean' and this run has 'token_mean'" in output
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


def test_lengths_of_right_and_wrong_answers_are_means_over_all_ranks() -> None:
    for means in run_ranks(means_of_answers, 2):
        assert means == {
            "reward": 0.25,
            "response_length": (2 + 4 + 6 + 9) / 4,
            "response_length_right": 4,
            "response_length_wrong": (2 + 6 + 9) / 3,
            "all wrong": None,
        }


def means_of_answers() -> dict[str, Any]:
    """Two answers on each of two data-parallel ranks; then only the wrong ones."""
    from quickstart.generation import Response
    from quickstart.model import start_megatron
    from quickstart.rollouts import Rollout, rollout_means

    groups, device = start_megatron(parse_for_two_ranks(""))
    answers = [[(2, 0.0), (4, 1.0)], [(6, 0.0), (9, 0.0)]][groups.data_rank]
    rollouts = [
        Rollout(0, [1], Response([5] * length, [-1.0] * length), reward, None)
        for length, reward in answers
    ]
    means = rollout_means(rollouts, groups, device)
    wrong = rollout_means([each for each in rollouts if not each.reward], groups, device)
    return {**means, "all wrong": wrong["response_length_right"]}


REQUIRED = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --run-dir run "
)


def test_a_step_without_an_active_token_updates_nothing() -> None:
    for rank in run_ranks(step_without_active_token, 2):
        assert rank["metrics"] == {}
        assert rank["unchanged"]
        assert rank["scheduler_steps"] == 1, "the one of the step before"


def step_without_active_token() -> dict[str, Any]:
    """A step of real samples, then the same ones with every token masked."""
    from quickstart.model import build_policy, start_megatron
    from train_grpo import train_step

    from megatron_pg import Sample

    args = parse_for_two_ranks("--context-parallel-size 2")
    groups, device = start_megatron(args)
    policy = build_policy(args, groups, device, vocabulary_size=11)
    policy.start_optimizer(args, lr=1e-3, num_steps=10, warmup_steps=0, decay_style="linear")
    samples = [
        Sample(
            tokens=torch.arange(length) % 11,
            response_length=3,
            loss_mask=torch.ones(3),
            advantages=1.0,
            old_log_probs=torch.zeros(3),
            group_index=length,
        )
        for length in (5, 7, 8)
    ]
    config = PolicyLossConfig(loss_aggregation="prompt_mean")
    assert train_step(args, config, policy, samples)["grad_norm"] > 0.0
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    masked = [dataclasses.replace(sample, loss_mask=torch.zeros(3)) for sample in samples]
    metrics = train_step(args, config, policy, masked)
    return {
        "metrics": metrics,
        "unchanged": all(map(torch.equal, before, policy.model.parameters())),
        "scheduler_steps": policy.scheduler.num_steps,
    }


def parse_for_two_ranks(flags: str) -> argparse.Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setattr(sys, "argv", ["train_grpo.py", *(REQUIRED + SHORT + " " + flags).split()])
        return parse_arguments()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss-aggregation constant", "--loss-aggregation-divisor"),
        ("--context-parallel-size 3", "--context-parallel-size"),
        ("--context-parallel-size 2 --qkv-format bshd", "--qkv-format thd"),
        ("--global-batch-size 10", "--global-batch-size 10"),
        ("--global-batch-size 32 --n-samples-per-prompt 64", "--n-samples-per-prompt 64"),
        ("--train-iters 3 --global-batch-size 16", "--train-iters 3"),
        ("--train-iters 2", "--lr-warmup-iters 2 is not below --train-iters 2"),
        ("--rollout-batch-size 0", "--rollout-batch-size is 0"),
        ("--num-held-out-tasks 0", "--num-held-out-tasks is 0"),
        ("--warm-start-stutter 0.6", "--warm-start-corruption 0.5 and --warm-start-stutter 0.6"),
        ("--num-training-tasks 4", "more than --num-training-tasks 4"),
        ("--hidden-dropout 0.1", "--hidden-dropout"),
        ("--keep-last-checkpoints 0", "--keep-last-checkpoints is 0"),
        ("--save-interval 0", "--save-interval is 0: give 1 or more"),
        ("--save-interval -3 --dry-run", "--save-interval is -3"),
        ("--context-parallel-size 0 --dry-run", "--context-parallel-size is 0"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size is 0"),
        ("--pipeline-model-parallel-size -1", "--pipeline-model-parallel-size is -1"),
        ("--expert-model-parallel-size 0", "--expert-model-parallel-size is 0"),
        ("--expert-tensor-parallel-size 0", "--expert-tensor-parallel-size is 0"),
        ("--lr nan --dry-run", "--lr is nan: give a finite number"),
        ("--clip-grad inf", "--clip-grad is inf"),
        ("--moe-aux-loss-coeff nan", "--moe-aux-loss-coeff is"),
        ("--eps-clip nan", "--eps-clip is nan"),
        ("--warm-start-lr nan", "--warm-start-lr is nan"),
        ("--docs-per-step 4", "--docs-per-step is about --rollout-files"),
        ("--rollout-files a.jsonl", "--rollout-files needs --docs-per-step"),
        ("--rollout-files a.jsonl --docs-per-step 4", "--rollout-files needs --vocab-size"),
    ],
)
def test_bad_flags_are_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        parse_for_two_ranks(flags)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--max-response-len 2", "max_response_len"),
        ("--norm-epsilon 0.5", "layernorm_epsilon"),
        ("--max-position-embeddings 64", "max_position_embeddings"),
        ("--rotary-percent 0.5", "rotary_percent"),
        ("--moe-ffn-hidden-size 8", "moe_ffn_hidden_size"),
    ],
)
def test_what_decides_the_results_is_the_same_in_a_resumed_run(flags: str, name: str) -> None:
    config = PolicyLossConfig()
    first, second = (identity_of(parse_for_two_ranks(each), config) for each in ("", flags))
    assert {each for each in first if first[each] != second[each]} == {name}


@pytest.mark.skipif(not has_megatron_training(), reason="flags of Megatron's own parser")
@pytest.mark.parametrize(
    "flags", ["--optimizer sgd", "--load pretrained", "--save there", "--lr-decay-iters 9"]
)
def test_what_would_be_passed_over_is_refused(flags: str) -> None:
    with pytest.raises(NotImplementedError, match=flags.split()[0]):
        parse_for_two_ranks(flags)


def test_the_script_explains_its_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "examples/train_grpo.py")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--loss-aggregation" in shown and "--context-parallel-size" in shown


def write_in_a_forked_process(folder: Path, pipe: Connection) -> None:
    die_with_launcher()
    directory = RunDirectory(folder, resume=False)
    if os.fork() == 0:
        pipe.send("writing")
    time.sleep(60)
    del directory


def test_a_killed_run_leaves_no_process_that_holds_its_folder(tmp_path: Path) -> None:
    """Symptom: "another run is writing", from a run resumed right after kill -9 in the middle of a checkpoint."""
    folder = tmp_path / "run"
    ours, theirs = fork_server().Pipe(duplex=False)
    run = fork_server().Process(target=write_in_a_forked_process, args=(folder, theirs))
    run.start()
    assert ours.poll(TIMEOUT_SECONDS) and ours.recv() == "writing"
    run.kill()
    RunDirectory(folder, resume=True)


def test_a_folder_is_claimed_by_one_run_and_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quickstart.run_directory.LOCK_PATIENCE", 0.2)
    folder = tmp_path / "run"
    first = RunDirectory(folder, resume=False)
    with pytest.raises(RunError, match="another run is writing"):
        RunDirectory(folder, resume=True)
    (folder / "warm_start.jsonl").write_text("earlier")
    del first
    second = RunDirectory(folder, resume=True)
    assert (folder / "warm_start.jsonl").read_text() == "earlier"
    del second
    third = RunDirectory(folder, resume=False)
    assert [child.name for child in folder.iterdir()] == ["lock"]
    assert (tmp_path / "run.1" / "warm_start.jsonl").read_text() == "earlier"
    del third
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds no run"):
        RunDirectory(tmp_path, resume=False)


def test_no_number_flag_takes_nan() -> None:
    """Whatever flags a parser has: each that is a number is tried."""
    given = vars(parse_for_two_ranks(""))
    numbers = {name for name, value in given.items() if type(value) is float}
    assert {"lr", "clip_grad", "eps_clip", "tis_clip", "warm_start_corruption"} <= numbers
    for name in numbers:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is nan"):
            refuse(argparse.Namespace(**given | {name: float("nan")}))


def test_a_symbolic_link_to_a_run_stays_one(tmp_path: Path) -> None:
    """As to a larger disk, where the earlier run stays too; the link may come before the folder."""
    disk, link = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    link.symlink_to(disk / "run")
    directory = RunDirectory(link, resume=False)
    (link / "warm_start.jsonl").write_text("earlier")
    del directory
    RunDirectory(link, resume=False)
    assert link.readlink() == disk / "run" and not (disk / "run").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "run"}
    assert (disk / "run.1" / "warm_start.jsonl").read_text() == "earlier"
    assert [child.name for child in link.iterdir()] == ["lock"]


def test_a_refused_run_says_why_in_one_line_and_writes_nothing(
    project: Path, tmp_path: Path
) -> None:
    process = start(project, tmp_path / "run", "--loss-aggregation", "constant")
    output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode != 0
    assert len(re.findall("^error: .*--loss-aggregation-divisor", output, re.MULTILINE)) == 1
    assert "parse_arguments" not in output, "no traceback of ours"
    assert not (tmp_path / "run").exists()
