"""Rollout files: file names, and rows one at a time."""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_pg.rollout_files.schema import READ, ParseRow, Row, shown

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".zip")


def is_json(path: Path) -> bool:
    """Return whether a rollout file's name is for JSON Lines, not Parquet, in any case."""
    return path.suffix.lower() in JSON_SUFFIXES


def files_of(paths: Sequence[str | Path]) -> list[Path]:
    """List the named files, and the rollout files of each named directory by name."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"--rollout-files: {path} does not exist")
        listed = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [file for file in listed if _is_rollout_file(file)]
        if path.is_dir() and (hidden := [file for file in found if file.name.startswith(".")]):
            raise ValueError(
                f"--rollout-files: {hidden[0]} is hidden, so it may be incomplete. Pass it by "
                "name, or move it elsewhere."
            )
        if not found:
            problem = "has no rollout file that ends" if path.is_dir() else "does not end"
            kinds = ", ".join(JSON_SUFFIXES + PARQUET_SUFFIXES)
            raise ValueError(f"--rollout-files: {path} {problem} in one of {kinds}")
        files += found
    if not files:
        raise ValueError("--rollout-files requires at least one file")
    if not all(map(is_json, files)):  # report a missing pyarrow before the first row
        import megatron_pg.rollout_files.parquet_file  # noqa: F401
    return files


def _is_rollout_file(path: Path) -> bool:
    """Return whether the name is a rollout file's. Raise a ValueError if it is not a plain file."""
    name = path
    while name.suffix.lower() in COMPRESSED_SUFFIXES:
        name = name.with_suffix("")
    if name.suffix.lower() not in JSON_SUFFIXES + PARQUET_SUFFIXES:
        return False
    if name != path:
        raise ValueError(
            f"{path} is compressed ({path.suffix}), expected a plain file. Decompress it (Parquet "
            "compresses within the file), or move it elsewhere."
        )
    if path.is_dir():
        raise ValueError(
            f"--rollout-files: {path} is a folder, but its name is a file's. Pass the folder "
            "itself for the files in it, or move it elsewhere."
        )
    if not path.is_file():
        raise ValueError(
            f"--rollout-files: {path} is a pipe, a socket, a device or a broken link, which a "
            "resumed run cannot read again. Write the rows to a file."
        )
    return True


def open_rows(path: Path, start: int) -> tuple[int, Iterator[ParseRow]]:
    """Skip up to `start` rows of a file. Return the number of skipped rows, smaller for a short
    file, and the remaining rows.

    Raises:
        ValueError: the file's content does not match its name.
    """
    if is_json(path):
        passed, rows = 0, _lines(path)
    else:
        from megatron_pg.rollout_files.parquet_file import open_parquet

        passed, rows = open_parquet(path, start)
    passed += sum(1 for _ in itertools.islice(rows, start - passed))
    return passed, rows


def _lines(path: Path) -> Iterator[ParseRow]:
    """Yield the rows of JSON Lines, one object per line. Blank lines are skipped."""
    with path.open("rb") as file:
        yield from (functools.partial(_parsed, line) for line in file if line.strip())


def _parsed(line: bytes) -> Row:
    try:
        row = json.loads(line, object_pairs_hook=_with_distinct_keys)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"not JSON ({error}): {shown(line[:40].decode(errors='replace').strip())}"
        raise ValueError(f"the line is {problem}, expected one JSON object") from error
    if not isinstance(row, dict):
        raise ValueError(f"the line is {shown(row)}, expected one JSON object")
    return row


def _with_distinct_keys(pairs: list[tuple[str, Any]]) -> Row:
    """Raise a ValueError if a JSON object has a known column twice. Python would take the last."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1 and key in READ:
            raise ValueError(f"{key} is given {count} times, expected one value")
    return dict(pairs)
