"""Wait for processes while they make progress, however slow the machine is.

A thread makes progress while it runs, while it is ready to run and waits for a core, and while it
waits for a disk. Linux counts the first two in /proc/PID/task/TID/schedstat, whose man page is
proc_pid_schedstat. A process that works makes a second of progress a second, whatever runs beside
it. Processes that wait for each other (in a collective of gloo, for a pipe, for a lock, in a sleep)
make almost none: torchrun, which looks at its ranks ten times a second, makes a few percent.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds in which processes that do not hang make `BUSY_SHARE` as many seconds of progress
together."""
BUSY_SHARE = 0.25
INTERVAL = 0.5
"""Seconds between two looks."""
POLLERS = {"gloo_tcp_loop"}
"""Names of threads that do not count: each of gloo's dozens wakes a hundred times a second, whether
or not data comes. Data that comes wakes another thread too."""


class Watch:
    """Some processes and all that they start, told apart by their progress: slow ones go on, a hang
    is raised.

    The seconds of a hang are those in which this process runs too: a machine that stands still ages
    nobody. `pids` are the processes seen so far, also those whose parents have ended.
    """

    def __init__(self, pids: Iterable[int | None], patience: float = PATIENCE) -> None:
        self.pids = {pid for pid in pids if pid is not None}
        self.patience = patience
        self._age = self._progress = 0.0
        self._looked = time.monotonic()
        self._seconds = self._thread_seconds()

    def look(self) -> None:
        """Raise TimeoutError if the processes hang. A call soon after another does nothing."""
        elapsed = time.monotonic() - self._looked
        if elapsed < INTERVAL or not Path("/proc/self/schedstat").exists():
            return
        self._looked += elapsed
        before, self._seconds = self._seconds, self._thread_seconds()
        for thread, seconds in self._seconds.items():
            gained, state = max(0.0, seconds - before.get(thread, 0.0)), _state(thread)
            # Linux adds the wait for a core once it is over.
            waits = state == "D" or (state == "R" and not gained)
            self._progress += elapsed if waits else gained
        self._age += min(elapsed, 2 * INTERVAL)
        if self._progress >= BUSY_SHARE * self.patience:
            self._age = self._progress = 0.0
        elif self._age > self.patience:
            raise TimeoutError(
                f"processes {sorted(self.pids)} hang: {self._progress:.1f} seconds of progress "
                f"in the last {self.patience:g}"
            )

    def kill(self) -> None:
        self._thread_seconds()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _thread_seconds(self) -> dict[Path, float]:
        """Map each thread's folder in /proc to the seconds that it ran or waited for a core."""
        seconds = {}
        parents = list(self.pids)
        while parents:
            for thread in _entries(Path(f"/proc/{parents.pop()}/task")):
                if _text(thread / "comm").strip() in POLLERS:
                    continue
                running, waiting, *_ = [*map(int, _text(thread / "schedstat").split()), 0, 0]
                seconds[thread] = (running + waiting) / 1e9
                children = {int(pid) for pid in _text(thread / "children").split()} - self.pids
                self.pids |= children
                parents += children
        return seconds


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return list(folder.iterdir())
    return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _state(thread: Path) -> str:
    """Return R where a thread runs or could, D where it waits for a disk, and another letter where
    it waits for others.
    """
    return _text(thread / "stat").rpartition(")")[2][1:2]


def wait_until(
    condition: Callable[[], bool], pids: Iterable[int | None], patience: float = PATIENCE
) -> None:
    """Return once `condition()` holds. Raise TimeoutError if the processes that are to bring it
    about hang.
    """
    watch = Watch(pids, patience)
    while not condition():
        watch.look()
        time.sleep(0.01)


def communicate(process: subprocess.Popen[str], patience: float = PATIENCE) -> tuple[str, str]:
    """Return what a process prints until it ends. If it or one that it started hangs, kill all and
    raise TimeoutError.
    """
    watch = Watch([process.pid], patience)
    while True:
        try:
            return process.communicate(timeout=INTERVAL)
        except subprocess.TimeoutExpired:
            pass
        try:
            watch.look()
        except TimeoutError as error:
            watch.kill()
            raise TimeoutError(f"{error}; they said: {process.communicate()}") from None


def run(
    command: Iterable[str | Path], patience: float = PATIENCE, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command as `subprocess.run` does and capture its output. A hang ends as in
    `communicate`.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command], **(pipes | options)) as process:
        output, errors = communicate(process, patience)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
