"""Kills a program at random moments, starts it again, and compares its metrics with an
uninterrupted run's.

    python -m tests.distributed.kill_runs --program trainer --moments 10 --seed 0

What a launcher does when a rank dies (end the others) is done by `quickstart_run.wait`.
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
from .quickstart_run import Ranks, hold, output_of, run, start, steps_of, wait, wait_for_steps

KINDS = ("kill one rank", "kill all ranks", "SIGTERM", "full disk")
WORLD_SIZE = 2
NUM_STEPS = 30
FLAGS = f"--train-iters {NUM_STEPS} --save-interval 3 --resume"
TRAINER_FLAGS = (
    f"{trainer_run.WHOLE_GROUPS}--train-iters {NUM_STEPS} --save-interval 3 --exit-signal-handler "
)
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
    """A program that is killed; its functions `hold` and `fill_disk` are sent to ranks."""

    start: Callable[[Path, Callable[[int], None]], Ranks]
    """Starts the run in a folder or goes on with it; a function is called first in every rank."""
    hold: Callable[[Path, Path, int], None]
    """Keeps a rank of the run in a folder from its end until a file is there."""
    fill_disk: Callable[[Moment, int], None]
    """Lets a rank write no more from a moment on."""
    run: Callable[[Path], str]
    """A run that must succeed."""


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
        codes = wait(program.start(run_dir, functools.partial(program.fill_disk, moment)))
    else:
        sent = run_dir.with_suffix(".sent")
        sent.unlink(missing_ok=True)
        ranks = program.start(run_dir, functools.partial(program.hold, run_dir, sent))
        try:
            wait_for_steps(ranks, run_dir, moment.step)
            send_signal(ranks, moment, sent)
        finally:
            codes = wait(ranks)
    said, done = output_of(run_dir).read_text(), len(steps_of(run_dir))
    print(f"{moment}: {done} steps, {codes}")
    if done >= NUM_STEPS or (run_dir / "summary.json").exists():
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


def hold_quickstart(run_dir: Path, sent: Path, rank: int) -> None:
    import run_log

    write = run_log.Log.write

    def write_and_hold(log: Any, *line: Any) -> None:
        write(log, *line)
        hold(run_dir, LAST_STEP, sent)

    run_log.Log.write = write_and_hold


def fill_disk_of_quickstart(moment: Moment, rank: int) -> None:
    import run_log
    import train_grpo

    save = train_grpo.save_checkpoint

    def save_on_full_disk(run_dir: Path, progress: dict[str, Any], state: Any) -> None:
        if rank == moment.rank and progress["step"] >= moment.step:
            latest = run_log.checkpoints(run_dir)[-1:]
            take_no_more(moment, [file for folder in latest for file in folder.iterdir()])
        save(run_dir, progress, state)

    train_grpo.save_checkpoint = save_on_full_disk


QUICKSTART = Program(
    start=lambda run_dir, prepare: start(run_dir, FLAGS, WORLD_SIZE, prepare),
    hold=hold_quickstart,
    fill_disk=fill_disk_of_quickstart,
    run=lambda run_dir: run(run_dir, FLAGS),
)


def fill_disk_of_trainer(moment: Moment, rank: int) -> None:
    from megatron.training import get_args, training

    save = training.save_checkpoint

    def save_on_full_disk(iteration: int, *rest: Any, **named: Any) -> None:
        if rank == moment.rank and iteration >= moment.step:
            take_no_more(moment, sorted(Path(get_args().save).glob(f"iter_*/__{rank}_*")))
        save(iteration, *rest, **named)

    training.save_checkpoint = save_on_full_disk


def trainer_in(folder: Path) -> Program:
    rollouts = trainer_run.write_rollouts(folder / "rollouts.jsonl", 5 * NUM_STEPS)
    return Program(
        start=lambda run_dir, prepare: trainer_run.start(
            rollouts, run_dir, TRAINER_FLAGS, WORLD_SIZE, prepare
        ),
        hold=functools.partial(trainer_run.hold_at, LAST_STEP),
        fill_disk=fill_disk_of_trainer,
        run=lambda run_dir: trainer_run.run(rollouts, run_dir, TRAINER_FLAGS),
    )


PROGRAMS = {"quickstart": lambda folder: QUICKSTART, "trainer": trainer_in}
"""By name; a program may need files in a folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, default="quickstart")
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
