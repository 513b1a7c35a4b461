"""A stream of samples from rollout files, shared out over data-parallel ranks row by row."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_pg.config.planning import ON_BAD_ROW
from megatron_pg.rollout_files.account import FileAccount, account_of, check_account
from megatron_pg.rollout_files.reader import (
    JSON_SUFFIXES,
    PARQUET_SUFFIXES,
    RowReader,
    has_rollout_name,
    open_rows,
)
from megatron_pg.rollout_files.schema import Row, RowChecks, RowError, sample_of_row
from megatron_pg.step.sample import Sample

logger = logging.getLogger("megatron_pg")

NUM_LOGGED = 10
"""Skipped rows that are logged one by one; the count goes on."""


@dataclass(frozen=True)
class RolloutPosition:
    """A place in a list of rollout files: the same on every data-parallel rank, and at any number of them."""

    file: int
    """Which file of the list; their number at the end of the last."""
    row: int
    """Rows of it that have been passed."""
    files: tuple[FileAccount, ...]
    """Of each file of the list its name, size and fingerprint, so that another list is noticed."""


class RolloutFiles:
    """One data-parallel rank's share of the samples of rollout files; a ``SampleSource``.

    Row i of the whole stream belongs to rank i modulo the number of ranks, counted from where this run began, so that
    every rank reads all files and parses its own rows. Memory is that of one window of rows, whatever the files hold.

    Args:
        paths: Parquet and JSON Lines files, read in this order; of a directory, all in it by name.
        data_parallel_rank: this rank in the data-parallel group without context parallelism.
        data_parallel_size: the number of its ranks.
        on_bad_row: ``error`` stops at a row that is no sample; ``skip`` passes and counts it.
        required_fields: optional fields of ``Sample`` that every row must fill, such as
            ``PolicyLossConfig.required_sample_fields``.
        vocab_size: token ids must be below it; None leaves them unchecked.

    Raises:
        ValueError: no files, a file of another kind or compressed, a folder named as a file, or settings out of range.
        FileNotFoundError: a path that does not exist.
    """

    can_reshard = True

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        on_bad_row: str = "error",
        required_fields: Collection[str] = (),
        vocab_size: int | None = None,
    ) -> None:
        if on_bad_row not in ON_BAD_ROW:
            raise ValueError(
                f"--on-bad-row is {on_bad_row!r}: expected one of {', '.join(ON_BAD_ROW)}"
            )
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data_parallel_rank {data_parallel_rank} and data_parallel_size {data_parallel_size}: expected "
                "0 <= rank < size"
            )
        self._paths = _files_of(paths)
        # Now, and not at the first checkpoint: of what is read, not of what may lie there then.
        self._accounts = tuple(account_of(path) for path in self._paths)
        self._rank, self._size = data_parallel_rank, data_parallel_size
        self._skips_bad_rows = on_bad_row == "skip"
        self._checks = RowChecks.of(required_fields, vocab_size)
        self._file = self._row = 0
        self._reader: RowReader | None = None
        self._num_skipped = 0

    @property
    def num_skipped(self) -> int:
        """Bad rows of this rank's share that were passed so far."""
        return self._num_skipped

    @property
    def position(self) -> RolloutPosition:
        """Where the next pull begins."""
        return RolloutPosition(self._file, self._row, self._accounts)

    def seek(self, position: RolloutPosition) -> None:
        """Continues from a position, of a source with the same files on any number of ranks.

        The files may lie in another folder. More rows may follow the last one: further files, and lines at the end of
        the last file where that is JSON Lines and has not been passed.

        Raises:
            ValueError: the files are not those that the position is of; the first that differs is named.
        """
        self.close()
        check_account(self._paths, self._accounts, position.files, position.file)
        self._file, self._row = position.file, position.row
        if position.row:
            found = self._open().skip(position.row)
            if found < position.row:
                raise ValueError(
                    f"{self._paths[position.file]} has {found} rows and the checkpoint stopped after "
                    f"{position.row}: the file has changed"
                )

    def pull(self, count: int) -> list[Sample | None]:
        """The next `count` of this rank's rows, fewer only at the end of the files; None for a bad row.

        Raises:
            RowError: a bad row (a ValueError), naming file, row, field, what was found and what was expected.
            ValueError: a file is not what its name says.
        """
        left = count * self._size
        samples: list[Sample | None] = []
        while left and self._file < len(self._paths):
            passed = count * self._size - left
            first = (self._rank - passed) % self._size
            num_rows, rows = self._open().read(left, first, self._size)
            for index, row in enumerate(rows):
                samples.append(self._sample(row, self._row + first + index * self._size))
            self._row += num_rows
            left -= num_rows
            if left:
                self.close()
                self._file, self._row = self._file + 1, 0
        return samples

    def close(self) -> None:
        """Closes the file being read; the position stays."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self) -> RowReader:
        if self._reader is None:
            self._reader = open_rows(self._paths[self._file])
        return self._reader

    def _sample(self, row: Row | RowError, number: int) -> Sample | None:
        path = self._paths[self._file]
        try:
            if isinstance(row, RowError):
                raise row
            return sample_of_row(row, self._checks, name=f"{path.name} row {number}")
        except RowError as error:
            located = error.at(str(path), number)
            if not self._skips_bad_rows:
                raise located from None
            self._num_skipped += 1
            if self._num_skipped <= NUM_LOGGED:
                logger.warning("--on-bad-row skip: %s", located)
            return None


@dataclass(frozen=True)
class RolloutFileReport:
    """What :func:`validate_rollout_file` found."""

    path: str
    num_rows: int
    num_bad_rows: int
    num_tokens: int
    """Prompt and response tokens of the good rows."""
    num_active_tokens: int
    errors: tuple[RowError, ...]
    """Of the first bad rows."""


def validate_rollout_file(
    path: str | Path,
    *,
    required_fields: Collection[str] = (),
    vocab_size: int | None = None,
    max_errors: int = 20,
) -> RolloutFileReport:
    """Checks every row of one rollout file, in bounded memory.

    Args:
        path: a Parquet or JSON Lines file.
        required_fields: see :class:`RolloutFiles`.
        vocab_size: see :class:`RolloutFiles`.
        max_errors: bad rows beyond these are counted and not kept.

    Raises:
        ValueError: a file of another kind, or settings out of range.
        FileNotFoundError: no such file.
    """
    checks = RowChecks.of(required_fields, vocab_size)
    errors: list[RowError] = []
    num_rows = num_bad_rows = num_tokens = num_active_tokens = 0
    for row in _all_rows(Path(path)):
        try:
            if isinstance(row, RowError):
                raise row
            sample = sample_of_row(row, checks, name=f"row {num_rows}")
            num_tokens += sample.total_length
            num_active_tokens += sample.num_active_tokens
        except RowError as error:
            num_bad_rows += 1
            if len(errors) < max_errors:
                errors.append(error.at(str(path), num_rows))
        num_rows += 1
    return RolloutFileReport(
        str(path), num_rows, num_bad_rows, num_tokens, num_active_tokens, tuple(errors)
    )


def _all_rows(path: Path) -> Iterator[Row | RowError]:
    reader = open_rows(path)
    try:
        while True:
            _, rows = reader.read(256, 0, 1)
            if not rows:
                return
            yield from rows
    finally:
        reader.close()


def _files_of(paths: Sequence[str | Path]) -> list[Path]:
    """The files named, directories replaced by the rollout files in them."""
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            files += _files_in(path)
        elif not path.exists():
            raise FileNotFoundError(f"--rollout-files: {path} does not exist")
        elif not has_rollout_name(path):
            kinds = ", ".join(JSON_SUFFIXES + PARQUET_SUFFIXES)
            raise ValueError(f"--rollout-files: {path} does not end in one of {kinds}")
        else:
            files.append(path)
    if not files:
        raise ValueError("--rollout-files: give at least one file")
    return files


def _files_in(directory: Path) -> list[Path]:
    """The rollout files of a directory, by name; what looks like one and cannot be read is not passed over."""
    found = [path for path in sorted(directory.iterdir()) if has_rollout_name(path)]
    if not found:
        raise ValueError(f"--rollout-files: the directory {directory} holds no rollout file")
    for path in found:
        if path.is_dir():
            raise ValueError(
                f"--rollout-files: {path} is a folder, expected a file by its name: give the folder itself for the "
                "files in it, or move it elsewhere"
            )
    return found
