"""Kills the training script at random moments, resumes it, and compares its metrics with an uninterrupted run's.

    python -m tests.distributed.kill_runs --moments 10 --seed 0            # from a rollout file
    python -m tests.distributed.kill_runs --moments 10 --seed 0 --online   # generating, as the quickstart does

What a launcher does when a rank dies (end the others) is done by `rollout_run.wait`.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import resource
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from .rollout_run import (
    WHOLE_GROUPS,
    output_of,
    run,
    start,
    steps_of,
    wait,
    wait_for_steps,
    write_rollouts,
)

KINDS = ("kill one rank", "kill all ranks", "SIGTERM", "full disk")
WORLD_SIZE = 2
NUM_STEPS = 30
STEPS = f"--train-iters {NUM_STEPS} --save-interval 3 "
LONGEST_DELAY = 0.3


@dataclass(frozen=True)
class Moment:
    """When and how a run is interrupted.

    Attributes:
        kind: one of KINDS.
        step: it comes after this step is logged, or at the first checkpoint from this step on where the disk is full.
        delay: seconds after that, up to LONGEST_DELAY; where the disk is full, the part of the largest file
            of that rank in a checkpoint that it still takes.
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
            generator.random() * LONGEST_DELAY,
            generator.randrange(WORLD_SIZE),
        )
        for index in range(number)
    ]


def interrupt(rollouts: Path | None, run_dir: Path, moment: Moment) -> list[int]:
    """Starts or resumes the run and interrupts it at the moment: the exit codes of the ranks."""
    flags = _flags(rollouts) + "--resume"
    if moment.kind == "full disk":
        fill = functools.partial(_fill_disk, moment)
        return wait(start(rollouts, run_dir, flags, WORLD_SIZE, fill))
    ranks = start(rollouts, run_dir, flags, WORLD_SIZE)
    try:
        wait_for_steps(ranks, run_dir, moment.step)
        send_signal(ranks, moment)
    finally:
        codes = wait(ranks)
    return codes


def _flags(rollouts: Path | None) -> str:
    return STEPS if rollouts is None else STEPS + WHOLE_GROUPS


def _fill_disk(moment: Moment, rank: int) -> None:
    """From the moment on the system refuses its rank to write beyond a size, in the middle of a checkpoint.

    RLIMIT_FSIZE is what can be had without a disk to fill: a write ends short, the next fails with EFBIG.
    """
    if rank != moment.rank:
        return
    from quickstart.checkpoint import Checkpoints

    save: Any = Checkpoints.save

    def save_on_full_disk(self: Checkpoints, progress: Any, *rest: Any) -> None:
        if progress.step >= moment.step:
            latest = max(self.folder.checkpoints(), default=None)
            limit = int(_largest_of(rank, latest) * moment.delay / LONGEST_DELAY)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        save(self, progress, *rest)

    Checkpoints.save = save_on_full_disk  # type: ignore[method-assign]


def _largest_of(rank: int, checkpoint: Path | None) -> int:
    """The bytes of the largest file that a rank has written in a checkpoint; a few where there is none yet."""
    patterns = (f"rank_{rank}.pt", f"model/__{rank}_*")
    files = [] if checkpoint is None else [f for each in patterns for f in checkpoint.glob(each)]
    return max((file.stat().st_size for file in files), default=4096)


def send_signal(ranks: list[BaseProcess], moment: Moment) -> None:
    """The signal of the moment, after its delay, to the ranks that get it."""
    time.sleep(moment.delay)
    number = signal.SIGTERM if moment.kind == "SIGTERM" else signal.SIGKILL
    for rank in [ranks[moment.rank]] if moment.kind == "kill one rank" else ranks:
        if rank.pid is not None and rank.is_alive():
            os.kill(rank.pid, number)


def _fail(run_dir: Path, message: str) -> NoReturn:
    raise RuntimeError(f"{message}; the run said:\n{output_of(run_dir).read_text()}")


def interrupted_run(rollouts: Path | None, run_dir: Path, moments: list[Moment]) -> None:
    """A run that every moment interrupts, resumed each time and at last left alone."""
    for moment in moments:
        codes = interrupt(rollouts, run_dir, moment)
        metrics = run_dir / "metrics.jsonl"
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        print(f"{moment.kind} at step {moment.step} + {moment.delay:.3f}: {done} steps, {codes}")
        if not any(codes):
            _fail(run_dir, f"{moment} did not interrupt the run")
        if moment.kind == "full disk" and "cannot be written" not in output_of(run_dir).read_text():
            _fail(run_dir, f"{moment}: the run did not say that the checkpoint cannot be written")
    run(rollouts, run_dir, _flags(rollouts) + "--resume")


def compare(folder: Path, moments: list[Moment], online: bool = False) -> None:
    """Raises unless the interrupted run's metrics are bit for bit those of an uninterrupted one."""
    rollouts = None if online else write_rollouts(folder / "rollouts.jsonl", 5 * NUM_STEPS)
    run(rollouts, folder / "uninterrupted", _flags(rollouts))
    interrupted_run(rollouts, folder / "interrupted", moments)
    expected, found = steps_of(folder / "uninterrupted"), steps_of(folder / "interrupted")
    if len(expected) != NUM_STEPS or found != expected:
        _fail(folder / "interrupted", f"metrics differ: {found} and uninterrupted {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--online", action="store_true")
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), random_moments(args.moments, args.seed), args.online)
    print(f"{args.moments} moments: metrics equal, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
