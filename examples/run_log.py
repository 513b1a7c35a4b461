"""The folder of a run: claimed by one run at a time, with its checkpoints, metrics, summary and
picture.
"""

import itertools
import json
import os
import re
import shutil
import statistics
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock
from live_line import LiveLine, shown_numbers
from report import names_of, read_run, report
from rollout_log import RolloutLog
from run_folder import DamagedFile, append_step, cut_back, lock_folder, read_lines, replace_text
from torch.utils.tensorboard import SummaryWriter

from megatron_pg import PolicyLossConfig

FREE_TO_CHANGE = {"run_dir", "resume", "save_interval", "config", "write_config", "settings_file"}
"""Flags that may be others in a resumed run: what it computes does not depend on them."""
IN_SUMMARY = ("loss_aggregation", "seed", "tensor_model_parallel_size", "context_parallel_size")
LOGS = {"warm_start": "warm_start.jsonl", "step": "metrics.jsonl"}


def checkpoints(run_dir: Path) -> list[Path]:
    """List the whole checkpoints of a run, oldest first: folders named `step_...`, and nothing
    else.
    """
    named = re.compile(r"step_\d{6,}_\d{6,}")
    paths = run_dir.glob("checkpoints/*")
    whole = [path for path in paths if named.fullmatch(path.name) and path.is_dir()]
    return sorted(whole, key=lambda path: [int(number) for number in path.name.split("_")[1:]])


def save_checkpoint(run_dir: Path, progress: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write every rank's state under another name, and rename it when all are done; two checkpoints
    are kept.

    Every rank calls it. An OSError says that the folder takes no more.
    """
    partial = run_dir / "checkpoints" / "partial"
    final = partial.with_name("step_{warm_start:06d}_{step:06d}".format(**progress))
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    with open(partial / f"rank_{dist.get_rank()}.pt", "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's name for a write that ended short
            raise OSError(f"{file.name}: {error}") from error
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()
    if dist.get_rank() == 0 and not final.is_dir():
        partial.rename(final)
        for old in checkpoints(run_dir)[:-2]:
            shutil.rmtree(old, ignore_errors=True)


def read_checkpoint(folder: Path, rank: int) -> dict[str, Any]:
    """Read the state of a rank, and check it: torch.load does not compare the checksums that
    torch.save writes.
    """
    path = folder / f"rank_{rank}.pt"
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"another checksum than was written of {damaged}")
        state: dict[str, Any] = torch.load(path, map_location="cpu")
    except Exception as error:  # a damaged file fails in many ways
        kept = checkpoints(folder.parents[1])
        older = kept[: kept.index(folder)]
        other = f"the one before is {older[-1]}" if older else "there is none before it"
        raise DamagedFile(
            f"{path} cannot be read ({type(error).__name__}: {error}): move {folder} elsewhere; "
            f"{other}"
        ) from error
    return state


def read_settings(run_dir: Path) -> dict[str, str]:
    """Read the flags of the run in a folder."""
    path = run_dir / "settings.json"
    try:
        return {name: str(value) for name, value in dict(json.loads(path.read_text())).items()}
    except (ValueError, TypeError) as error:
        raise DamagedFile(
            f"{path} is damaged ({error}): the flags of the run in {run_dir} are not known; "
            f"restore it, or give another folder"
        ) from error


def claim_folder(args: Namespace, world_size: int) -> FileLock:
    """Lock the run's folder, on rank 0; an earlier run in it is moved aside, or is the one to be
    resumed.

    A ValueError: another run is writing to it, it holds something else or a run of other settings,
    or cannot be written.
    """
    try:
        return _claimed(args, world_size)
    except OSError as error:
        raise ValueError(f"--run-dir {args.run_dir} cannot be written: {error}") from error


def _claimed(args: Namespace, world_size: int) -> FileLock:
    folder: Path = args.run_dir.resolve()  # a symbolic link stays one
    settings = folder / "settings.json"
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder, Path(f"{folder}.lock"))
    mine = {name: str(value) for name, value in vars(args).items() if name not in FREE_TO_CHANGE}
    mine["world_size"] = str(world_size)
    if folder.exists() and any(folder.iterdir()):
        if not settings.exists():
            raise ValueError(f"--run-dir {folder} is not empty and holds no run: give another")
        if args.resume:
            _refuse_other_settings(folder, mine)
        else:
            numbered = (Path(f"{folder}.{number}") for number in itertools.count(1))
            aside = next(path for path in numbered if not path.exists())
            folder.rename(aside)
            print(f"the earlier run in {folder} is now in {aside}", flush=True)
    elif args.resume:
        print(f"there is no run in {folder} to resume: this one starts anew", flush=True)
    folder.mkdir(exist_ok=True)
    replace_text(settings, json.dumps(mine, indent=2))
    replace_text(folder / "settings.yaml", args.settings_file)
    return lock


def _refuse_other_settings(folder: Path, mine: dict[str, str]) -> None:
    theirs = read_settings(folder)
    for name, value in mine.items():
        then = theirs.get(name)
        extends = name == "train_iters" and str(then).isdigit() and int(str(then)) < int(value)
        if then != value and not extends:
            raise ValueError(
                f"{folder} was made with {name} {then} and this run has {value}: a resumed run "
                f"repeats what the first would "
                "have done, so give the same (or a larger --train-iters), or start anew without "
                "--resume"
            )


class Log:
    """The folder's logs, on rank 0, cut back to where a resumed run goes on; `progress` is read for
    every line.

    `texts` are those of the tokens, by id.
    """

    def __init__(
        self, args: Namespace, progress: Mapping[str, Any], texts: Mapping[int, str] | None = None
    ) -> None:
        self._args, self._folder, self._progress = args, args.run_dir, progress
        self._totals = {"warm_start": args.warm_start_iters, "step": args.train_iters}
        self._settings = {name: getattr(args, name) for name in IN_SUMMARY}
        self._latest, self._line = time.monotonic(), LiveLine()
        self._events = SummaryWriter(f"{args.run_dir}/tensorboard", purge_step=progress["step"] + 1)
        for phase, name in LOGS.items():
            cut_back(args.run_dir / name, progress[phase])
        self._rollouts = RolloutLog(args.run_dir, progress["step"])
        replace_text(args.run_dir / "tokens.json", json.dumps(texts or {}))

    def write(
        self,
        phase: str,
        values: Mapping[str, float | None],
        answers: Iterable[str] = (),
        rollouts: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """The line of a step, and rows of its rollouts. A tenth of the lines is shown, with a few
        of their answers.
        """
        step, total = self._progress[phase], self._totals[phase]
        seconds, self._latest = time.monotonic() - self._latest, time.monotonic()
        path = self._folder / LOGS[phase]
        known = append_step(path, step, values, seconds=round(seconds, 3))
        for name, value in known.items():
            self._events.add_scalar(f"{phase}/{name}", value, step)
        self._rollouts.write(step, rollouts)
        name = phase.replace("_", " ")
        self._line.show(name, step, total, shown_numbers(known, seconds))
        if step % max(total // 10, 1) == 0:
            shown = [f"{name} {known[name]:z.3f}" for name in ("reward", "loss") if name in known]
            print(f"{name} {step}/{total}:", *shown, flush=True)
            print(*(f"    {answer}\n" for answer in answers), sep="", end="", flush=True)

    def finish(self, **summary: Any) -> None:
        """Writes summary.json, report.png and rollouts.html."""
        self._line.close()
        warm_start, lines = (read_lines(self._folder / name) for name in LOGS.values())
        tenth = max(len(lines) // 10, 1)
        for name, part in {"reward_first": lines[:tenth], "reward_last": lines[-tenth:]}.items():
            summary[name] = statistics.fmean(line["reward"] for line in part)
        summary |= self._settings | {"steps": len(lines), "world_size": dist.get_world_size()}
        summary |= {"torch": torch.__version__, "megatron_core": metadata.version("megatron-core")}
        summary["seconds"] = sum(line["seconds"] for line in [*warm_start, *lines])
        replace_text(self._folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        run = read_run(self._folder)
        report([run]).savefig(self._folder / "report.png", dpi=110)
        title = f"{run.name} · {names_of([run])[0]}"
        self._rollouts.write_page(PolicyLossConfig.from_args(self._args), title)
        self._events.close()
        rewards = "reward {reward_first:.2f} -> {reward_last:.2f} (first, last tenth of the steps)"
        held_out = "held-out {held_out_before:.2f} -> {held_out_after:.2f} (before, after)"
        print(f"{rewards}, {held_out}".format(**summary))
        print(f"see {self._folder}/report.png, and the answers in {self._folder}/rollouts.html")
