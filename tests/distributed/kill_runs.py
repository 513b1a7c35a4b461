"""Kills examples/train.py at random moments, starts it again, and compares its metrics with an
uninterrupted run's.

    python -m tests.distributed.kill_runs --program files --moments 10 --seed 0

What a launcher does when a rank dies (end the others) is done by `trainer_run.wait`.
"""

import argparse
import functools
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from . import trainer_run
from .trainer_run import Ranks, hold_at, output_of, steps_of, wait, wait_for_steps

KINDS = ("kill one rank", "kill all ranks", "SIGTERM", "full disk")
WORLD_SIZE = 2
NUM_STEPS = 30
FLAGS = f"--train-iters {NUM_STEPS} --save-interval 3 --exit-signal-handler "
LONGEST_DELAY = 0.3
LAST_STEP = NUM_STEPS - 3
"""A run that is not interrupted until then waits for it."""


@dataclass(frozen=True)
class Moment:
    """When and how a run is interrupted."""

    kind: str
    """One of KINDS."""
    step: int
    """It comes after this step is logged, or at the first checkpoint from this step on where the
    disk is full."""
    delay: float
    """Seconds after that, up to LONGEST_DELAY; of a full disk it is to these as what it still takes
    to the largest file."""
    rank: int
    """The rank that is killed, or whose disk is full."""


def random_moments(number: int, seed: int) -> list[Moment]:
    """`number` moments, later and later in the run, every kind among any four that follow each
    other.
    """
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


class Program(NamedTuple):
    """What is trained on, and by which flags."""

    rollouts: Path | None
    options: dict[str, str]

    def start(self, run_dir: Path, prepare: Callable[[int], None] | None = None) -> Ranks:
        """Start the run in a folder or go on with it; a function is called first in every rank."""
        options = {"world_size": WORLD_SIZE, "prepare": prepare, **self.options}
        return trainer_run.start(self.rollouts, run_dir, FLAGS, **options)  # type: ignore[arg-type]

    def run(self, run_dir: Path) -> str:
        """A run that must succeed."""
        return trainer_run.succeed(self.start(run_dir), run_dir)


def take_no_more(moment: Moment, files: Iterable[Path]) -> None:
    """Have the system refuse this rank to write beyond a size, in the middle of a checkpoint like
    these files.

    RLIMIT_FSIZE is what can be had without a disk to fill: a write ends short, the next fails with
    EFBIG.
    """
    largest = max((file.stat().st_size for file in files), default=4096)
    limit = int(largest * moment.delay / LONGEST_DELAY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def interrupt(program: Program, run_dir: Path, moment: Moment) -> None:
    """Start the run or go on with it, and interrupt it at the moment."""
    if moment.kind == "full disk":
        codes = wait(program.start(run_dir, functools.partial(fill_disk, moment)))
    else:
        sent = run_dir.with_suffix(".sent")
        sent.unlink(missing_ok=True)
        ranks = program.start(run_dir, functools.partial(hold_at, LAST_STEP, run_dir, sent))
        try:
            wait_for_steps(ranks, run_dir, moment.step)
            send_signal(ranks, moment, sent)
        finally:
            codes = wait(ranks)
    said, done = output_of(run_dir).read_text(), len(steps_of(run_dir))
    print(f"{moment}: {done} steps, {codes}")
    if done >= NUM_STEPS or (run_dir / "report.png").exists():
        raise RuntimeError(f"{moment} did not interrupt the run; it said:\n{said}")
    if moment.kind == "full disk" and "cannot be written" not in said:
        raise RuntimeError(f"{moment}: the run did not say that it cannot write; it said:\n{said}")


def send_signal(ranks: Ranks, moment: Moment, sent: Path) -> None:
    """The signal of the moment, after its delay, to the ranks that get it; the file `sent` tells
    those that wait.
    """
    time.sleep(moment.delay)
    number = signal.SIGTERM if moment.kind == "SIGTERM" else signal.SIGKILL
    for rank in [ranks[moment.rank]] if moment.kind == "kill one rank" else ranks:
        if rank.pid is not None and rank.is_alive():
            os.kill(rank.pid, number)
    sent.touch()


def compare(program: Program, folder: Path, moments: list[Moment]) -> None:
    """Raise unless a run that every moment interrupts has, bit for bit, the metrics of one that is
    left alone.
    """
    program.run(folder / "uninterrupted")
    for moment in moments:
        interrupt(program, folder / "interrupted", moment)
    program.run(folder / "interrupted")
    expected, found = steps_of(folder / "uninterrupted"), steps_of(folder / "interrupted")
    if len(expected) != NUM_STEPS or found != expected:
        raise RuntimeError(f"metrics differ: {found} and uninterrupted {expected}")


def fill_disk(moment: Moment, rank: int) -> None:
    """Let a rank write no more from a moment on."""
    from megatron.training import get_args, training

    save = training.save_checkpoint

    def save_on_full_disk(iteration: int, *rest: Any, **named: Any) -> None:
        if rank == moment.rank and iteration >= moment.step:
            take_no_more(moment, sorted(Path(get_args().save).glob(f"iter_*/__{rank}_*")))
        save(iteration, *rest, **named)

    training.save_checkpoint = save_on_full_disk


def files_in(folder: Path) -> Program:
    rollouts = trainer_run.write_rollouts(folder / "rollouts.jsonl", 5 * NUM_STEPS)
    return Program(rollouts, {"base": trainer_run.FLAGS + trainer_run.WHOLE_GROUPS})


TASK = Program(None, {"base": trainer_run.TASK, "model": trainer_run.TASK_MODEL})
PROGRAMS = {"task": lambda folder: TASK, "files": files_in}
"""By name; a program may need files in a folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, default="task")
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        program = PROGRAMS[args.program](Path(folder))
        compare(program, Path(folder), random_moments(args.moments, args.seed))
    print(f"{args.moments} moments: metrics equal, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
