"""A run's outputs in addition to checkpoints: metrics, responses, settings and a figure."""

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from report import IN_TITLE, read_lines, read_run, report, summary

from megatron_pg import PolicyLossConfig
from megatron_pg.explain.rollout_page import write_rollout_page
from megatron_pg.rollout_files import RewardedSample, RolloutFiles

METRICS, HELD_OUT = "metrics.jsonl", "held_out.jsonl"
SHOWN = ("reward", "response_length", "loss", "kl_new_old", "grad_norm")
"""The metrics in a step's line, with its seconds. metrics.jsonl has all."""
SHOWN_PROMPTS = 8
"""The prompts per step and data-parallel rank with logged responses."""
TOKEN_COLUMNS = {"old_log_probs": "log_probs"} | {
    name: name for name in ("rollout_log_probs", "ref_log_probs", "new_log_probs", "advantages")
}
"""Fields of a sample with a number per token, and their columns."""


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: a killed process leaves the old or the new text."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def rollout_row(sample: RewardedSample) -> dict[str, Any]:
    """Return the row of a rollout file (docs/rollout_files.md), with numbers of six decimals."""
    tokens, place = sample.tokens.tolist(), sample.prompt_length
    row: dict[str, Any] = {"prompt_ids": tokens[:place], "response_ids": tokens[place:]}
    row |= {"loss_mask": sample.loss_mask.int().tolist(), "reward": sample.reward}
    row["group_index"] = sample.group_index
    for field, column in TOKEN_COLUMNS.items():
        if (values := getattr(sample, field)) is not None:
            row[column] = [round(value, 6) for value in values.tolist()]
    return row


class RunLog:
    """A run's log on the terminal, TensorBoard, W&B and in its folder. Every rank makes one, and
    the last rank writes.

    Megatron writes its own line per step, and its flags select the writers. Entries of steps after
    `args.iteration`, the resumed checkpoint, are removed. Raises ValueError for a damaged line.
    """

    def __init__(self, args: Namespace, texts: Mapping[int, str] | None) -> None:
        self._args, self._has_texts = args, texts is not None
        self._writes = args.rank == args.world_size - 1
        self._folder = Path(args.save) if args.save and self._writes else None
        if not self._folder:
            return
        # A resumed run scores the held-out tasks again.
        for name, last in ((METRICS, args.iteration), (HELD_OUT, args.iteration - 1)):
            kept = [line for line in read_lines(self._folder / name) if line["step"] <= last]
            replace_text(self._folder / name, "".join(json.dumps(line) + "\n" for line in kept))
        replace_text(self._folder / "settings.yaml", args.settings_file)
        shown = {name: str(getattr(args, name)) for name in ("task", *IN_TITLE)}
        replace_text(self._folder / "settings.json", json.dumps(shown))
        replace_text(self._folder / "tokens.json", json.dumps(texts or {}))
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
        """Log step `number`, counted from 1: metrics, a few responses, rows of rollouts."""
        if not self._writes:
            return
        known = self._append(METRICS, number, metrics)
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
        """Log the held-out tasks' score after step `number`, and a few responses."""
        if self._writes:
            print(
                f" held-out tasks after step {number}: {score:.3f}",
                *map(repr, answers),
                sep="\n    ",
            )
            self._append(HELD_OUT, number, {"score": score}, answers=answers)

    def _append(
        self, name: str, step: int, values: Mapping[str, float | None], **more: Any
    ) -> dict[str, float]:
        """Write a step's line, and return its finite values, because JSON has no NaN."""
        known = {key: x for key, x in values.items() if x is not None and math.isfinite(x)}
        if self._folder:
            line = {"step": step, **dict.fromkeys(values), **known, **more}
            with (self._folder / name).open("a") as file:
                file.write(json.dumps(line) + "\n")
        if writer := get_tensorboard_writer():
            for key, value in known.items():
                writer.add_scalar(key, value, step)
        if wandb := get_wandb_writer():
            wandb.log(known, step)
        return known

    def flush(self) -> None:
        """Flush everything to the disk."""
        if self._folder:
            with (self._folder / METRICS).open("a") as file:
                os.fsync(file.fileno())
        if self._writes and (writer := get_tensorboard_writer()):
            writer.flush()

    def close(self, config: PolicyLossConfig) -> None:
        """Write the page of responses and the figure of a finished run."""
        self.flush()
        args, folder = self._args, self._folder
        if folder and (folder / "rollouts").is_dir():
            title = (args.task, config.policy_loss, config.loss_aggregation, f"seed {args.seed}")
            write_rollout_page(
                folder / "rollouts.html",
                RolloutFiles([folder / "rollouts"]),
                config,
                title=" · ".join(map(str, title)),
                tokenizer=folder / "tokens.json" if self._has_texts else args.hf_model,
            )
        if folder and read_lines(folder / METRICS):
            print(f" {summary(folder)}; see {folder}", flush=True)
            if find_spec("matplotlib"):
                report([read_run(folder)], folder / "report.png")
        if self._writes and (wandb := get_wandb_writer()):
            wandb.finish()
