"""Kills the training script at random moments, resumes it, and compares its metrics with an uninterrupted run's.

    python -m tests.distributed.kill_runs --moments 10 --seed 0

The ranks are forked from a process that has imported everything, so that a start costs about a second; what a
launcher does when a rank dies (end the others) is done here.
"""

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from .rollout_run import FLAGS, ROOT, output_of, steps_of, write_rollouts

KINDS = ("kill one rank", "kill all ranks", "SIGTERM", "full disk")
WORLD_SIZE = 2
NUM_STEPS = 30
STEPS = f"--train-iters {NUM_STEPS} --save-interval 3"
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Moment:
    """When and how a run is interrupted.

    Attributes:
        kind: one of KINDS.
        step: it comes after this step is logged, or at the first checkpoint from this step on where the disk is full.
        delay: seconds after that; a fraction of the bytes of the checkpoint where the disk is full.
        rank: the rank that is killed, or whose disk is full.
    """

    kind: str
    step: int
    delay: float
    rank: int


def random_moments(number: int, seed: int) -> list[Moment]:
    """`number` moments, later and later in the run, every kind among any four that follow each other."""
    generator = random.Random(seed)
    kinds = generator.sample(KINDS, len(KINDS))
    latest = NUM_STEPS - 4
    return [
        Moment(
            kinds[index % len(kinds)],
            generator.randint(index * latest // number, (index + 1) * latest // number),
            generator.random() * 0.3,
            generator.randrange(WORLD_SIZE),
        )
        for index in range(number)
    ]


def run(rollouts: Path, run_dir: Path, moment: Moment | None, *flags: str) -> list[int]:
    """Runs the script, interrupts it at the moment, and waits for its end: the exit codes of the ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload_script"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [*FLAGS.split(), *STEPS.split(), "--rollout-files", str(rollouts)]
    arguments += ["--run-dir", str(run_dir), *flags]
    ranks: list[BaseProcess] = [
        context.Process(target=_run_rank, args=(rank, port, arguments, output_of(run_dir), moment))
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    try:
        if moment is not None and moment.kind != "full disk":
            _interrupt(ranks, run_dir, moment)
        _wait(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return [rank.exitcode or 0 for rank in ranks]


def _run_rank(
    rank: int, port: int, arguments: list[str], output: Path, moment: Moment | None
) -> None:
    """The life of one rank: the training script, its output in a file."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["train_grpo.py", *arguments]
    sys.path.insert(0, str(ROOT / "examples"))
    if moment is not None and moment.kind == "full disk" and moment.rank == rank:
        _fill_disk(moment)
    import train_grpo

    train_grpo.main()


def _fill_disk(moment: Moment) -> None:
    """From the moment on this rank's checkpoints end in the middle, as on a disk that is full."""
    from quickstart import checkpoint

    write: Any = checkpoint._write

    def write_a_part(state: dict[str, Any], path: Path) -> None:
        write(state, path)
        if int(path.parent.name.rsplit("_", 1)[1]) < moment.step:
            return
        size = path.stat().st_size
        os.truncate(path, int(size * moment.delay))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    checkpoint._write = write_a_part


def _interrupt(ranks: list[BaseProcess], run_dir: Path, moment: Moment) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < moment.step:
        if time.monotonic() > deadline or not all(rank.is_alive() for rank in ranks):
            _fail(run_dir, f"step {moment.step} was not reached")
        time.sleep(0.005)
    time.sleep(moment.delay)
    number = signal.SIGTERM if moment.kind == "SIGTERM" else signal.SIGKILL
    for rank in [ranks[moment.rank]] if moment.kind == "kill one rank" else ranks:
        if rank.pid is not None and rank.is_alive():
            os.kill(rank.pid, number)


def _wait(ranks: list[BaseProcess]) -> None:
    """Waits for all; once one has failed the others get what a launcher gives them: SIGTERM, and no long wait."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.terminate()
            time.sleep(1.0)
            return
        time.sleep(0.01)


def _fail(run_dir: Path, message: str) -> NoReturn:
    raise RuntimeError(f"{message}; the run said:\n{output_of(run_dir).read_text()}")


def interrupted_run(rollouts: Path, run_dir: Path, moments: list[Moment]) -> None:
    """A run that every moment interrupts, resumed each time and at last left alone."""
    for moment in moments:
        codes = run(rollouts, run_dir, moment, "--resume")
        done = len(steps_of(run_dir))
        print(f"{moment.kind} at step {moment.step} + {moment.delay:.3f}: {done} steps, {codes}")
        if not any(codes):
            _fail(run_dir, f"{moment} did not interrupt the run")
    if any(run(rollouts, run_dir, None, "--resume")):
        _fail(run_dir, "the resumed run failed")


def compare(folder: Path, moments: list[Moment]) -> None:
    """Raises unless the interrupted run's metrics are bit for bit those of an uninterrupted one."""
    rollouts = write_rollouts(folder / "rollouts.jsonl", 5 * NUM_STEPS)
    if any(run(rollouts, folder / "uninterrupted", None)):
        _fail(folder / "uninterrupted", "the uninterrupted run failed")
    interrupted_run(rollouts, folder / "interrupted", moments)
    expected, found = steps_of(folder / "uninterrupted"), steps_of(folder / "interrupted")
    if len(expected) != NUM_STEPS or found != expected:
        _fail(folder / "interrupted", f"metrics differ: {found} and uninterrupted {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), random_moments(args.moments, args.seed))
    print(f"{args.moments} moments: metrics equal, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
