"""A step's metrics: a line on the terminal, TensorBoard, W&B, and metrics.jsonl beside the checkpoints.

Megatron's own line of a step, its timers and memory reports are its own; so is which writers there are, by its flags.
All are written on the last rank.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

METRICS, HELD_OUT = "metrics.jsonl", "held_out.jsonl"


class MetricsLog:
    """Where the metrics of a run go; every rank makes one, and the last rank's writes.

    Args:
        args: `save` is the folder of metrics.jsonl, which is not written without it; its lines after `iteration` are
            removed, as the checkpoint that the run goes on from knows nothing of them.

    Raises:
        ValueError: a line is damaged.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._writes = args.rank == args.world_size - 1
        self._file: TextIO | None = None
        if self._writes and args.save:
            path = Path(args.save) / METRICS
            _cut_back(path, args.iteration)
            self._file = path.open("a")

    def step(
        self, number: int, metrics: Mapping[str, float | None], answers: Sequence[str] = ()
    ) -> None:
        """Log the metrics of step `number`, counted from 1, None for what is not known, and a few of its answers."""
        if not self._writes:
            return
        known = {
            name: value
            for name, value in metrics.items()
            if value is not None and math.isfinite(value)
        }
        if self._file is not None:
            line = {"step": number, **{name: known.get(name) for name in metrics}}
            self._file.write(json.dumps(line) + "\n")  # JSON has no NaN
            self._file.flush()
        if number % self._args.tensorboard_log_interval == 0:
            if writer := get_tensorboard_writer():
                for name, value in known.items():
                    writer.add_scalar(name, value, number)
            if wandb := get_wandb_writer():
                wandb.log(known, number)
        if number % self._args.log_interval == 0:
            texts = (f"{name} {value:z.6g}" for name, value in known.items())
            line = f" step {number}: " + " | ".join(texts)
            print(line, *map(repr, answers), sep="\n   ", flush=True)

    def held_out(self, number: int, score: float, answers: Sequence[str]) -> None:
        """Log the score of the held-out tasks after step `number`, and a few answers to them."""
        if not self._writes:
            return
        print(f" held-out tasks after step {number}: {score:.3f}", *map(repr, answers), sep="\n   ")
        if self._args.save:
            line = {"step": number, "score": score, "answers": answers}
            with (Path(self._args.save) / HELD_OUT).open("a") as file:
                file.write(json.dumps(line) + "\n")
        if writer := get_tensorboard_writer():
            writer.add_scalar("held_out", score, number)
        if wandb := get_wandb_writer():
            wandb.log({"held_out": score}, number)

    def flush(self) -> None:
        """Bring everything to the disk; a checkpoint must not be ahead of the metrics."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._writes and (writer := get_tensorboard_writer()):
            writer.flush()

    def close(self) -> None:
        """The last thing of a run that ended by itself."""
        self.flush()
        if self._writes and (wandb := get_wandb_writer()):
            wandb.finish()


def _cut_back(path: Path, step: int) -> None:
    """Keep the lines up to `step`. A last line without its end is none: a killed run leaves it half written."""
    kept = []
    texts = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, text in enumerate(texts, 1):
        try:
            if json.loads(text)["step"] > step:
                break
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path} line {number} is no line of a run, found {text[:40]!r}: mend or remove the line"
            ) from None
        kept.append(text + b"\n")
    aside = path.with_suffix(".partial")
    aside.write_bytes(b"".join(kept))
    aside.replace(path)
