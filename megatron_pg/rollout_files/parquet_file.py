"""Rows of a Parquet file, decoded by pyarrow a few at a time.

A dataset scanner would hold a whole row group in memory, a million rows by default.
"""

import functools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_pg.head.ragged import Ragged, offsets_of
from megatron_pg.rollout_files.schema import READ, ParseRow, Row

try:
    import pyarrow as pa
    import pyarrow.parquet
except ImportError as error:
    raise ImportError("Parquet requires pyarrow: pip install 'pyarrow>=15'") from error

BATCH_ROWS = 256
"""Parquet rows to decode at a time."""
BUFFER_BYTES = 1 << 16
"""Bytes per Parquet column to read from the disk at a time."""

logger = logging.getLogger("megatron_pg")
_unchecked: list[Path] = []
"""The first file without page checksums that this process has read."""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's path to errors of pyarrow."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        expected = f"is not a readable Parquet file ({error})"
        raise ValueError(f"{path} {expected}. Write or copy it again.") from error


def _has_page_checksums(path: Path, file: Any) -> bool:
    """Return whether the header of the file's first page has a checksum. pyarrow verifies existing
    checksums, but does not report missing ones.

    The header begins with three integers in Thrift's compact protocol, each a byte 0x15 and a
    number with 7 bits per byte. A fourth is the checksum (PageHeader in Apache Parquet's
    parquet.thrift).
    """
    if not file.metadata.num_rows or not file.metadata.num_columns:
        return True
    chunk = file.metadata.row_group(0).column(0)
    with path.open("rb") as pages:
        pages.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        return re.match(rb"(?s)(\x15[\x80-\xff]*[\x00-\x7f]){4}", pages.read(32)) is not None


def open_parquet(path: Path, start: int) -> tuple[int, Iterator[ParseRow]]:
    """Return the number of rows before row `start`'s row group, and the rows from there on."""
    file, names = _open(path)
    passed, groups = 0, list(range(file.num_row_groups))
    while groups and passed + (size := file.metadata.row_group(groups[0]).num_rows) <= start:
        passed += size
        groups.pop(0)
    return passed, _decoded(path, file, groups, names)


def _open(path: Path) -> tuple[Any, list[str]]:
    """Open a file, and list the columns to read."""
    with _naming(path):
        # Without pre_buffer columns are read while decoding, not a whole row group at once.
        file = pa.parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True
        )
    names = [name for name in file.schema_arrow.names if name in READ]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{path} has {names.count(name)} columns {name}, expected one. Write the file "
                "again with one of them."
            )
    if not (_unchecked or _has_page_checksums(path, file)):
        _unchecked.append(path)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning(
                "%s has no page checksums, so that flipped bits are not detected. Write Parquet "
                "with pyarrow.parquet.write_table(..., write_page_checksum=True) (logged once)",
                path,
            )
    return file, names


def _decoded(path: Path, file: Any, groups: list[int], names: list[str]) -> Iterator[ParseRow]:
    with file, _naming(path):
        for batch in file.iter_batches(BATCH_ROWS, groups, names, use_threads=False):
            yield from (_BatchRow(batch, index) for index in range(batch.num_rows))


@dataclass(frozen=True)
class _BatchRow:
    """Parser of a row in a decoded batch."""

    batch: Any
    number: int

    def __call__(self) -> Row:
        columns = zip(self.batch.schema.names, self.batch.columns, strict=True)
        return {name: _value(column[self.number]) for name, column in columns}


def _value(value: Any) -> Any:
    """Convert a list of numbers to an array with NaN for null, a list of lists of integers to a
    `Ragged`, and a deeper list to an array.
    """
    if not (isinstance(value, pa.ListScalar) and value.is_valid):
        return value.as_py()
    elements, types = value.values, pa.types
    is_complete, kind = not elements.null_count, elements.type
    if types.is_floating(kind) or (
        is_complete and (types.is_integer(kind) or types.is_boolean(kind))
    ):
        return elements.to_numpy(zero_copy_only=False)
    if is_complete and isinstance(elements, (pa.ListArray, pa.LargeListArray)):
        ids = elements.flatten()
        if types.is_integer(ids.type) and not ids.null_count:
            own = functools.partial(torch.tensor, dtype=torch.int64, device="cpu")
            offsets = offsets_of(own(elements.value_lengths().to_numpy()))
            return Ragged(own(ids.to_numpy()), offsets)
        if isinstance(ids, (pa.ListArray, pa.LargeListArray)):
            numbers = ids.flatten()
            lengths = [np.unique(lists.value_lengths().to_numpy()) for lists in (elements, ids)]
            is_array = all(len(length) == 1 for length in lengths) and not ids.null_count
            if is_array and types.is_integer(numbers.type) and not numbers.null_count:
                return numbers.to_numpy().reshape(
                    len(elements), *(int(length[0]) for length in lengths)
                )
    return value.as_py()
