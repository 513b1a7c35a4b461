"""Kills the quickstart at random moments, resumes it, and compares its metrics with an uninterrupted run's.

    python -m tests.distributed.kill_runs --moments 10 --seed 0

What a launcher does when a rank dies (end the others) is done by `quickstart_run.wait`.
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
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from .quickstart_run import hold, output_of, run, start, steps_of, wait, wait_for_steps

KINDS = ("kill one rank", "kill all ranks", "SIGTERM", "full disk")
WORLD_SIZE = 2
NUM_STEPS = 30
STEPS = f"--train-iters {NUM_STEPS} --save-interval 3 "
LONGEST_DELAY = 0.3
LAST_STEP = NUM_STEPS - 3
"""A run that is not interrupted until then waits for it."""


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


def interrupt(run_dir: Path, moment: Moment) -> list[int]:
    """Starts or resumes the run and interrupts it at the moment: the exit codes of the ranks."""
    flags = STEPS + "--resume"
    if moment.kind == "full disk":
        return wait(start(run_dir, flags, WORLD_SIZE, functools.partial(_fill_disk, moment)))
    sent = sent_file(run_dir)
    ranks = start(run_dir, flags, WORLD_SIZE, functools.partial(_hold, run_dir, sent))
    try:
        wait_for_steps(ranks, run_dir, moment.step)
        send_signal(ranks, moment, sent)
    finally:
        codes = wait(ranks)
    return codes


def sent_file(run_dir: Path) -> Path:
    """Where `send_signal` says that it was there; not there yet."""
    sent = run_dir.with_suffix(".sent")
    sent.unlink(missing_ok=True)
    return sent


def _hold(run_dir: Path, sent: Path, rank: int) -> None:
    """Keep the run from its end until the signal is sent, however late that is."""
    import run_log

    write: Any = run_log.Log.write

    def write_and_hold(log: Any, *line: Any) -> None:
        write(log, *line)
        hold(run_dir, LAST_STEP, sent)

    run_log.Log.write = write_and_hold  # type: ignore[method-assign]


def _fill_disk(moment: Moment, rank: int) -> None:
    """From the moment on the system refuses its rank to write beyond a size, in the middle of a checkpoint.

    RLIMIT_FSIZE is what can be had without a disk to fill: a write ends short, the next fails with EFBIG.
    """
    if rank != moment.rank:
        return
    import run_log
    import train_grpo

    save: Any = train_grpo.save_checkpoint

    def save_on_full_disk(run_dir: Path, progress: dict[str, Any], state: Any) -> None:
        if progress["step"] >= moment.step:
            latest = run_log.checkpoints(run_dir)[-1:]
            largest = max((f.stat().st_size for p in latest for f in p.iterdir()), default=4096)
            limit = int(largest * moment.delay / LONGEST_DELAY)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        save(run_dir, progress, state)

    train_grpo.save_checkpoint = save_on_full_disk


def send_signal(ranks: list[BaseProcess], moment: Moment, sent: Path) -> None:
    """The signal of the moment, after its delay, to the ranks that get it; the file `sent` tells those that wait."""
    time.sleep(moment.delay)
    number = signal.SIGTERM if moment.kind == "SIGTERM" else signal.SIGKILL
    for rank in [ranks[moment.rank]] if moment.kind == "kill one rank" else ranks:
        if rank.pid is not None and rank.is_alive():
            os.kill(rank.pid, number)
    sent.touch()


def _fail(run_dir: Path, message: str) -> NoReturn:
    raise RuntimeError(f"{message}; the run said:\n{output_of(run_dir).read_text()}")


def interrupted_run(run_dir: Path, moments: list[Moment]) -> None:
    """A run that every moment interrupts, resumed each time and at last left alone."""
    for moment in moments:
        codes = interrupt(run_dir, moment)
        metrics = run_dir / "metrics.jsonl"
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        print(f"{moment.kind} at step {moment.step} + {moment.delay:.3f}: {done} steps, {codes}")
        if (run_dir / "summary.json").exists():
            _fail(run_dir, f"{moment} did not interrupt the run")
        if moment.kind == "full disk" and "cannot be written" not in output_of(run_dir).read_text():
            _fail(run_dir, f"{moment}: the run did not say that the checkpoint cannot be written")
    run(run_dir, STEPS + "--resume")


def compare(folder: Path, moments: list[Moment]) -> None:
    """Raises unless the interrupted run's metrics are bit for bit those of an uninterrupted one."""
    run(folder / "uninterrupted", STEPS)
    interrupted_run(folder / "interrupted", moments)
    expected, found = steps_of(folder / "uninterrupted"), steps_of(folder / "interrupted")
    if len(expected) != NUM_STEPS or found != expected:
        _fail(folder / "interrupted", f"metrics differ: {found} and uninterrupted {expected}")


def main(compare: Callable[[Path, list[Moment]], None], description: str | None) -> None:
    """The command line of a program's kill test."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), random_moments(args.moments, args.seed))
    print(f"{args.moments} moments: metrics equal, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(compare, __doc__)
