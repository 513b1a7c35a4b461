"""A stream of samples from rollout files, shared out over data-parallel ranks row by row."""

import functools
import itertools
import logging
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_pg.config.planning import OnBadRow, PlanningConfig
from megatron_pg.rollout_files.reader import FileAccount, account_of, files_of, is_json, open_rows
from megatron_pg.rollout_files.schema import OPTIONAL_FIELDS, ParseRow, RowError, sample_of_row
from megatron_pg.step.ids import with_distinct_ids
from megatron_pg.step.sample import Sample

logger = logging.getLogger("megatron_pg")

PlacedRow = tuple[int, int, ParseRow]
"""A row with its file in the list and its number there."""
NUM_LOGGED = 10
"""Skipped rows that are logged one by one; the count goes on."""


@dataclass(frozen=True)
class RolloutPosition:
    """A place in a list of rollout files: the same on every data-parallel rank, and at any number of them."""

    file: int
    """Index of the file in the list; the number of files at the end of the last."""
    row: int
    """Rows of it that have been passed."""
    files: tuple[FileAccount, ...]
    """The accounts of the files of the list, so that another list is noticed."""


class RolloutFiles:
    """One data-parallel rank's share of the samples of rollout files; a `SampleSource`.

    Row i of the stream, counted from where this run began, belongs to rank i modulo the number of ranks, which parses it.
    Every rank reads all files, and holds in memory only the rows that were pulled.

    Args:
        paths: Parquet and JSON Lines files, read in this order; of a directory, all in it by name.
        data_parallel_rank: this rank among the `data_parallel_size` ranks of the group without context parallelism.
        on_bad_row: `error` stops at a row that is no sample; `skip` passes and counts it.
        required_fields: optional fields of `Sample` that every row must fill, such as
            `PolicyLossConfig.required_sample_fields`.
        vocab_size: token ids must be below it; None leaves them unchecked.
        distinct_ids: each file numbers its groups and rollouts from 0: those of two files are two (`--distinct-ids file`).

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
        on_bad_row: OnBadRow = "error",
        required_fields: Collection[str] = (),
        vocab_size: int | None = None,
        distinct_ids: bool = False,
    ) -> None:
        # Checks the flags; files have no budget.
        PlanningConfig(1, rollout_files=tuple(map(str, paths)), on_bad_row=on_bad_row)
        if not 0 <= data_parallel_rank < data_parallel_size:
            given = f"data_parallel_rank {data_parallel_rank} and data_parallel_size {data_parallel_size}"
            raise ValueError(f"{given}: expected 0 <= rank < size")
        for name in required_fields:
            if name not in OPTIONAL_FIELDS:
                expected = f"expected some of {', '.join(OPTIONAL_FIELDS)}"
                raise ValueError(f"required_fields: no column fills {name!r}; {expected}")
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}: expected 1 or more")
        self._paths = files_of(paths)
        # Taken before the first row: at the first checkpoint another file may lie there.
        self._accounts = tuple(account_of(path) for path in self._paths)
        self._rank, self._size = data_parallel_rank, data_parallel_size
        self._skips_bad_rows = on_bad_row == "skip"
        columns = [OPTIONAL_FIELDS[name] for name in required_fields]
        self._convert = functools.partial(sample_of_row, required=columns, vocab_size=vocab_size)
        self._makes_ids_distinct = distinct_ids
        self._file = self._row = 0
        self.num_skipped = 0
        """Bad rows of this rank's share that were passed so far."""
        self._rows = self._read()

    @property
    def position(self) -> RolloutPosition:
        """The place where the next pull begins."""
        return RolloutPosition(self._file, self._row, self._accounts)

    def seek(self, position: RolloutPosition) -> None:
        """Continue from a position, of a source with the same files on any number of ranks.

        The files may lie in another folder. Further files may follow the last one, and further lines may follow in it
        if it is JSON Lines and has not been passed. A ValueError names the first file that differs otherwise.
        """
        self._check_files(position)
        self.close()
        self._file, self._row = position.file, position.row
        if position.row:  # refuse a shorter file now, not at the first pull
            next(open_rows(self._paths[self._file], self._row), None)

    def pull(self, count: int) -> list[Sample | None]:
        """Pull the next `count` of this rank's rows, fewer only at the end of the files; None for a bad row.

        Raises:
            RowError: a bad row (a ValueError); the position is then after that row.
            ValueError: a file cannot be read as the kind that its name says.
        """
        samples: list[Sample | None] = []
        for row in self._pull_rows(count):
            try:
                samples.append(self._sample(*row))
            except RowError as error:
                if not self._skips_bad_rows:
                    raise
                samples.append(None)
                self.num_skipped += 1
                if self.num_skipped <= NUM_LOGGED:
                    logger.warning("--on-bad-row skip: %s", error)
        return samples

    def close(self) -> None:
        """Close the file being read; the position stays."""
        self._rows.close()
        self._rows = self._read()

    def _pull_rows(self, count: int) -> Iterable[PlacedRow]:
        """Pull this rank's rows, together with the other ranks of a reading group."""
        rows = itertools.islice(self._rows, count * self._size)
        return itertools.islice(rows, self._rank, None, self._size)

    def _read(self) -> Generator[PlacedRow, None, None]:
        """Yield the rows from the position on; the position follows them."""
        try:
            while self._file < len(self._paths):
                for parse in open_rows(self._paths[self._file], self._row):
                    self._row += 1
                    yield self._file, self._row - 1, parse
                self._file, self._row = self._file + 1, 0
        finally:  # a generator that an error has ended would look like the end of the files
            self._rows = self._read()

    def _sample(self, file: int, row: int, parse: ParseRow) -> Sample:
        path = self._paths[file]
        name = f"{path.name} row {row}"
        # Not the path: a checkpoint may hold samples of files that have been moved since.
        id_source = f"file {file + 1} of --rollout-files"
        try:
            sample = self._convert(parse(), name=name, id_source=id_source)
            return with_distinct_ids(sample, file) if self._makes_ids_distinct else sample
        except ValueError as error:
            problem = str(error).removeprefix(f"{name}: ")
            # The column `log_probs` fills `old_log_probs`.
            raise RowError(str(path), row, problem.removeprefix("old_")) from None

    def _check_files(self, position: RolloutPosition) -> None:
        """Refuse other files than the position's, except for rows added after the last."""
        last = len(position.files) - 1
        for index, then in enumerate(position.files):
            now = "is missing"
            if index < len(self._paths):
                path, account = self._paths[index], self._accounts[index]
                may_grow = position.file <= index == last and is_json(path)
                if account == then or (may_grow and account_of(path, then[1]) == then):
                    continue
                now = f"had other contents than {path}"
                if account[0] != then[0]:
                    now = f"is now {path}"
                elif account[1] != then[1]:
                    now = f"had {then[1]} bytes and {path} has {account[1]}"
            raise ValueError(
                f"--rollout-files: file {index + 1} of the {last + 1} that the checkpoint is of, {then[0]!r}, {now}: "
                "give the same files in the same order (further ones may follow them), or start anew"
            )


@dataclass
class RolloutFileReport:
    """The findings of `validate_rollout_file`."""

    path: str
    num_rows: int = 0
    num_bad_rows: int = 0
    num_tokens: int = 0
    """Prompt and response tokens of the good rows."""
    num_active_tokens: int = 0
    num_documents: int = 0
    """Rollouts of the good rows; a row without a `rollout_id` is one."""
    num_scattered: int = 0
    """Rows whose prompt group or rollout came to an end before, as a row of another followed."""
    errors: list[RowError] = field(default_factory=list)
    """The errors of the first bad rows."""
    scattered: list[str] = field(default_factory=list)
    """The first scattered rows, in words. A run that keeps prompt groups whole, or needs them whole, stops at one."""


def validate_rollout_file(
    *paths: str | Path,
    required_fields: Collection[str] = (),
    vocab_size: int | None = None,
    distinct_ids: bool = False,
    max_errors: int = 20,
) -> RolloutFileReport:
    """Check every row of rollout files, and that the rows of each prompt group and rollout follow each other.

    Memory holds the ids of all prompt groups and rollouts, and one row. Arguments and errors are those of `RolloutFiles`.

    Args:
        paths: the files; groups and rollouts are checked over all of them.
        max_errors: bad and scattered rows beyond these are counted and not kept.
    """
    files = RolloutFiles(
        paths, required_fields=required_fields, vocab_size=vocab_size, distinct_ids=distinct_ids
    )
    report = RolloutFileReport(" ".join(map(str, paths)))
    seen: dict[str, set[int]] = {"group_index": set(), "rollout_id": set()}
    latest: dict[str, int | None] = {}
    for placed in files._read():
        report.num_rows += 1
        try:
            sample = files._sample(*placed)
        except RowError as error:
            report.num_bad_rows += 1
            if len(report.errors) < max_errors:
                report.errors.append(error)
            continue
        report.num_tokens += sample.total_length
        report.num_active_tokens += sample.num_active_tokens
        report.num_documents += sample.rollout_id not in seen["rollout_id"]
        for name, ids in seen.items():
            identifier = getattr(sample, name)
            if identifier in ids and identifier != latest.get(name):
                report.num_scattered += 1
                if len(report.scattered) < max_errors:
                    report.scattered.append(
                        f"{sample.name}: {name} {identifier} comes back after rows of another; expected its rows to follow "
                        "each other: sort the file by it, or give what comes back an id of its own"
                    )
            latest[name] = identifier
            if identifier is not None:
                ids.add(identifier)
    return report
