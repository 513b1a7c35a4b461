"""Runs of a study in forked processes: as many as there are cores, in the order of importance, until the time is up."""

import contextlib
import json
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")


@dataclass
class Job:
    """A run: `function(rank)` in each of its processes."""

    name: str
    seed: int
    processes: int
    function: Callable[..., Any]
    finish: Callable[[Any, float], None]
    """Takes the first rank's result, or the text of an error, and the seconds."""
    needs: Callable[[], bool] = lambda: True
    """True where what the run starts from is there."""
    needs_device: bool = False
    """True if the function takes the number of a GPU as `device=`."""


@dataclass
class _Started:
    job: Job
    folder: tempfile.TemporaryDirectory[str]
    processes: list[Any] = field(default_factory=list)
    began: float = 0.0
    device: int | None = None

    @property
    def result(self) -> Path:
        return Path(self.folder.name, "result")


def run(
    jobs: Sequence[Job], cores: int, seconds: float, longest: float, devices: Sequence[int] = ()
) -> list[Job]:
    """Run jobs in order within `seconds`; no run starts in the last `longest`. Returns those that did not finish.

    A job that needs a GPU gets the one with the fewest runs.
    """
    waiting, started, end = list(jobs), [], time.monotonic() + seconds
    while waiting or started:
        now = time.monotonic()
        if now >= end:
            break
        free = cores - sum(run.job.processes for run in started)
        for job in list(waiting):
            if now > end - longest or job.processes > free:
                break
            if job.needs():
                waiting.remove(job)
                places = [run.device for run in started]
                device = min(devices, key=places.count) if job.needs_device else None
                started.append(_start(job, device))
                free -= job.processes
        for run in [run for run in started if not any(p.is_alive() for p in run.processes)]:
            started.remove(run)
            _finish(run)
        if not started and now > end - longest:
            break
        time.sleep(0.05)
    for run in started:
        for process in run.processes:
            process.kill()
            process.join()
    return waiting + [run.job for run in started]


def _start(job: Job, device: int | None) -> _Started:
    run = _Started(job, tempfile.TemporaryDirectory(), began=time.monotonic(), device=device)
    for rank in range(job.processes):
        process = FORK.Process(
            target=_run_rank, args=(job, rank, run.folder.name, device), daemon=True
        )
        process.start()
        run.processes.append(process)
    return run


def _run_rank(job: Job, rank: int, folder: str, device: int | None) -> None:
    with open(f"{folder}/log", "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            result: Any = job.function(rank=rank, folder=folder, device=device)
        except BaseException:
            result = traceback.format_exc()
            Path(folder, f"error{rank}").write_text(result)
        if rank == 0:
            partial = Path(folder, "partial")
            partial.write_bytes(pickle.dumps(result))
            partial.rename(Path(folder, "result"))
    os._exit(0)


def _finish(run: _Started) -> None:
    errors = [path.read_text() for path in Path(run.folder.name).glob("error*")]
    result: Any = errors[0] if errors else "the process died"
    if not errors and run.result.exists():
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


def write_lines(path: Path, name: str, seed: int, lines: Sequence[dict[str, Any]]) -> None:
    """Append the steps of a run to a file of lines."""
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps({"arm": name, "seed": seed, **line}) + "\n")
