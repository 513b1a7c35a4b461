"""Short runs of examples/train.py, from a small rollout file or a task, and what they leave."""

import contextlib
import functools
import importlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.progress import wait_until

from .launch import fork_server, free_port

Ranks = list[BaseProcess]
Prepare = Callable[[int], None] | None
"""Called with the rank, in its process, before the program."""
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
TASK_MODEL = MODEL.replace(f"--vocab-size {VOCABULARY}", "--vocab-size 100")
WORDS = json.dumps({"size": 256, "min_word_len": 3, "max_word_len": 5}, separators=(",", ":"))
TASK = (
    f"--device cpu --seed 1 --lr 1e-2 --task spell_backward --task-settings {WORDS} "
    "--prompts-per-step 4 --samples-per-prompt 4 --steps-per-round 2 --max-response-tokens 8 "
    "--held-out-tasks 8 --max-tokens-per-microbatch 128 --loss-aggregation prompt_mean "
    # A model that is not trained answers nothing rightly; the entropy gives its steps a gradient.
    "--context-parallel-size 2 --entropy-coef 0.01 "
)
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
    return start_script(arguments, folder, world_size, prepare)


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
    from trainer.rollouts import FileSteps
    from trainer.tasks import TaskSteps

    for kind in (FileSteps, TaskSteps):
        kind.step = functools.partialmethod(_held, kind.step, steps, folder, sent)  # type: ignore[assignment]


def _held(self: Any, step: Any, steps: int, folder: Path, sent: Path, iteration: int) -> Any:
    hold(folder, steps, sent)
    return step(self, iteration)


def copy_after_step(step: int, folder: Path, copy: Path) -> Path:
    """A run that has taken `step` of another run's steps, and left a checkpoint after it."""
    copy.mkdir(parents=True)
    name = f"iter_{step:07d}"
    shutil.copytree(folder / name, copy / name)
    (copy / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    (copy / TRACKER).write_text(str(step))
    return copy


def start_script(
    arguments: list[str],
    run_dir: Path,
    world_size: int = 2,
    prepare: Prepare = None,
    program: str = "train",
) -> Ranks:
    """The ranks of the `main` of a module, forked from a process that has imported everything.

    What they print goes to a file beside the run's folder.
    """
    context = fork_server()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment["WORLD_SIZE"] = str(world_size)
    ranks: Ranks = []
    for rank in range(world_size):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        task = (own, arguments, output_of(run_dir), prepare, program)
        ranks.append(context.Process(target=_run_rank, args=task))
        ranks[-1].start()
    return ranks


def _run_rank(
    environment: dict[str, str], arguments: list[str], output: Path, prepare: Prepare, program: str
) -> None:
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    sys.argv = [program, *arguments]
    if prepare is not None:
        prepare(int(environment["RANK"]))
    importlib.import_module(program).main()


def have_ended(ranks: Ranks) -> bool:
    return not any(rank.is_alive() for rank in ranks)


def wait_until_ended(ranks: Ranks) -> None:
    """Return once no rank lives; nobody ends the others of one that fails."""
    try:
        wait_until(lambda: have_ended(ranks), pids_of(ranks))
    finally:
        kill(ranks)


def wait(ranks: Ranks) -> list[int]:
    """Return the exit codes. Once a rank fails the others get what a launcher gives: SIGTERM, and
    an end if they hang.
    """

    def has_one_failed() -> bool:
        return any(rank.exitcode for rank in ranks)

    try:
        wait_until(lambda: has_one_failed() or have_ended(ranks), pids_of(ranks))
        if has_one_failed():
            for rank in ranks:
                rank.terminate()
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: have_ended(ranks), pids_of(ranks), patience=1.0)
    finally:
        kill(ranks)
    return [rank.exitcode or 0 for rank in ranks]


def wait_for_steps(ranks: Ranks, run_dir: Path, number: int) -> None:
    """Return once that many steps are logged; a RuntimeError, with what the run said, if a rank
    ends before.
    """
    metrics = run_dir / "metrics.jsonl"

    def are_logged() -> bool:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= number:
            return True
        if all(rank.is_alive() for rank in ranks):
            return False
        said = output_of(run_dir).read_text()
        raise RuntimeError(f"step {number} was not reached; the run said:\n{said}")

    wait_until(are_logged, pids_of(ranks))


def hold(run_dir: Path, steps: int, sent: Path) -> None:
    """Let a rank wait, once that many steps are logged, until the file `sent` says that a signal
    was sent.
    """
    metrics = run_dir / "metrics.jsonl"
    while metrics.exists() and metrics.read_bytes().count(b"\n") >= steps and not sent.exists():
        time.sleep(0.1)


def kill(ranks: Ranks) -> None:
    for rank in ranks:
        rank.kill()
        rank.join()


def pids_of(ranks: Ranks) -> list[int | None]:
    return [rank.pid for rank in ranks]


def succeed(ranks: Ranks, run_dir: Path) -> str:
    """The output of a run that must succeed."""
    codes = wait(ranks)
    output = output_of(run_dir).read_text()
    assert not any(codes), f"{codes}\n{output}"
    return output


def output_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl without their times."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: None if "seconds" in name else step[name] for name in step} for step in steps]
