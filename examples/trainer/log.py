"""A step's metrics: a line on the terminal, TensorBoard, W&B, and metrics.jsonl beside the checkpoints.

Megatron writes its own line of a step, timers and memory reports; its flags say which writers there are.
"""

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from run_folder import append_step, cut_back

METRICS, HELD_OUT = "metrics.jsonl", "held_out.jsonl"


class MetricsLog:
    """The metrics of a run; every rank makes one, and the last rank's writes, as Megatron's does.

    The lines of metrics.jsonl after `args.iteration` are removed: the checkpoint that the run goes on from knows
    nothing of them. A ValueError names a damaged line.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._writes = args.rank == args.world_size - 1
        self._path = Path(args.save) / METRICS if args.save else None
        if self._writes and self._path:
            cut_back(self._path, args.iteration)

    def step(
        self, number: int, metrics: Mapping[str, float | None], answers: Sequence[str] = ()
    ) -> None:
        """Log the metrics of step `number`, counted from 1, None for what is not known, and a few of its answers."""
        if not self._writes:
            return
        known = append_step(self._path, number, metrics)
        if number % self._args.tensorboard_log_interval == 0:
            self._draw(number, known)
        if number % self._args.log_interval == 0:
            texts = (f"{name} {value:z.6g}" for name, value in known.items())
            line = f" step {number}: " + " | ".join(texts)
            print(line, *map(repr, answers), sep="\n   ", flush=True)

    def held_out(self, number: int, score: float, answers: Sequence[str]) -> None:
        """Log the score of the held-out tasks after step `number`, and a few answers to them."""
        if not self._writes:
            return
        print(f" held-out tasks after step {number}: {score:.3f}", *map(repr, answers), sep="\n   ")
        if self._path:
            line = {"step": number, "score": score, "answers": answers}
            with self._path.with_name(HELD_OUT).open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._draw(number, {"held_out": score})

    def _draw(self, number: int, values: Mapping[str, float]) -> None:
        if writer := get_tensorboard_writer():
            for name, value in values.items():
                writer.add_scalar(name, value, number)
        if wandb := get_wandb_writer():
            wandb.log(dict(values), number)

    def flush(self) -> None:
        """Bring everything to the disk."""
        if not self._writes:
            return
        if self._path:
            with self._path.open("a") as file:
                os.fsync(file.fileno())
        if writer := get_tensorboard_writer():
            writer.flush()

    def close(self) -> None:
        """The last thing of a run that ended by itself."""
        self.flush()
        if self._writes and (wandb := get_wandb_writer()):
            wandb.finish()
