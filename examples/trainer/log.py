"""What a run leaves in `--save` beside its checkpoints: metrics, answers, settings and a picture;
one writer at a time, and files that are whole or absent.
"""

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from report import read_lines, read_run, report, summary

from megatron_pg import PolicyLossConfig
from megatron_pg.explain.rollout_page import write_rollout_page
from megatron_pg.rollout_files import RewardedSample, RolloutFiles

METRICS, HELD_OUT = "metrics.jsonl", "held_out.jsonl"
SHOWN = ("reward", "response_length", "loss", "kl_new_old", "grad_norm")
"""Metrics in the line of a step, with its seconds; metrics.jsonl has all."""
TOKEN_COLUMNS = {"old_log_probs": "log_probs", "rollout_log_probs": "rollout_log_probs"}
TOKEN_COLUMNS |= {name: name for name in ("ref_log_probs", "new_log_probs", "advantages")}
"""Fields of a sample with a number for each token, and their columns."""
SHOWN_PROMPTS = 8
"""Prompts of a step, on each data-parallel rank, whose answers are logged."""
LOCK_PATIENCE = 5.0
"""Seconds in which the processes of a killed run may still be ending, and hold its lock."""


def lock_folder(folder: Path) -> FileLock:
    """Keep other runs out of a folder, until the lock is released or the process ends."""
    lock = FileLock(folder / "lock", timeout=LOCK_PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        message = f"another run is writing to {folder}: stop it, or give another folder"
        raise ValueError(message) from None
    return lock


def replace_text(path: Path, text: str) -> None:
    """Write a file whole: a process that is killed leaves the old text or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def cut_back(path: Path, step: int) -> None:
    """Keep the lines of the steps up to `step`."""
    kept = [line for line in read_lines(path) if line["step"] <= step]
    replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def rollout_row(sample: RewardedSample) -> dict[str, Any]:
    """The row of a rollout file (docs/rollout_files.md); numbers have six decimals."""
    prompt, response = sample.tokens.split([sample.prompt_length, sample.response_length])
    row: dict[str, Any] = {"prompt_ids": prompt.tolist(), "response_ids": response.tolist()}
    row |= {"loss_mask": sample.loss_mask.int().tolist(), "reward": sample.reward}
    row["group_index"] = sample.group_index
    for field, column in TOKEN_COLUMNS.items():
        if (values := getattr(sample, field)) is not None:
            row[column] = [round(value, 6) for value in values.tolist()]
    return row


class RunLog:
    """A run on the terminal, TensorBoard, W&B and in its folder; every rank makes one, the last one
    writes.

    Megatron writes its own line of a step, timers and memory reports; its flags say which writers
    there are. What is there of steps after `args.iteration` is removed: the checkpoint that the run
    goes on from knows nothing of them. A ValueError names a damaged line.
    """

    def __init__(self, args: Namespace, texts: Mapping[int, str] | None) -> None:
        self._args, self._has_texts = args, texts is not None
        self._writes = args.rank == args.world_size - 1
        self._folder = Path(args.save) if args.save else None
        if not (self._writes and self._folder):
            return
        cut_back(self._folder / METRICS, args.iteration)
        cut_back(self._folder / HELD_OUT, args.iteration - 1)  # it is scored again
        replace_text(self._folder / "settings.yaml", args.settings_file)
        replace_text(self._folder / "settings.json", args.settings_of_run)
        if texts is not None:
            replace_text(self._folder / "tokens.json", json.dumps(texts))
        for path in self._folder.glob("rollouts/step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > args.iteration:
                path.unlink()

    def step(
        self,
        number: int,
        metrics: Mapping[str, float | None],
        answers: Sequence[str],
        rollouts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Log step `number`, counted from 1: metrics, None for what is not known, a few of its
        answers, rows of rollouts.
        """
        if not self._writes:
            return
        known = self._append(METRICS, number, metrics)
        if number % self._args.tensorboard_log_interval == 0:
            self._draw(number, known)
        if self._folder and rollouts:
            path = self._folder / f"rollouts/step_{number:06d}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rollouts))
        if number % self._args.log_interval == 0:
            texts = [f"{name} {known[name]:z.4g}" for name in SHOWN if name in known]
            seconds = sum(value for name, value in known.items() if name.startswith("seconds"))
            print(f" step {number}: {' | '.join([*texts, f'{seconds:.1f} s'])}", flush=True)
            print(*(f"    {answer!r}\n" for answer in answers), sep="", end="", flush=True)

    def held_out(self, number: int, score: float, answers: Sequence[str]) -> None:
        """Log the score of the held-out tasks after step `number`, and a few answers to them."""
        if not self._writes:
            return
        print(f" held-out tasks after step {number}: {score:.3f}", *map(repr, answers), sep="\n   ")
        self._append(HELD_OUT, number, {"score": score}, answers=answers)
        self._draw(number, {"held_out": score})

    def _append(
        self, name: str, step: int, values: Mapping[str, float | None], **more: Any
    ) -> dict[str, float]:
        """Write the line of a step, and give its finite values: JSON has no NaN."""
        known = {key: x for key, x in values.items() if x is not None and math.isfinite(x)}
        if self._folder:
            line = {"step": step, **dict.fromkeys(values), **known, **more}
            with (self._folder / name).open("a") as file:
                file.write(json.dumps(line) + "\n")
        return known

    def _draw(self, number: int, values: Mapping[str, float]) -> None:
        if writer := get_tensorboard_writer():
            for name, value in values.items():
                writer.add_scalar(name, value, number)
        if wandb := get_wandb_writer():
            wandb.log(dict(values), number)

    def flush(self) -> None:
        """Bring everything to the disk."""
        if self._writes and self._folder:
            with (self._folder / METRICS).open("a") as file:
                os.fsync(file.fileno())
        if self._writes and (writer := get_tensorboard_writer()):
            writer.flush()

    def close(self, config: PolicyLossConfig) -> None:
        """Write the page of answers and the picture of a run that ended by itself."""
        self.flush()
        if not self._writes:
            return
        args, folder = self._args, self._folder
        if folder and (folder / "rollouts").is_dir():
            title = (args.task, config.policy_loss, config.loss_aggregation, f"seed {args.seed}")
            texts = folder / "tokens.json" if self._has_texts else args.hf_model
            write_rollout_page(
                folder / "rollouts.html",
                RolloutFiles([folder / "rollouts"]),
                config,
                title=" · ".join(map(str, title)),
                tokenizer=texts,
            )
        if folder and read_lines(folder / METRICS):
            print(f" {summary(folder)}; see {folder}", flush=True)
            if find_spec("matplotlib"):
                report([read_run(folder)], folder / "report.png")
        if wandb := get_wandb_writer():
            wandb.finish()
