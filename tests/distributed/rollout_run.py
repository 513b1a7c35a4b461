"""Short runs of the training script, from a small rollout file or online, and what they leave."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from .launch import fork_server

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300.0
VOCABULARY = 32
MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type learned_absolute --attention-dropout 0 --hidden-dropout 0 --seed 1 --lr 1e-2 "
)
FLAGS = MODEL + (
    f"--vocab-size {VOCABULARY} --max-tokens-per-microbatch 64 --loss-aggregation prompt_mean "
    "--docs-per-step 10 --docs-per-step-mode exact --on-bad-row skip "
)
ONLINE = MODEL + (
    "--warm-start-iters 4 --warm-start-batch-size 16 --num-training-tasks 256 --num-held-out-tasks 8 "
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 16 --context-parallel-size 2 "
    # A model this little trained answers nothing rightly; the entropy term gives its steps a gradient.
    "--max-tokens-per-microbatch 128 --loss-aggregation prompt_mean --entropy-coef 0.01 "
)

WHOLE_GROUPS = "--keep-prompt-groups "


def write_rollouts(path: Path, num_groups: int) -> Path:
    """Prompt groups of two to four answers of different lengths, one row in twenty bad, a reward each."""
    generator = random.Random(1)
    with path.open("w") as file:
        for group in range(num_groups):
            prompt = [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 4))]
            for _ in range(generator.randint(2, 4)):
                file.write(json.dumps(_row(generator, group, prompt)) + "\n")
    return path


def _row(generator: random.Random, group: int, prompt: list[int]) -> dict[str, Any]:
    length = generator.randint(1, 12)
    highest = 2 * VOCABULARY if generator.random() < 0.05 else VOCABULARY
    return {
        "prompt_ids": prompt,
        "response_ids": [generator.randrange(highest) for _ in range(length)],
        "log_probs": [-3.5 + 0.1 * generator.random() for _ in range(length)],
        "reward": float(generator.randint(0, 2)),
        "group_index": group,
    }


def start(
    rollouts: Path | None,
    run_dir: Path,
    flags: str,
    world_size: int = 2,
    prepare: Callable[[int], None] | None = None,
) -> list[BaseProcess]:
    """The ranks of a run, as `start_script` starts them.

    Args:
        rollouts: None runs online.
        flags: after FLAGS or ONLINE, so that a later one wins.
    """
    source = ONLINE if rollouts is None else f"{FLAGS} --rollout-files {rollouts}"
    arguments = [*source.split(), "--run-dir", str(run_dir), *flags.split()]
    return start_script(arguments, run_dir, world_size, prepare)


def start_script(
    arguments: list[str],
    run_dir: Path,
    world_size: int = 2,
    prepare: Callable[[int], None] | None = None,
) -> list[BaseProcess]:
    """The training script's ranks; what they print goes to a file beside the run's folder.

    They are forked from a process that has imported everything, so that a start costs about a second.

    Args:
        arguments: of the script.
        prepare: called with the rank, in its process, before the script.
    """
    context = fork_server()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    ranks: list[BaseProcess] = []
    for rank in range(world_size):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        task = (own, arguments, output_of(run_dir), prepare)
        ranks.append(context.Process(target=_run_rank, args=task))
        ranks[-1].start()
    return ranks


def _run_rank(
    environment: dict[str, str],
    arguments: list[str],
    output: Path,
    prepare: Callable[[int], None] | None,
) -> None:
    """The life of one rank."""
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    sys.argv = ["train_grpo.py", *arguments]
    if prepare is not None:
        prepare(int(environment["RANK"]))
    import train_grpo

    train_grpo.main()


def wait(ranks: list[BaseProcess]) -> list[int]:
    """The exit codes. Once a rank fails the others get what a launcher gives them: SIGTERM, and no long wait."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.terminate()
            time.sleep(1.0)
            break
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode or 0 for rank in ranks]


def wait_for_steps(ranks: list[BaseProcess], run_dir: Path, number: int) -> None:
    """Returns once that many steps are logged.

    Raises:
        RuntimeError: with what the run said, where a rank ended before, or none of it came in time.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < number:
        if time.monotonic() > deadline or not all(rank.is_alive() for rank in ranks):
            said = output_of(run_dir).read_text()
            raise RuntimeError(f"step {number} was not reached; the run said:\n{said}")
        time.sleep(0.005)


def run(
    rollouts: Path | None,
    run_dir: Path,
    flags: str,
    world_size: int = 2,
    prepare: Callable[[int], None] | None = None,
) -> str:
    """The output of a run that must succeed."""
    codes = wait(start(rollouts, run_dir, flags, world_size, prepare))
    output = output_of(run_dir).read_text()
    assert not any(codes), f"{codes}\n{output}"
    return output


def copy_after_step(step: int, run_dir: Path, copy: Path) -> Path:
    """A run that has taken `step` of another run's steps, and left a checkpoint after it."""
    (copy / "checkpoints").mkdir(parents=True)
    name = f"checkpoints/step_000000_{step:06d}"
    (copy / name).symlink_to(run_dir / name)
    for log in ("metrics.jsonl", "warm_start.jsonl"):
        (copy / log).write_bytes((run_dir / log).read_bytes())
    return copy


def output_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": None} for line in lines]
