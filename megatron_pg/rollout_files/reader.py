"""Rows of Parquet and JSON Lines files, one at a time, and what a run keeps of a file to know it again.

A JSON line is parsed by Python's `json`, which names what is wrong with it and refuses values that are nested too
deeply. Parquet is decoded by pyarrow, a few rows at a time: a dataset scanner would hold a whole row group in memory,
and a writer's default row group has a million rows.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_pg.head.ragged import Ragged
from megatron_pg.rollout_files.schema import COLUMNS, ENGINE_COLUMNS, Row, RowError, shown

try:
    import pyarrow as pa
    import pyarrow.parquet
except ImportError as error:
    remedy = "pip install 'megatron_pg[tools]', or pip install 'pyarrow>=15'"
    raise ImportError(f"rollout files need pyarrow, which is not installed: {remedy}") from error

BATCH_ROWS = 256
"""Rows of Parquet that are decoded at a time."""
BUFFER_BYTES = 1 << 16
"""Bytes of each Parquet column that are read from the disk at a time."""
END_BYTES = 1 << 16
"""Bytes at either end of a file that its fingerprint covers: all of a small one, and little of a large one to read."""

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".zip")

logger = logging.getLogger("megatron_pg")
_unchecked: list[Path] = []
"""The first file without page checksums that this process has read."""

READ = (*COLUMNS, *ENGINE_COLUMNS.values())
"""Columns that are read."""
FileAccount = tuple[str, int, str]
"""Name without its folder, bytes, and a fingerprint of the contents: the same on every rank, wherever the file lies."""

ParseRow = Callable[[], Row]
"""Parser of one row, which raises a `RowError`: a rank calls it for its own rows alone."""


def is_json_lines(path: Path) -> bool:
    """Return whether the name is of a file of JSON Lines, in capitals or not; any other is of Parquet."""
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
                f"--rollout-files: {hidden[0]} is hidden, as files are that are not yet written or not meant to be read: "
                "give it by its own name, or move it elsewhere"
            )
        if not found:
            problem = "holds no rollout file that ends" if path.is_dir() else "does not end"
            kinds = ", ".join(JSON_SUFFIXES + PARQUET_SUFFIXES)
            raise ValueError(f"--rollout-files: {path} {problem} in one of {kinds}")
        files += found
    if not files:
        raise ValueError("--rollout-files: give at least one file")
    return files


def _is_rollout_file(path: Path) -> bool:
    """Return whether the name is of a rollout file; refuse a file of such a name that cannot be read."""
    name = path
    while name.suffix.lower() in COMPRESSED_SUFFIXES:
        name = name.with_suffix("")
    if name.suffix.lower() not in JSON_SUFFIXES + PARQUET_SUFFIXES:
        return False
    if name != path:
        raise ValueError(
            f"{path} is compressed ({path.suffix}), expected a plain file: decompress it (Parquet is compressed within "
            "the file), or move it elsewhere"
        )
    if path.is_dir():
        raise ValueError(
            f"--rollout-files: {path} is a folder, expected a file by its name: give the folder itself for the files "
            "in it, or move it elsewhere"
        )
    if not path.is_file():
        raise ValueError(
            f"--rollout-files: {path} is a pipe, a socket, a device or a link to nothing, expected a file: a resumed run "
            "reads it again; write the rows to a file"
        )
    return True


@contextmanager
def open_rows(path: Path, start: int) -> Iterator[Iterator[ParseRow]]:
    """Open the rows of a file with a rollout file's name, from row `start` on.

    Raises:
        ValueError: the file is not what its name says, or has fewer rows.
    """
    opened = path.open("rb") if is_json_lines(path) else _parquet_file(path)
    with opened as file:
        if not is_json_lines(path):
            passed, rows = _parquet_rows(path, file, start)
        else:  # one JSON object a line; blank lines are no rows
            passed, rows = 0, (functools.partial(_parsed, line) for line in file if line.strip())
        passed += sum(1 for _ in itertools.islice(rows, start - passed))
        if passed < start:
            raise ValueError(
                f"{path} has {passed} rows and the checkpoint stopped after {start}: the file has changed"
            )
        yield rows


def account_of(path: Path, limit: int | None = None) -> FileAccount:
    """Return the account of a file as it is now, or of its first `limit` bytes."""
    size = path.stat().st_size if limit is None else min(limit, path.stat().st_size)
    with path.open("rb") as file:
        ends = file.read(min(size, END_BYTES))
        start = file.seek(max(size - END_BYTES, 0))
        ends += file.read(size - start)
    return path.name, size, hashlib.sha256(ends).hexdigest()[:16]


def _parsed(line: bytes) -> Row:
    try:
        row = json.loads(line, object_pairs_hook=_with_distinct_keys)
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        found = f"no JSON ({error}): {shown(line[:40].decode(errors='replace').strip())}"
        raise RowError("the line", found, "one JSON object") from None
    if not isinstance(row, dict):
        raise RowError("the line", shown(row), "one JSON object")
    return row


def _with_distinct_keys(pairs: list[tuple[str, Any]]) -> Row:
    """Build the object of a JSON text; refuse a column of ours that is given twice. Python takes the last value."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        for key in READ:
            if keys.count(key) > 1:
                raise RowError(key, f"given {keys.count(key)} times", "one value")
    return row


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let the errors of pyarrow, which know no path, name the Parquet file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}: expected a Parquet file that can be read ({error}): write or copy it anew"
        ) from error


def _parquet_file(path: Path) -> Any:
    with _naming(path):
        # Columns are read as they are decoded; otherwise those of a whole row group are held in memory first.
        return pa.parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True
        )


def _has_page_checksums(path: Path, file: Any) -> bool:
    """Look for a checksum in the header of the file's first page: pyarrow verifies those that it finds, and tells nobody.

    The header begins with three integers in Thrift's compact protocol, each a byte 0x15 and a number of 7 bits a byte.
    A fourth is the checksum (PageHeader in Apache Parquet's parquet.thrift).
    """
    if not file.metadata.num_rows or not file.metadata.num_columns:
        return True
    chunk = file.metadata.row_group(0).column(0)
    with path.open("rb") as pages:
        pages.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        return re.match(rb"(?s)(\x15[\x80-\xff]*[\x00-\x7f]){4}", pages.read(32)) is not None


def _parquet_rows(path: Path, file: Any, start: int) -> tuple[int, Iterator[ParseRow]]:
    """Return the rows from the row group of row `start` on, and the number of rows before it."""
    names = [name for name in file.schema_arrow.names if name in READ]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{path} has {names.count(name)} columns {name}, expected one: write the file anew with one of them"
            )
    if not (_unchecked or _has_page_checksums(path, file)):
        _unchecked.append(path)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning(
                "%s has no page checksums: a bit that flips on a disk can become another number, unseen; write Parquet with "
                "pyarrow.parquet.write_table(..., write_page_checksum=True) (said once)",
                path,
            )
    passed, groups = 0, list(range(file.num_row_groups))
    while groups and passed + (size := file.metadata.row_group(groups[0]).num_rows) <= start:
        passed += size
        groups.pop(0)
    return passed, _decoded(path, file.iter_batches(BATCH_ROWS, groups, names, use_threads=False))


def _decoded(path: Path, batches: Iterator[Any]) -> Iterator[ParseRow]:
    while True:
        with _naming(path):
            batch = next(batches, None)
        if batch is None:
            return
        yield from _rows_of(batch)


def _rows_of(batch: Any) -> Iterator[ParseRow]:
    values = {name: _values_of(batch.column(name)) for name in batch.schema.names}

    def row(index: int) -> Row:
        return {name: value(index) for name, value in values.items()}

    return (functools.partial(row, index) for index in range(batch.num_rows))


def _values_of(column: Any) -> Callable[[int], Any]:
    """Return the value of each row: a list of numbers as a slice of one array, where null is NaN; others as Python has them."""
    if isinstance(column, (pa.ListArray, pa.LargeListArray)):
        elements, kind = column.values, column.values.type
        is_whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        if pa.types.is_floating(kind) or (is_whole and not elements.null_count):
            array, ends = elements.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
            return lambda row: array[ends[row] : ends[row + 1]] if column[row].is_valid else None
        if isinstance(elements, (pa.ListArray, pa.LargeListArray)) and not elements.null_count:
            return _lists_of(column) or (lambda row: column[row].as_py())
    return lambda row: column[row].as_py()


def _lists_of(column: Any) -> Callable[[int], Any] | None:
    """Return lists of lists of integers as a `Ragged` of each row; None for other columns."""
    lists = column.values
    if not pa.types.is_integer(lists.values.type) or lists.values.null_count:
        return None
    ids = torch.from_numpy(lists.values.to_numpy().astype(np.int64))
    offsets = torch.from_numpy(lists.offsets.to_numpy().astype(np.int64))
    ends = column.offsets.to_numpy()

    def of_row(row: int) -> Ragged | None:
        own = offsets[ends[row] : ends[row + 1] + 1]
        return Ragged(ids[own[0] : own[-1]], own - own[0]) if column[row].is_valid else None

    return of_row
