"""Short runs of examples/trainer from a small rollout file, and what they leave."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from .quickstart_run import Prepare, Ranks, hold, output_of, start_script, succeed, wait_until_ended

VOCABULARY = 32
MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 "
    "--position-embedding-type learned_absolute --attention-dropout 0 --hidden-dropout 0 "
    f"--vocab-size {VOCABULARY} "
)
FLAGS = (
    "--device cpu --seed 1 --lr 1e-2 --make-vocab-size-divisible-by 16 --max-tokens-per-microbatch "
    "64 "
    "--loss-aggregation prompt_mean --docs-per-step 10 --docs-per-step-mode exact --on-bad-row "
    "skip "
)
WHOLE_GROUPS = "--keep-prompt-groups "
TRACKER = "latest_checkpointed_iteration.txt"


def write_rollouts(path: Path, num_groups: int) -> Path:
    """Prompt groups of two to four answers of different lengths, one row in twenty bad, a reward
    each.
    """
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


def without_log_probs(path: Path, every: int) -> Path:
    """A file of rollouts in which every so manieth row lacks them, as of an engine that does not
    give them.
    """
    write_rollouts(path, 24)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::every]:
        del row["log_probs"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(
    rollouts: Path | None,
    folder: Path,
    flags: str,
    world_size: int = 2,
    prepare: Prepare = None,
    model: str = MODEL,
    base: str = FLAGS,
) -> Ranks:
    """The ranks of a run that writes to `folder` and goes on from what is there; of flags a later
    one wins.

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
    """What a run said of which every rank must end by itself, with a message: nobody ends the
    others.
    """
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
