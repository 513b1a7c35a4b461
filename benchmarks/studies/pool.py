"""Runs of a study, each in a forked process: as many as there are cores, in the order of
importance, until the time is up.
"""

import contextlib
import json
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")


@dataclass
class Job:
    """A run: `function(folder=, device=)` in a process of its own."""

    name: str
    seed: int
    function: Callable[..., Any]
    finish: Callable[[Any, float], None]
    """Takes the result, or the text of an error, and the seconds."""
    needs_device: bool = False
    """True if the function takes the number of a GPU as `device=`."""
    seconds: float = 0.0
    """What such runs took before; 0 where none has finished."""


@dataclass
class _Started:
    job: Job
    folder: tempfile.TemporaryDirectory[str]
    process: Any = None
    began: float = 0.0
    device: int | None = None

    @property
    def result(self) -> Path:
        return Path(self.folder.name, "result")

    @property
    def last_step(self) -> str:
        """The last line of the run's output that says where it is."""
        lines = Path(self.folder.name, "log").read_text().splitlines()
        return next((x for x in reversed(lines) if x.startswith("step ")), "before its first step")


def run(
    jobs: Sequence[Job], cores: int, seconds: float, longest: float, devices: Sequence[int] = ()
) -> list[Job]:
    """Run jobs in order within `seconds`. Returns those that did not finish.

    A job starts where what such runs took before, or else `longest`, still fits; where it does not,
    a shorter one behind it starts. What runs take is corrected by the runs that have finished in
    this call. A job that needs a GPU gets the one with the fewest runs.
    """
    waiting, started, end = list(jobs), [], time.monotonic() + seconds
    paces: list[float] = []
    while waiting or started:
        now = time.monotonic()
        if now >= end:
            break
        pace = statistics.median(paces) if paces else 1.0
        free = cores - len(started)
        for job in list(waiting):
            if not free:
                break
            if now + _expected(job, longest, pace) <= end:
                waiting.remove(job)
                places = [run.device for run in started]
                device = min(devices, key=places.count) if job.needs_device else None
                started.append(_start(job, device))
                free -= 1
        if not started:
            break
        for run in [run for run in started if not run.process.is_alive()]:
            started.remove(run)
            if _finish(run) and run.job.seconds:
                paces.append((now - run.began) / run.job.seconds)
        time.sleep(0.05)
    if waiting:
        shortest = min(_expected(job, longest, 1.0) for job in waiting)
        about = f", the shortest of about {shortest:.0f} s" if shortest else ""
        print(f"{len(waiting)} runs not begun{about}", flush=True)
    for run in started:
        print(
            f"{run.job.name}, seed {run.job.seed}: cut off after "
            f"{time.monotonic() - run.began:.0f} s,"
            f" {run.last_step}",
            flush=True,
        )
        run.process.kill()
        run.process.join()
    return waiting + [run.job for run in started]


def _expected(job: Job, longest: float, pace: float) -> float:
    return job.seconds * pace if job.seconds else longest


def _start(job: Job, device: int | None) -> _Started:
    run = _Started(job, tempfile.TemporaryDirectory(), began=time.monotonic(), device=device)
    run.process = FORK.Process(target=_run, args=(job, run.folder.name, device), daemon=True)
    run.process.start()
    return run


def _run(job: Job, folder: str, device: int | None) -> None:
    with open(f"{folder}/log", "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            result: Any = job.function(folder=folder, device=device)
        except BaseException:
            result = traceback.format_exc()
        partial = Path(folder, "partial")
        partial.write_bytes(pickle.dumps(result))
        partial.rename(Path(folder, "result"))
    os._exit(0)


def _finish(run: _Started) -> bool:
    """Hand a run's result on, and say if it did not fail."""
    result: Any = "the process died"
    if run.result.exists():
        result = pickle.loads(run.result.read_bytes())
    seconds = time.monotonic() - run.began
    failed = isinstance(result, str)
    print(
        f"{run.job.name}, seed {run.job.seed}: {'FAILED' if failed else 'done'} in {seconds:.1f} s",
        flush=True,
    )
    if failed:
        print(result[-2000:], flush=True)
    run.job.finish(result, seconds)
    with contextlib.suppress(OSError):
        run.folder.cleanup()
    return not failed


def write_lines(path: Path, name: str, seed: int, lines: Sequence[dict[str, Any]]) -> None:
    """Append the steps of a run to a file of lines."""
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps({"arm": name, "seed": seed, **line}) + "\n")
