"""Rows of a Parquet file, decoded by pyarrow a few at a time.

A dataset scanner would hold a whole row group in memory, and a writer's default row group has a
million rows.
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
    raise ImportError("Parquet needs pyarrow: pip install 'pyarrow>=15'") from error

BATCH_ROWS = 256
"""Rows of Parquet that are decoded at a time."""
BUFFER_BYTES = 1 << 16
"""Bytes of each Parquet column that are read from the disk at a time."""

logger = logging.getLogger("megatron_pg")
_unchecked: list[Path] = []
"""The first file without page checksums that this process has read."""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the Parquet file in the errors of pyarrow, which know no path."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        expected = f"expected a Parquet file that can be read ({error})"
        raise ValueError(f"{path}: {expected}: write or copy it anew") from error


def _has_page_checksums(path: Path, file: Any) -> bool:
    """Look for a checksum in the header of the file's first page: pyarrow verifies those that it
    finds, and tells nobody.

    The header begins with three integers in Thrift's compact protocol, each a byte 0x15 and a
    number of 7 bits a byte. A fourth is the checksum (PageHeader in Apache Parquet's
    parquet.thrift).
    """
    if not file.metadata.num_rows or not file.metadata.num_columns:
        return True
    chunk = file.metadata.row_group(0).column(0)
    with path.open("rb") as pages:
        pages.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        return re.match(rb"(?s)(\x15[\x80-\xff]*[\x00-\x7f]){4}", pages.read(32)) is not None


def open_parquet(path: Path, start: int) -> tuple[int, Iterator[ParseRow]]:
    """Return the number of rows before the row group of row `start`, and the rows from there on."""
    file, names = _open(path)
    passed, groups = 0, list(range(file.num_row_groups))
    while groups and passed + (size := file.metadata.row_group(groups[0]).num_rows) <= start:
        passed += size
        groups.pop(0)
    return passed, _decoded(path, file, groups, names)


def _open(path: Path) -> tuple[Any, list[str]]:
    """Open a file, and list its columns that are read."""
    with _naming(path):
        # Columns are read as they are decoded; otherwise those of a whole row group are held in
        # memory first.
        file = pa.parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True
        )
    names = [name for name in file.schema_arrow.names if name in READ]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{path} has {names.count(name)} columns {name}, expected one: write the file anew "
                f"with one of them"
            )
    if not (_unchecked or _has_page_checksums(path, file)):
        _unchecked.append(path)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning(
                "%s has no page checksums: a bit that flips on a disk can become another number, "
                "unseen; write Parquet with "
                "pyarrow.parquet.write_table(..., write_page_checksum=True) (said once)",
                path,
            )
    return file, names


def _decoded(path: Path, file: Any, groups: list[int], names: list[str]) -> Iterator[ParseRow]:
    with file, _naming(path):
        for batch in file.iter_batches(BATCH_ROWS, groups, names, use_threads=False):
            yield from (_BatchRow(batch, index) for index in range(batch.num_rows))


@dataclass(frozen=True)
class _BatchRow:
    """The parser of a row of a decoded batch."""

    batch: Any
    number: int

    def __call__(self) -> Row:
        columns = zip(self.batch.schema.names, self.batch.columns, strict=True)
        return {name: _value(column[self.number]) for name, column in columns}


def _value(value: Any) -> Any:
    """Convert a list of numbers to an array, where null is NaN; lists of integers to a `Ragged`,
    and lists of these to an array.
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
