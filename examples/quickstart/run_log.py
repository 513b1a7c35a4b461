"""What a run leaves behind: metrics.jsonl, TensorBoard events, summary.json and a progress bar. On rank 0."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

METRICS, WARM_START_METRICS = "metrics.jsonl", "warm_start.jsonl"


class RunLog:
    """The logs of a run, cut back to where it goes on from.

    Args:
        path: folder of the run.
        tensorboard_dir: folder of the TensorBoard events.
        warm_start_step, step: lines of later steps are removed: a checkpoint knows nothing of them.
    """

    def __init__(self, path: Path, tensorboard_dir: Path, warm_start_step: int, step: int) -> None:
        self.path = path
        _cut_back(path / WARM_START_METRICS, warm_start_step)
        _cut_back(path / METRICS, step)
        self._files = {name: open(path / name, "a") for name in (METRICS, WARM_START_METRICS)}
        self._writer = SummaryWriter(str(tensorboard_dir), purge_step=step + 1)
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bar: Any = None

    def start_bar(self, description: str, total: int, completed: int) -> None:
        """Show the progress of a phase; without a terminal, a line every tenth of it is printed instead."""
        if self._bar is not None:
            self._progress.remove_task(self._bar.id)
        self._progress.start()
        task = self._progress.add_task(description, total=total, completed=completed, status="")
        self._bar = self._progress.tasks[self._progress.task_ids.index(task)]

    def warm_start_step(self, metrics: dict[str, Any]) -> None:
        """Log a supervised step."""
        self._write(WARM_START_METRICS, metrics)
        self._show(metrics["step"], f"loss {metrics['pg_loss']:.3f}")

    def step(self, metrics: dict[str, Any]) -> None:
        """Log a reinforcement-learning step."""
        self._write(METRICS, metrics)
        for name, value in metrics.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, metrics["step"])
        loss = metrics.get("pg_loss", float("nan"))
        reward = "" if metrics["reward"] is None else f"reward {metrics['reward']:.2f}  "
        self._show(metrics["step"], f"{reward}loss {loss:+.4f}")

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """Bring everything to the disk; a checkpoint must not be ahead of the metrics."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._writer.flush()

    def read_steps(self) -> list[dict[str, Any]]:
        """All reinforcement-learning steps of the run so far."""
        return [json.loads(line) for line in (self.path / METRICS).read_text().splitlines()]

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def close(self) -> None:
        self.flush()
        self._progress.stop()
        self._writer.close()
        for file in self._files.values():
            file.close()

    def _write(self, name: str, metrics: dict[str, Any]) -> None:
        finite = {
            key: value if value is not None and math.isfinite(value) else None
            for key, value in metrics.items()
        }  # JSON has no NaN
        self._files[name].write(json.dumps(finite) + "\n")
        self._files[name].flush()

    def _show(self, step: int, status: str) -> None:
        self._progress.update(self._bar.id, completed=step, status=status)
        if not self._console.is_terminal and step % max(self._bar.total // 10, 1) == 0:
            self.say(f"{self._bar.description} {step}/{self._bar.total}  {status}")


def _cut_back(path: Path, step: int) -> None:
    """Keep the lines up to `step`; one that a killed run has half written is no line."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] > step:
                break
        except json.JSONDecodeError:
            break
        kept.append(line + "\n")
    aside = path.with_suffix(".partial")
    aside.write_text("".join(kept))
    aside.replace(path)


def summarise(steps: list[dict[str, Any]]) -> dict[str, float | None]:
    """Mean reward over the first and over the last tenth of the steps; None where a step has none."""
    tenth = max(len(steps) // 10, 1)
    rewards = [step["reward"] for step in steps]
    return {"reward_first": _mean(rewards[:tenth]), "reward_last": _mean(rewards[-tenth:])}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
