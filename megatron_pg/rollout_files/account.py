"""What a position keeps of each rollout file, so that a run does not go on with others. Plain values, as in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megatron_pg.rollout_files.reader import is_json_lines

FileAccount = tuple[str, int, str]
"""Name without its folder, bytes, and a fingerprint of the contents: the same on every rank, wherever the file lies."""

END_BYTES = 1 << 16
"""Bytes at either end of a file that its fingerprint is of: all of a small one, and little of a large one to read."""


def account_of(path: Path) -> FileAccount:
    """The account of a file as it is now."""
    size = path.stat().st_size
    return path.name, size, _fingerprint(path, size)


def check_account(
    paths: Sequence[Path],
    found: Sequence[FileAccount],
    expected: Sequence[FileAccount],
    current: int,
) -> None:
    """Compares the files given with those of a position.

    Args:
        paths: the files given.
        found: their accounts.
        expected: the accounts that the position keeps.
        current: the file of the position; those before it have been passed.

    Raises:
        ValueError: naming the first file that differs, unless rows were only added after the last one.
    """
    for index, then in enumerate(expected):
        if index < len(found) and found[index] == then:
            continue
        is_last = index == len(expected) - 1
        if is_last and current <= index < len(found) and _has_grown(paths[index], then):
            continue
        now = _differing(paths[index], found[index], then) if index < len(found) else "is missing"
        raise ValueError(
            f"--rollout-files: file {index + 1} of the {len(expected)} that the checkpoint is of, {then[0]!r}, {now}: "
            "give the same files in the same order (further ones may follow them), or start anew"
        )


def _differing(path: Path, now: FileAccount, then: FileAccount) -> str:
    if now[0] != then[0]:
        return f"is now {path}"
    if now[1] != then[1]:
        return f"had {then[1]} bytes and {path} has {now[1]}"
    return f"had other contents than {path}"


def _has_grown(path: Path, then: FileAccount) -> bool:
    """Whether lines were added to what the file was. A Parquet file ends in its index, so it is another one."""
    name, size, fingerprint = then
    if path.name != name or not is_json_lines(path) or path.stat().st_size < size:
        return False
    return _fingerprint(path, size) == fingerprint


def _fingerprint(path: Path, size: int) -> str:
    """Of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(min(size, END_BYTES)))
        start = max(size - END_BYTES, 0)
        file.seek(start)
        digest.update(file.read(size - start))
    return digest.hexdigest()[:16]
