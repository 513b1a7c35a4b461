"""Rows of Parquet and JSON Lines files, one at a time, and what a run keeps of a file to know it again.

A JSON line is parsed by Python's `json`, which names what is wrong with it and refuses values that are nested too
deeply. Parquet is decoded by pyarrow, a few rows at a time: a dataset scanner would hold a whole row group in memory,
and a writer's default row group has a million rows.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_pg.rollout_files.schema import (
    COLUMNS,
    INTEGERS,
    NUMBER_OR_NUMBERS,
    NUMBERS,
    Row,
    RowError,
    shown,
)

try:
    import pyarrow as pa
    import pyarrow.parquet
except ImportError as error:
    raise ImportError(
        "rollout files are read with pyarrow, which is not installed: pip install 'megatron_pg[examples]', or "
        "pip install 'pyarrow>=15'"
    ) from error

BATCH_ROWS = 256
"""Rows of Parquet that are decoded at a time."""
BUFFER_BYTES = 1 << 16
"""Bytes of each Parquet column that are read from the disk at a time."""
END_BYTES = 1 << 16
"""Bytes at either end of a file that its fingerprint covers: all of a small one, and little of a large one to read."""

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")

FileAccount = tuple[str, int, str]
"""Name without its folder, bytes, and a fingerprint of the contents: the same on every rank, wherever the file lies."""

ParseRow = Callable[[], Row]
"""What parses one row, or raises a `RowError`: a rank calls it for its own rows alone."""


def is_json_lines(path: Path) -> bool:
    """Whether the name is that of a file of JSON Lines, in capitals or not; otherwise it is one of Parquet."""
    return path.suffix.lower() in JSON_SUFFIXES


def open_rows(path: Path, start: int, stack: contextlib.ExitStack) -> Iterator[ParseRow]:
    """The rows of a file from row `start` on, one function each.

    Args:
        path: a file with a rollout file's name.
        start: so many rows are passed.
        stack: closes the file.

    Raises:
        ValueError: the file is not what its name says, or has fewer rows.
    """
    passed, rows = (_json_lines if is_json_lines(path) else _parquet_rows)(path, start, stack)
    if passed < start:
        raise ValueError(
            f"{path} has {passed} rows and the checkpoint stopped after {start}: the file has changed"
        )
    return rows


def account_of(path: Path, limit: int | None = None) -> FileAccount:
    """The account of a file as it is now, or of its first `limit` bytes."""
    size = path.stat().st_size if limit is None else min(limit, path.stat().st_size)
    with path.open("rb") as file:
        ends = file.read(min(size, END_BYTES))
        start = file.seek(max(size - END_BYTES, 0))
        ends += file.read(size - start)
    return path.name, size, hashlib.sha256(ends).hexdigest()[:16]


def _json_lines(
    path: Path, start: int, stack: contextlib.ExitStack
) -> tuple[int, Iterator[ParseRow]]:
    """One JSON object a line; blank lines are no rows."""
    file = stack.enter_context(path.open("rb"))
    lines = (line for line in file if not line.isspace())
    passed = sum(1 for _ in itertools.islice(lines, start))
    return passed, (functools.partial(_parsed, line) for line in lines)


def _parsed(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        found = f"no JSON ({error}): {shown(line[:40].decode(errors='replace').strip())}"
        raise RowError("the line", found, "one JSON object") from None
    if not isinstance(row, dict):
        raise RowError("the line", shown(row), "one JSON object")
    return row


def _parquet_rows(
    path: Path, start: int, stack: contextlib.ExitStack
) -> tuple[int, Iterator[ParseRow]]:
    try:
        # Columns are read as they are decoded; otherwise those of a whole row group are held in memory first.
        file = pa.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: expected a Parquet file ({error})") from error
    stack.callback(file.close)
    counts = Counter(name for name in file.schema_arrow.names if name in COLUMNS)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(
                f"{path} has {count} columns {name}, expected one: write the file anew with one of them"
            )
    left, groups = start, list(range(file.num_row_groups))
    while groups and (num_rows := file.metadata.row_group(groups[0]).num_rows) <= left:
        left -= num_rows
        groups.pop(0)
    batches = file.iter_batches(BATCH_ROWS, groups, list(counts), use_threads=False)
    rows = itertools.chain.from_iterable(map(_rows_of, batches))
    return min(start, file.metadata.num_rows), itertools.islice(rows, left, None)


def _rows_of(batch: Any) -> Iterator[ParseRow]:
    values = {name: _values_of(batch.column(name), COLUMNS[name]) for name in batch.schema.names}

    def row(index: int) -> Row:
        return {name: value(index) for name, value in values.items()}

    return (functools.partial(row, index) for index in range(batch.num_rows))


def _values_of(column: Any, expected: str) -> Callable[[int], Any]:
    """The value of each row: a slice of one array where the type of the column settles that of all elements.

    Elsewhere it is a Python value, to be looked at element by element: among integers, null makes a float column.
    """
    kinds = {INTEGERS: "i", NUMBERS: "ifb", NUMBER_OR_NUMBERS: "ifb"}.get(expected, "")
    if kinds and isinstance(column, (pa.ListArray, pa.LargeListArray)):
        elements = column.values.to_numpy(zero_copy_only=False)
        if elements.dtype.kind in kinds:
            offsets, is_valid = column.offsets.to_numpy(), column.is_valid()
            return lambda row: (
                elements[offsets[row] : offsets[row + 1]] if is_valid[row].as_py() else None
            )
    return lambda row: column[row].as_py()
