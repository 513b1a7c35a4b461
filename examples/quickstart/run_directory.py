"""The folder of a run: one run at a time, and no earlier run is ever overwritten."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from .errors import RunError

LOCK, LOG = "lock", "warm_start.jsonl"
LOCK_PATIENCE = 5.0
"""Seconds in which the processes of a killed run may still be ending, and hold its lock."""


class RunDirectory:
    """Claims a folder for this process until it ends; rank 0 alone makes one.

    Without `resume` an earlier run in it is moved aside, to `<name>.1` or the next free number.

    Args:
        path: the folder, made where absent. Behind a symbolic link it is made and moved where the link points.
        resume: go on with the run that is in it.

    Raises:
        RunError: another process is writing to it, or it holds something that is no run.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path = path.resolve()
        path.mkdir(parents=True, exist_ok=True)
        contents = {child.name for child in path.iterdir()} - {LOCK}
        if contents and LOG not in contents:
            raise RunError(f"{path} is not empty and holds no run: give another --run-dir")
        self._lock = _locked(path)
        if contents and not resume:
            number = 1
            while (aside := path.with_name(f"{path.name}.{number}")).exists():
                number += 1
            path.rename(aside)
            print(f"the earlier run in {path} is now in {aside}", flush=True)
            path.mkdir()
            self._lock = _locked(path)


def _locked(path: Path) -> IO[str]:
    """An open, locked file; the system lets go of it when the process and those forked from it end, however they end."""
    file = open(path / LOCK, "w")
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                file.close()
                raise RunError(
                    f"another run is writing to {path}: stop it, or give another --run-dir"
                ) from error
        time.sleep(0.05)


class StopSignal:
    """Whether the run was asked to stop (SIGTERM, Ctrl-C); the loop looks at it where it can stop whole."""

    def __init__(self) -> None:
        self._received = False
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self._received = True

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked; every rank must call it, and all get the same answer."""
        received = torch.tensor(int(self._received), device=device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        return bool(received)


def die_with_launcher() -> None:
    """Ask the system to kill this process when torchrun is killed, which would otherwise leave its workers running.

    Processes forked from this one end with it too: Megatron-Core 0.16 writes checkpoints in such, and one that went on
    after a kill would write into the run that is resumed, and hold its lock.

    On Linux; elsewhere nothing happens, and such processes have to be ended by hand before a run is resumed.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        die_with_parent = functools.partial(
            ctypes.CDLL(None).prctl, set_parent_death_signal, signal.SIGKILL
        )
        die_with_parent()
        os.register_at_fork(after_in_child=die_with_parent)
