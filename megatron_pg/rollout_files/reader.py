"""Rows of Parquet and JSON Lines files, a window at a time, through pyarrow.

The dataset scanner of pyarrow holds a whole JSON Lines file or Parquet row group in memory (*measured* with 26.0; a
writer's default row group has a million rows). So JSON Lines are handed to it in pieces of whole lines, of the rows
that this rank needs alone: memory is that of a piece, and a line that is no JSON spoils only its piece. Parquet is
decoded by ``ParquetFile.iter_batches``, a few rows at a time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_pg.rollout_files.schema import (
    COLUMNS,
    INTEGER,
    INTEGERS,
    NUMBER,
    NUMBER_OR_NUMBERS,
    NUMBERS,
    Row,
    RowError,
)

try:
    import pyarrow as pa
    import pyarrow.dataset
    import pyarrow.json
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
PIECE_BYTES = 8 << 20
"""Bytes of JSON Lines that are parsed at a time, or one line where it is longer."""

MOST_BRACKETS = 1024
"""Opening brackets of a line that pyarrow is given. It goes into nested values without a bound, and 32000 levels
end the process where its stack is of 8 MiB (docs/rollout_files.md)."""

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".zip")


class RowReader(Protocol):
    """A rollout file, read from its beginning to its end."""

    def skip(self, count: int) -> int:
        """Passes up to `count` rows; how many there were."""

    def read(self, count: int, first: int, stride: int) -> tuple[int, list[Row | RowError]]:
        """Passes up to `count` rows; how many there were, and of these rows first, first + stride, ..."""

    def close(self) -> None:
        """Closes the file."""


def has_rollout_name(path: Path) -> bool:
    """Whether the name ends as that of a rollout file does, in capitals or not.

    Raises:
        ValueError: it would, but for the end that a compression gives it.
    """
    if path.suffix.lower() in COMPRESSED_SUFFIXES and has_rollout_name(path.with_suffix("")):
        raise ValueError(
            f"{path} is compressed ({path.suffix}), expected a plain file: decompress it (Parquet is compressed within "
            "the file), or move it elsewhere"
        )
    return path.suffix.lower() in JSON_SUFFIXES + PARQUET_SUFFIXES


def is_json_lines(path: Path) -> bool:
    """Whether the name is that of a file of JSON Lines."""
    return path.suffix.lower() in JSON_SUFFIXES


def open_rows(path: Path) -> RowReader:
    """The reader of a file, chosen by the end of its name.

    Raises:
        ValueError: a file of another kind, or one that is not what its name says.
        FileNotFoundError: no such file.
    """
    if has_rollout_name(path):
        return JsonLinesReader(path) if is_json_lines(path) else ParquetReader(path)
    kinds = ", ".join(JSON_SUFFIXES + PARQUET_SUFFIXES)
    raise ValueError(f"{path}: expected a rollout file whose name ends in one of {kinds}")


class JsonLinesReader:
    """One JSON object a line; blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")

    def close(self) -> None:
        self._file.close()

    def skip(self, count: int) -> int:
        return sum(1 for _ in self._lines(count))

    def read(self, count: int, first: int, stride: int) -> tuple[int, list[Row | RowError]]:
        rows: list[Row | RowError] = []
        piece: list[bytes] = []
        num_bytes = num_rows = 0
        for line in self._lines(count):
            if num_rows >= first and (num_rows - first) % stride == 0:
                if num_bytes + len(line) > PIECE_BYTES:
                    rows += _parsed(piece)
                    piece, num_bytes = [], 0
                piece.append(line)
                num_bytes += len(line)
            num_rows += 1
        return num_rows, rows + _parsed(piece)

    def _lines(self, count: int) -> Iterator[bytes]:
        while count > 0 and (line := self._file.readline()):
            if not line.isspace():
                count -= 1
                yield line


def _parsed(lines: Sequence[bytes]) -> list[Row | RowError]:
    """The rows of these lines: all by pyarrow, or one by one where their types differ or one of them is no row."""
    if not lines:
        return []
    if any(line.count(b"[") + line.count(b"{") > MOST_BRACKETS for line in lines):
        return [_parsed_alone(line) for line in lines]
    # A last line without its newline would be read as nulls (Arrow issue 45394).
    data = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines)
    options = pa.json.ReadOptions(block_size=len(data) + 1, use_threads=False)
    fragment = pa.dataset.JsonFileFormat(read_options=options).make_fragment(pa.py_buffer(data))
    try:
        names = [name for name in fragment.physical_schema.names if name in COLUMNS]
        table = fragment.to_table(columns=names, use_threads=False)
    except pa.ArrowInvalid:
        return [_parsed_alone(line) for line in lines]
    if table.num_rows != len(lines) or not _has_settled_types(table.schema):
        return [_parsed_alone(line) for line in lines]
    return list(_rows_of(table))


def _parsed_alone(line: bytes) -> Row | RowError:
    shown = repr(line[:40].decode(errors="replace").strip())
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return RowError("the line", f"no JSON ({error}): {shown}", "one JSON object")
    return row if isinstance(row, dict) else RowError("the line", shown, "one JSON object")


class ParquetReader:
    """A Parquet file, one row group after the other."""

    def __init__(self, path: Path) -> None:
        try:
            # Columns are read as they are decoded; otherwise those of a whole row group are held in memory first.
            self._file = pa.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path}: expected a Parquet file ({error})") from error
        self._columns = _columns_of(path, self._file.schema_arrow.names)
        self._next_row_group = 0
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._next_in_batch = 0

    def close(self) -> None:
        self._batches, self._batch = iter(()), None
        self._file.close()

    def skip(self, count: int) -> int:
        skipped = 0
        # Whole row groups are passed by their number of rows; only at the start is there no batch of one at hand.
        while self._batch is None and self._next_row_group < self._file.num_row_groups:
            rows_of_group = self._file.metadata.row_group(self._next_row_group).num_rows
            if rows_of_group > count - skipped:
                break
            self._next_row_group += 1
            skipped += rows_of_group
        return skipped + self.read(count - skipped, count, 1)[0]

    def read(self, count: int, first: int, stride: int) -> tuple[int, list[Row | RowError]]:
        rows: list[Row | RowError] = []
        num_rows = 0
        while num_rows < count and self._advance():
            start = self._next_in_batch
            taken = min(count - num_rows, self._batch.num_rows - start)
            skipped = first - num_rows if num_rows < first else -(num_rows - first) % stride
            wanted = range(start + skipped, start + taken, stride)
            if wanted:
                rows += _rows_of(self._batch.take(pa.array(wanted, pa.int64())))
            num_rows += taken
            self._next_in_batch += taken
        return num_rows, rows

    def _at_batch_end(self) -> bool:
        return self._batch is None or self._next_in_batch >= self._batch.num_rows

    def _advance(self) -> bool:
        """Makes sure that the current batch has a row left; False at the end of the file."""
        while self._at_batch_end():
            self._batch, self._next_in_batch = next(self._batches, None), 0
            if self._batch is None:
                if self._next_row_group >= self._file.num_row_groups:
                    return False
                self._batches = self._file.iter_batches(
                    BATCH_ROWS, [self._next_row_group], self._columns, use_threads=False
                )
                self._next_row_group += 1
        return True


def _columns_of(path: Path, names: Sequence[str]) -> list[str]:
    counts = Counter(name for name in names if name in COLUMNS)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(
                f"{path} has {count} columns {name}, expected one: write the file anew with one of them"
            )
    return list(counts)


def _has_settled_types(schema: Any) -> bool:
    """Whether every column is of a type that leaves nothing to check of single elements."""
    return all(_is_settled(field.type, COLUMNS[field.name]) for field in schema)


def _is_settled(kind: Any, expected: str) -> bool:
    types = pa.types
    if types.is_null(kind):
        return True
    if types.is_list(kind) or types.is_large_list(kind):
        element = kind.value_type
        if expected == INTEGERS:
            return bool(types.is_signed_integer(element) or types.is_null(element))
        is_number = (
            types.is_floating(element) or types.is_boolean(element) or types.is_null(element)
        )
        return expected in (NUMBERS, NUMBER_OR_NUMBERS) and bool(
            is_number or types.is_signed_integer(element)
        )
    if expected == INTEGER:
        return bool(types.is_signed_integer(kind))
    is_number = types.is_floating(kind) or types.is_signed_integer(kind)
    return expected in (NUMBER, NUMBER_OR_NUMBERS) and bool(is_number)


def _rows_of(table: Any) -> Iterator[Row]:
    """Rows of a pyarrow table or record batch: lists as slices of one array, or as Python values to be checked."""
    if not _has_settled_types(table.schema) or any(
        _has_null_tokens(table.column(name)) for name in ("prompt_ids", "response_ids")
        if name in table.schema.names
    ):  # fmt: skip
        yield from table.to_pylist()
        return
    columns = {name: _values_of(table.column(name)) for name in table.schema.names}
    for index in range(table.num_rows):
        yield {name: values[index] for name, values in columns.items()}


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _has_null_tokens(column: Any) -> bool:
    return _is_list(column.type) and any(chunk.flatten().null_count for chunk in _chunks_of(column))


def _chunks_of(column: Any) -> list[Any]:
    return list(column.chunks) if isinstance(column, pa.ChunkedArray) else [column]


def _values_of(column: Any) -> Sequence[Any]:
    """One value a row: a number, a slice of the column's elements, or None."""
    if not _is_list(column.type):
        values: list[Any] = column.to_pylist()
        return values
    slices: list[Any] = []
    for chunk in _chunks_of(column):
        # Nulls among numbers become NaN.
        elements = chunk.flatten().to_numpy(zero_copy_only=False)
        if elements.dtype == object:
            elements = elements.astype(float)
        end = 0
        for length in chunk.value_lengths().to_pylist():
            start, end = end, end + (length or 0)
            slices.append(None if length is None else elements[start:end])
    return slices
