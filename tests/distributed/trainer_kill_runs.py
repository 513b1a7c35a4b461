"""Kills examples/trainer at random moments, starts it again, and compares its metrics with an uninterrupted run's.

python -m tests.distributed.trainer_kill_runs --moments 10 --seed 0
"""

import functools
from pathlib import Path
from typing import Any

from .kill_runs import LAST_STEP, NUM_STEPS, WORLD_SIZE, Moment, Program, main, take_no_more
from .rollout_rows import write_rollouts
from .trainer_run import WHOLE_GROUPS, hold_at, run, start

FLAGS = WHOLE_GROUPS + f"--train-iters {NUM_STEPS} --save-interval 3 --exit-signal-handler "


def fill_disk(moment: Moment, rank: int) -> None:
    from megatron.training import get_args, training

    save = training.save_checkpoint

    def save_on_full_disk(iteration: int, *rest: Any, **named: Any) -> None:
        if rank == moment.rank and iteration >= moment.step:
            take_no_more(moment, sorted(Path(get_args().save).glob(f"iter_*/__{rank}_*")))
        save(iteration, *rest, **named)

    training.save_checkpoint = save_on_full_disk


def trainer(folder: Path) -> Program:
    rollouts = write_rollouts(folder / "rollouts.jsonl", 5 * NUM_STEPS)
    return Program(
        start=lambda run_dir, prepare: start(rollouts, run_dir, FLAGS, WORLD_SIZE, prepare),
        hold=functools.partial(hold_at, LAST_STEP),
        fill_disk=fill_disk,
        run=lambda run_dir: run(rollouts, run_dir, FLAGS),
    )


if __name__ == "__main__":
    main(trainer, __doc__)
