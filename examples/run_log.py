"""The folder of a run: claimed by one run at a time, with its checkpoints, metrics, summary and picture."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch.utils.tensorboard import SummaryWriter

FREE_TO_CHANGE = {"run_dir", "resume", "save_interval"}
"""Flags that may be others in a resumed run: what it computes does not depend on them."""
LOCK_PATIENCE = 5.0
"""Seconds in which the processes of a killed run may still be ending, and hold its lock."""
CURVES = {
    "reward": "mean reward",
    "response_length": "response length (tokens)",
    "pg_loss": "policy-gradient loss",
    "clipped_ratio_fraction": "clip fraction",
    "kl_new_old": "KL (old || new), nats",
    "grad_norm": "gradient norm",
}
IN_SUMMARY = ("loss_aggregation", "seed", "tensor_model_parallel_size", "context_parallel_size")
LOGS = {"warm_start": "warm_start.jsonl", "step": "metrics.jsonl"}


def checkpoints(run_dir: Path) -> list[Path]:
    """The whole ones of a run, oldest first; what has another name is none."""
    named = re.compile(r"step_\d{6,}_\d{6,}")
    found = [path for path in run_dir.glob("checkpoints/*") if named.fullmatch(path.name)]
    return sorted(found, key=lambda path: [int(number) for number in path.name.split("_")[1:]])


def save_checkpoint(run_dir: Path, progress: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Writes every rank's state, and keeps two checkpoints; every rank calls it.

    They are written under another name and renamed when every rank is done: what is named `step_...` is whole.
    """
    partial = run_dir / "checkpoints" / "partial"
    final = partial.with_name("step_{warm_start:06d}_{step:06d}".format(**progress))
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        with open(partial / f"rank_{dist.get_rank()}.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        free = ""
        if partial.exists():
            free = f"; {shutil.disk_usage(partial).free // 2**20} MiB are free there"
        sys.exit(f"error: {partial} cannot be written (rank {dist.get_rank()}): {error}{free}")
    dist.barrier()
    if dist.get_rank() == 0 and not final.exists():
        partial.rename(final)
        for old in checkpoints(run_dir)[:-2]:
            shutil.rmtree(old, ignore_errors=True)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """This rank's state; every rank calls it."""
    if dist.get_rank() == 0:
        print(f"resuming from {folder}", flush=True)
    state: dict[str, Any] = torch.load(folder / f"rank_{dist.get_rank()}.pt", map_location="cpu")
    return state


def claim_folder(args: argparse.Namespace, world_size: int, rank: int = 0) -> FileLock | None:
    """The lock of the run's folder, for rank 0; an earlier run in it is moved aside, or is the one to be resumed.

    Raises:
        ValueError: another run is writing to it, it holds something else, or a run of other settings, or it cannot be
            written.
    """
    if rank > 0:
        return None
    try:
        return _claimed(args, world_size)
    except OSError as error:
        raise ValueError(f"--run-dir {args.run_dir} cannot be written: {error}") from error


def _claimed(args: argparse.Namespace, world_size: int) -> FileLock:
    folder: Path = args.run_dir.resolve()  # a symbolic link stays one
    settings = folder / "settings.json"
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=LOCK_PATIENCE)
    except Timeout:
        raise ValueError(
            f"--run-dir {folder}: another run is writing to it; give another"
        ) from None
    mine = {name: str(value) for name, value in vars(args).items() if name not in FREE_TO_CHANGE}
    mine["world_size"] = str(world_size)
    if folder.exists() and any(folder.iterdir()):
        if not settings.exists():
            raise ValueError(f"--run-dir {folder} is not empty and holds no run: give another")
        if args.resume:
            _refuse_other_settings(folder, json.loads(settings.read_text()), mine)
        else:
            numbered = (Path(f"{folder}.{number}") for number in itertools.count(1))
            aside = next(path for path in numbered if not path.exists())
            folder.rename(aside)
            print(f"the earlier run in {folder} is now in {aside}", flush=True)
    elif args.resume:
        print(f"there is no run in {folder} to resume: this one starts anew", flush=True)
    folder.mkdir(exist_ok=True)
    settings.write_text(json.dumps(mine, indent=2))
    return lock


def _refuse_other_settings(folder: Path, theirs: dict[str, str], mine: dict[str, str]) -> None:
    for name, value in mine.items():
        then = theirs.get(name)
        extends = name == "train_iters" and then is not None and int(then) < int(value)
        if then != value and not extends:
            raise ValueError(
                f"{folder} was made with {name} {then} and this run has {value}: a resumed run repeats what the first would "
                "have done, so give the same (or a larger --train-iters), or start anew without --resume"
            )


def report(steps: Sequence[Mapping[str, Any]]) -> Figure:
    """The curves of a run: the points of a short one, and over those of a long one the mean of the last fiftieth."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    for axis, (name, label) in zip(figure.subplots(2, 3).flat, CURVES.items(), strict=True):
        known = [(step["step"], step[name]) for step in steps if step.get(name) is not None]
        numbers, values = torch.tensor(known, dtype=torch.float64).reshape(-1, 2).T
        window = len(known) // 50
        marker = "o" if len(known) < 20 else None
        axis.plot(numbers, values, color="C0", marker=marker, alpha=0.3 if window > 1 else 1.0)
        if window > 1:
            axis.plot(numbers[window - 1 :], values.unfold(0, window, 1).mean(1), color="C0")
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axis.set(title=label if known else f"{label}: not reported", xlabel="step")
        axis.grid(alpha=0.3)
    return figure


class Log:
    """What rank 0 leaves in the folder, cut back to where a resumed run goes on.

    Args:
        args: the flags of the run.
        progress: its `warm_start` and `step` so far; the log reads them for every line.
    """

    def __init__(self, args: argparse.Namespace, progress: Mapping[str, Any]) -> None:
        self._folder, self._progress = args.run_dir, progress
        self._totals = {"warm_start": args.warm_start_iters, "step": args.train_iters}
        self._settings = {name: getattr(args, name) for name in IN_SUMMARY}
        self._latest = time.monotonic()
        events = f"{args.run_dir}/tensorboard"
        self._events = SummaryWriter(events, purge_step=progress["step"] + 1)
        for phase, name in LOGS.items():
            kept = [line for line in self._lines(phase) if line["step"] <= progress[phase]]
            partial = args.run_dir / f"{name}.partial"  # a kill leaves the one or the other
            partial.write_text("".join(json.dumps(each) + "\n" for each in kept))
            partial.replace(args.run_dir / name)

    def write(
        self, phase: str, values: Mapping[str, float | None], answers: Iterable[str] = ()
    ) -> None:
        """The line of a step; JSON has no NaN. A tenth of them is shown, with a few of their answers."""
        step, total = self._progress[phase], self._totals[phase]
        known = {name: x for name, x in values.items() if x is not None and math.isfinite(x)}
        seconds, self._latest = time.monotonic() - self._latest, time.monotonic()
        line = {"step": step, **dict.fromkeys(values), **known, "seconds": round(seconds, 3)}
        with open(self._folder / LOGS[phase], "a") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in known.items():
            self._events.add_scalar(f"{phase}/{name}", value, step)
        if step % max(total // 10, 1) == 0:
            shown = [f"{name} {known[name]:z.3f}" for name in ("reward", "loss") if name in known]
            print(f"{phase.replace('_', ' ')} {step}/{total}:", *shown, flush=True)
            print(*(f"    {answer}\n" for answer in answers), sep="", end="", flush=True)

    def finish(self, **summary: Any) -> None:
        """Writes summary.json and report.png."""
        lines = self._lines("step")
        tenth = max(len(lines) // 10, 1)
        for name, part in {"reward_first": lines[:tenth], "reward_last": lines[-tenth:]}.items():
            summary[name] = statistics.fmean(line["reward"] for line in part)
        summary |= self._settings | {"steps": len(lines), "world_size": dist.get_world_size()}
        summary |= {"torch": torch.__version__, "megatron_core": metadata.version("megatron-core")}
        summary["seconds"] = sum(line["seconds"] for phase in LOGS for line in self._lines(phase))
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        report(lines).savefig(self._folder / "report.png", dpi=110)
        self._events.close()
        print(
            "reward {reward_first:.2f} -> {reward_last:.2f}, held-out questions {held_out_before:.2f} -> "
            "{held_out_after:.2f}".format(**summary),
            f"; see {self._folder}/report.png",
            sep="",
        )

    def _lines(self, phase: str) -> list[dict[str, Any]]:
        """The steps so far; a line that a killed run has half written is none."""
        path = self._folder / LOGS[phase]
        texts = path.read_text().splitlines() if path.exists() else []
        return [json.loads(text) for text in texts if text.endswith("}")]
