"""Short runs of examples/trainer from a small rollout file, and what they leave."""

import shutil
from pathlib import Path
from typing import Any

from .quickstart_run import Prepare, Ranks, hold, output_of, start_script, succeed, wait_until_ended
from .rollout_rows import VOCABULARY

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type learned_absolute --attention-dropout 0 --hidden-dropout 0 "
    f"--vocab-size {VOCABULARY} "
)
FLAGS = (
    "--device cpu --seed 1 --lr 1e-2 --make-vocab-size-divisible-by 16 --max-tokens-per-microbatch 64 "
    "--loss-aggregation prompt_mean --docs-per-step 10 --docs-per-step-mode exact --on-bad-row skip "
)
WHOLE_GROUPS = "--keep-prompt-groups "
TRACKER = "latest_checkpointed_iteration.txt"


def start(
    rollouts: Path | None,
    folder: Path,
    flags: str,
    world_size: int = 2,
    prepare: Prepare = None,
    model: str = MODEL,
    base: str = FLAGS,
) -> Ranks:
    """The ranks of a run that writes to `folder` and goes on from what is there; of flags a later one wins.

    `rollouts` are None where `flags` say what to train on.
    """
    files = "" if rollouts is None else f"--rollout-files {rollouts} "
    own = f"--save {folder} --load {folder} "
    arguments = (base + model + files + own + flags).split()
    return start_script(arguments, folder, world_size, prepare, "trainer.train")


def run(rollouts: Path | None, folder: Path, flags: str, **options: Any) -> str:
    """The output of a run that must succeed; `options` are those of `start`."""
    return succeed(start(rollouts, folder, flags, **options), folder)


def end_of(rollouts: Path | None, folder: Path, flags: str, **options: Any) -> str:
    """What a run said of which every rank must end by itself, with a message: nobody ends the others."""
    ranks = start(rollouts, folder, flags, **options)
    wait_until_ended(ranks)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    said = output_of(folder).read_text()
    assert "Traceback" not in said, said
    return said


def hold_at(steps: int, folder: Path, sent: Path, rank: int) -> None:
    """Have a rank wait after that many steps until the file `sent` says that a signal was sent."""
    from megatron_pg.rollout_files import StepCollector

    collect = StepCollector.collect

    def hold_and_collect(collector: StepCollector) -> Any:
        hold(folder, steps, sent)
        return collect(collector)

    StepCollector.collect = hold_and_collect  # type: ignore[method-assign]


def copy_after_step(step: int, folder: Path, copy: Path) -> Path:
    """A run that has taken `step` of another run's steps, and left a checkpoint after it."""
    copy.mkdir(parents=True)
    name = f"iter_{step:07d}"
    shutil.copytree(folder / name, copy / name)
    (copy / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    (copy / TRACKER).write_text(str(step))
    return copy
