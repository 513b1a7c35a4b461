"""Short runs of the quickstart and what they leave."""

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import train_grpo

from tests.progress import wait_until

from .launch import fork_server, free_port

Ranks = list[BaseProcess]
Prepare = Callable[[int], None] | None
"""Called with the rank, in its process, before the program."""
SHORT = (
    "--warm-start-iters 4 --warm-start-batch-size 16 --num-training-tasks 256 --num-held-out-tasks "
    "16 "
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 16 --train-iters 12 "
    "--save-interval 4 "
    # A model this little trained answers nothing rightly; the entropy term gives its steps a
    # gradient.
    "--max-tokens-per-microbatch 128 --entropy-coef 0.01 "
)
TINY = SHORT + (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --lr 1e-2 --num-held-out-tasks 8 "
    "--context-parallel-size 2 --loss-aggregation prompt_mean "
)


def start(run_dir: Path, flags: str, world_size: int = 2, prepare: Prepare = None) -> Ranks:
    """The ranks of a short run of the quickstart, as `start_script` starts them; of its flags a
    later one wins.
    """
    arguments = [*TINY.split(), "--run-dir", str(run_dir), *flags.split()]
    return start_script(arguments, run_dir, world_size, prepare)


def start_script(
    arguments: list[str],
    run_dir: Path,
    world_size: int = 2,
    prepare: Prepare = None,
    program: str = "train_grpo",
) -> Ranks:
    """The ranks of the `main` of a module, forked from a process that has imported everything.

    What they print goes to a file beside the run's folder.
    """
    context = fork_server()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(world_size), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ranks: Ranks = []
    for rank in range(world_size):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        task = (own, arguments, output_of(run_dir), prepare, program)
        ranks.append(context.Process(target=_run_rank, args=task))
        ranks[-1].start()
    return ranks


def _run_rank(
    environment: dict[str, str], arguments: list[str], output: Path, prepare: Prepare, program: str
) -> None:
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    sys.argv = [program, *arguments]
    if prepare is not None:
        prepare(int(environment["RANK"]))
    importlib.import_module(program).main()


def have_ended(ranks: Ranks) -> bool:
    return not any(rank.is_alive() for rank in ranks)


def wait_until_ended(ranks: Ranks) -> None:
    """Return once no rank lives; nobody ends the others of one that fails."""
    try:
        wait_until(lambda: have_ended(ranks), pids_of(ranks))
    finally:
        kill(ranks)


def wait(ranks: Ranks) -> list[int]:
    """Return the exit codes. Once a rank fails the others get what a launcher gives: SIGTERM, and
    an end if they hang.
    """

    def has_one_failed() -> bool:
        return any(rank.exitcode for rank in ranks)

    try:
        wait_until(lambda: has_one_failed() or have_ended(ranks), pids_of(ranks))
        if has_one_failed():
            for rank in ranks:
                rank.terminate()
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: have_ended(ranks), pids_of(ranks), patience=1.0)
    finally:
        kill(ranks)
    return [rank.exitcode or 0 for rank in ranks]


def wait_for_steps(ranks: Ranks, run_dir: Path, number: int) -> None:
    """Return once that many steps are logged; a RuntimeError, with what the run said, if a rank
    ends before.
    """
    metrics = run_dir / "metrics.jsonl"

    def are_logged() -> bool:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= number:
            return True
        if all(rank.is_alive() for rank in ranks):
            return False
        said = output_of(run_dir).read_text()
        raise RuntimeError(f"step {number} was not reached; the run said:\n{said}")

    wait_until(are_logged, pids_of(ranks))


def hold(run_dir: Path, steps: int, sent: Path) -> None:
    """Let a rank wait, once that many steps are logged, until the file `sent` says that a signal
    was sent.
    """
    metrics = run_dir / "metrics.jsonl"
    while metrics.exists() and metrics.read_bytes().count(b"\n") >= steps and not sent.exists():
        time.sleep(0.1)


def kill(ranks: Ranks) -> None:
    for rank in ranks:
        rank.kill()
        rank.join()


def pids_of(ranks: Ranks) -> list[int | None]:
    return [rank.pid for rank in ranks]


def run(run_dir: Path, flags: str, prepare: Prepare = None) -> str:
    return succeed(start(run_dir, flags, prepare=prepare), run_dir)


def succeed(ranks: Ranks, run_dir: Path) -> str:
    """The output of a run that must succeed."""
    codes = wait(ranks)
    output = output_of(run_dir).read_text()
    assert not any(codes), f"{codes}\n{output}"
    return output


def output_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl without their times."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: None if "seconds" in name else step[name] for name in step} for step in steps]


def parse_for_two_ranks(flags: str) -> argparse.Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        small = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --run-dir run"
        patch.setattr(sys, "argv", ["train_grpo.py", *f"{small} {SHORT} {flags}".split()])
        return train_grpo.parse_arguments()
