"""Kills examples/trainer at random moments, starts it again, and compares its metrics with an uninterrupted run's.

python -m tests.distributed.trainer_kill_runs --moments 10 --seed 0
"""

from __future__ import annotations

import functools
import resource
from pathlib import Path
from typing import Any

from .kill_runs import (
    LAST_STEP,
    LONGEST_DELAY,
    NUM_STEPS,
    WORLD_SIZE,
    Moment,
    main,
    send_signal,
    sent_file,
)
from .quickstart_run import output_of, wait, wait_for_steps
from .rollout_rows import write_rollouts
from .trainer_run import WHOLE_GROUPS, hold_at, run, start, steps_of

FLAGS = WHOLE_GROUPS + f"--train-iters {NUM_STEPS} --save-interval 3 --exit-signal-handler "


def interrupt(rollouts: Path, folder: Path, moment: Moment) -> None:
    """Starts the run or goes on with it, and interrupts it at the moment."""
    if moment.kind == "full disk":
        codes = wait(
            start(rollouts, folder, FLAGS, WORLD_SIZE, functools.partial(_fill_disk, moment))
        )
    else:
        sent = sent_file(folder)
        prepare = functools.partial(hold_at, LAST_STEP, folder, sent)
        ranks = start(rollouts, folder, FLAGS, WORLD_SIZE, prepare)
        try:
            wait_for_steps(ranks, folder, moment.step)
            send_signal(ranks, moment, sent)
        finally:
            codes = wait(ranks)
    said = output_of(folder).read_text()
    print(f"{moment}: {len(steps_of(folder))} steps, {codes}")
    if len(steps_of(folder)) >= NUM_STEPS:
        raise RuntimeError(f"{moment} did not interrupt the run; it said:\n{said}")
    if moment.kind == "full disk" and "cannot be written" not in said:
        raise RuntimeError(f"{moment}: the run did not say that it cannot write; it said:\n{said}")


def _fill_disk(moment: Moment, rank: int) -> None:
    """From the moment on the system refuses its rank to write beyond a size, in the middle of a checkpoint.

    RLIMIT_FSIZE is what can be had without a disk to fill: a write ends short, the next fails with EFBIG.
    """
    if rank != moment.rank:
        return
    from megatron.training import training

    save: Any = training.save_checkpoint

    def save_on_full_disk(iteration: int, *rest: Any, **named: Any) -> None:
        if iteration >= moment.step:
            from megatron.training import get_args

            folder = Path(get_args().save)
            files = sorted(folder.glob(f"iter_*/__{rank}_*"))
            largest = max((file.stat().st_size for file in files), default=4096)
            limit = int(largest * moment.delay / LONGEST_DELAY)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        save(iteration, *rest, **named)

    training.save_checkpoint = save_on_full_disk


def compare(folder: Path, moments: list[Moment]) -> None:
    """Raises unless the interrupted run's metrics are bit for bit those of an uninterrupted one."""
    rollouts = write_rollouts(folder / "rollouts.jsonl", 5 * NUM_STEPS)
    run(rollouts, folder / "uninterrupted", FLAGS)
    for moment in moments:
        interrupt(rollouts, folder / "interrupted", moment)
    run(rollouts, folder / "interrupted", FLAGS)
    expected, found = steps_of(folder / "uninterrupted"), steps_of(folder / "interrupted")
    if len(expected) != NUM_STEPS or found != expected:
        raise RuntimeError(f"metrics differ: {found} and uninterrupted {expected}")


if __name__ == "__main__":
    main(compare, __doc__)
