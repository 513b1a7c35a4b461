"""Files of a run's folder, for train_grpo.py and trainer/: one writer at a time, and whole or
absent.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

LOCK_PATIENCE = 5.0
"""Seconds in which the processes of a killed run may still be ending, and hold its lock."""


class DamagedFile(ValueError):
    """A file of a run that is not as the run wrote it; the message names the file and what to
    do.
    """


def lock_folder(folder: Path, lock_file: Path) -> FileLock:
    """Keep other runs out of a folder, until the lock is released or the process ends."""
    lock = FileLock(lock_file, timeout=LOCK_PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        message = f"another run is writing to {folder}: stop it, or give another folder"
        raise ValueError(message) from None
    return lock


def replace_text(path: Path, text: str) -> None:
    """Write a file whole: a process that is killed leaves the old text or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the steps of a run. A last line without its end is none: a killed run leaves it half
    written.
    """
    steps = []
    texts = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, text in enumerate(texts, 1):
        try:
            steps.append({**json.loads(text)})
            int(steps[-1]["step"])
        except (ValueError, TypeError, KeyError):
            raise DamagedFile(
                f"{path} line {number} is no line of a run, found {text[:40]!r}: mend or remove "
                f"the line"
            ) from None
    return steps


def cut_back(path: Path, step: int) -> None:
    """Keep the lines of the steps up to `step`."""
    kept = [line for line in read_lines(path) if line["step"] <= step]
    replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def append_step(
    path: Path | None, step: int, metrics: Mapping[str, float | None], **more: Any
) -> dict[str, float]:
    """Write the line of a step where there is a file, and return its finite metrics: JSON has no
    NaN.
    """
    known = {name: x for name, x in metrics.items() if x is not None and math.isfinite(x)}
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, **dict.fromkeys(metrics), **known, **more}) + "\n")
    return known
