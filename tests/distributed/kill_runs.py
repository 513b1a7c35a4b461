"""Kills the training script at random moments, resumes it, and compares its metrics with an uninterrupted run's.

    python -m tests.distributed.kill_runs --moments 10 --seed 0

What a launcher does when a rank dies (end the others) is done by `rollout_run.wait`.
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from .rollout_run import (
    TIMEOUT_SECONDS,
    WHOLE_GROUPS,
    output_of,
    run,
    start,
    steps_of,
    wait,
    write_rollouts,
)

KINDS = ("kill one rank", "kill all ranks", "SIGTERM", "full disk")
WORLD_SIZE = 2
NUM_STEPS = 30
STEPS = WHOLE_GROUPS + f"--train-iters {NUM_STEPS} --save-interval 3"


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


def interrupt(rollouts: Path, run_dir: Path, moment: Moment) -> list[int]:
    """Starts or resumes the run and interrupts it at the moment: the exit codes of the ranks."""
    if moment.kind == "full disk":
        fill = functools.partial(_fill_disk, moment)
        return wait(start(rollouts, run_dir, STEPS + " --resume", WORLD_SIZE, fill))
    ranks = start(rollouts, run_dir, STEPS + " --resume", WORLD_SIZE)
    try:
        _send_signal(ranks, run_dir, moment)
    finally:
        codes = wait(ranks)
    return codes


def _fill_disk(moment: Moment, rank: int) -> None:
    """From the moment on the checkpoints of its rank end in the middle, as on a disk that is full."""
    if rank != moment.rank:
        return
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


def _send_signal(ranks: list[BaseProcess], run_dir: Path, moment: Moment) -> None:
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


def _fail(run_dir: Path, message: str) -> NoReturn:
    raise RuntimeError(f"{message}; the run said:\n{output_of(run_dir).read_text()}")


def interrupted_run(rollouts: Path, run_dir: Path, moments: list[Moment]) -> None:
    """A run that every moment interrupts, resumed each time and at last left alone."""
    for moment in moments:
        codes = interrupt(rollouts, run_dir, moment)
        done = len(steps_of(run_dir))
        print(f"{moment.kind} at step {moment.step} + {moment.delay:.3f}: {done} steps, {codes}")
        if not any(codes):
            _fail(run_dir, f"{moment} did not interrupt the run")
    run(rollouts, run_dir, STEPS + " --resume")


def compare(folder: Path, moments: list[Moment]) -> None:
    """Raises unless the interrupted run's metrics are bit for bit those of an uninterrupted one."""
    rollouts = write_rollouts(folder / "rollouts.jsonl", 5 * NUM_STEPS)
    run(rollouts, folder / "uninterrupted", STEPS)
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
