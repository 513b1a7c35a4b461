"""The checkpoints in the folder of a run: their names, their order, which of them stay, and whether one is whole.

Nothing here knows what a checkpoint holds. It is written under another name, with a list of its files and what is in
them, flushed to the disk, and renamed: whatever kills the run, a folder by the name of a checkpoint is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_pg.step.agreement import gather

from .errors import RunError, agreed

NAME = "step_{:06d}_{:06d}"
"""The name of a checkpoint, of the numbers that order them: a later one is larger."""
PARTIAL, REMOVED = "partial_", "removed_"
"""What the name begins with while a checkpoint is written, and while it is removed."""
CONTENTS = "contents.json"
"""The file of a checkpoint that lists the others, each with its SHA-256."""


class CheckpointFolder:
    """The checkpoints of a run. A folder by a name that no run gives is none, and is left alone.

    Args:
        path: their folder, which all ranks share; need not exist.
        num_kept: older checkpoints are removed once a new one is whole.
    """

    def __init__(self, path: Path, num_kept: int) -> None:
        self.path, self._num_kept = path, num_kept

    def checkpoints(self, prefix: str = "") -> list[Path]:
        """Those that this process sees, oldest first; with a prefix, what is being written or removed."""
        pattern = prefix + re.sub("{.*?}", "([0-9]+)", NAME)
        found = []
        for path in self.path.glob(f"{prefix}*"):
            if match := re.fullmatch(pattern, path.name):
                numbers = tuple(map(int, match.groups()))
                if path.is_dir() and path.name == prefix + NAME.format(*numbers):
                    found.append((numbers, path))
        return [path for _, path in sorted(found)]

    def latest(self) -> Path | None:
        """The newest checkpoint, the same on all ranks, whatever a rank sees of a shared folder; every rank must call it.

        Raises:
            RunError: it is damaged, and the whole one before it is named; or a rank does not see what rank 0 sees.
        """
        name = None
        with agreed("--resume"):
            if dist.get_rank() == 0:
                name = self._newest_whole()
        (name, *_) = gather(name, dist.group.WORLD)
        with agreed("--resume"):
            if name is not None and not (self.path / name / CONTENTS).exists():
                raise RunError(
                    f"{self.path / name} is not there, and rank 0 sees it: --run-dir must be one folder that all nodes "
                    "share; where it is, try again"
                )
        return None if name is None else self.path / name

    def begin(self, name: str) -> Path:
        """An empty folder to write a checkpoint of that name into, after removing what a killed run has left; on rank 0."""
        for abandoned in self.checkpoints(PARTIAL):
            shutil.rmtree(abandoned)
        for abandoned in self.checkpoints(REMOVED):
            _remove(abandoned)
        partial = self.path / (PARTIAL + name)
        partial.mkdir(parents=True)
        return partial

    def complete(self, name: str) -> None:
        """Make a checkpoint of what has been written, and remove all but the last few; on rank 0."""
        partial = self.path / (PARTIAL + name)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        contents = {str(path.relative_to(partial)): _digest(path) for path in files}
        (partial / CONTENTS).write_text(json.dumps(contents, indent=1))
        _flush_all(partial)
        partial.rename(self.path / name)
        _flush(self.path)
        for old in self.checkpoints()[: -self._num_kept]:
            _remove(old)

    def _newest_whole(self) -> str | None:
        checkpoints = self.checkpoints()
        if not checkpoints:
            return None
        *older, newest = checkpoints
        if problem := _damage(newest):
            whole = next((path for path in reversed(older) if not _damage(path)), None)
            remedy = "no whole one is before it, so start anew without --resume"
            if whole:
                remedy = f"the whole one before it is {whole}: to go on from there, mv {newest} {newest}.damaged"
            raise RunError(f"{newest} is damaged ({problem}); {remedy}")
        return newest.name


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, None where all are as they were written."""
    try:
        contents = json.loads((checkpoint / CONTENTS).read_text())
        changed = (name for name in contents if _digest(checkpoint / name) != contents[name])
        return next((f"{name} is not as it was written" for name in changed), None)
    except (OSError, ValueError) as error:
        return f"{CONTENTS}: {error}" if isinstance(error, ValueError) else str(error)


def _remove(checkpoint: Path) -> None:
    """Take a checkpoint's name from it, then remove it: what is half-removed must not look whole. A failure is a warning."""
    removed = checkpoint.with_name(REMOVED + checkpoint.name.removeprefix(REMOVED))
    try:
        checkpoint.rename(removed)
        shutil.rmtree(removed)
    except OSError as error:
        print(f"warning: the old checkpoint {checkpoint} cannot be removed: {error}", flush=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_all(folder: Path) -> None:
    """Everything in the folder, then the folder: Megatron's writer flushes its tensors alone."""
    for path in folder.iterdir():
        if path.is_dir():
            _flush_all(path)
        else:
            _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
