"""Stream of samples from rollout files, split over data-parallel ranks row by row."""

import functools
import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_pg.config.planning import OnBadRow, PlanningConfig
from megatron_pg.rollout_files.reader import files_of, open_rows
from megatron_pg.rollout_files.schema import OPTIONAL_FIELDS, ParseRow, RowError, sample_of_row
from megatron_pg.step.ids import with_distinct_ids
from megatron_pg.step.sample import Sample

logger = logging.getLogger("megatron_pg")

PlacedRow = tuple[int, int, ParseRow]
"""File index, row number and parser of a row."""
NUM_LOGGED = 10
"""Maximum number of skipped rows to log. All are counted."""


class RolloutFiles:
    """One data-parallel rank's share of the samples in rollout files, a `SampleSource`.

    Row i of the stream, counted from the start of this run, belongs to rank i modulo the number of
    ranks, which parses it. Every rank reads all files, and keeps only pulled rows in memory.

    Args:
        paths: Parquet and JSON Lines files, read in this order. A directory stands for all its
            files, by name.
        data_parallel_rank: this rank among the `data_parallel_size` ranks of the group without
            context parallelism.
        on_bad_row: `error` stops at an invalid row. `skip` skips and counts it.
        required_fields: optional fields of `Sample` that every row must fill, such as
            `PolicyLossConfig.required_sample_fields`.
        vocab_size: token ids must be below it. None leaves them unchecked.
        distinct_ids: each file numbers its groups and rollouts from 0, and equal ids in two files
            are different (`--distinct-ids file`).

    Raises:
        ValueError: there are no files, a file is compressed or of an unknown kind, a folder has a
            file's name, or settings are out of range.
        FileNotFoundError: a path does not exist.
    """

    is_shared = True

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
        # Checks the flags. Files have no budget.
        PlanningConfig(1, rollout_files=tuple(map(str, paths)), on_bad_row=on_bad_row)
        if not 0 <= data_parallel_rank < data_parallel_size:
            given = (
                f"data_parallel_rank is {data_parallel_rank} and data_parallel_size "
                f"{data_parallel_size}"
            )
            raise ValueError(f"{given}, expected 0 <= rank < size")
        for name in required_fields:
            if name not in OPTIONAL_FIELDS:
                expected = f"expected some of {', '.join(OPTIONAL_FIELDS)}"
                raise ValueError(f"required_fields: no column fills {name!r}, {expected}")
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}, expected 1 or more")
        self._paths = files_of(paths)
        self._rank, self._size = data_parallel_rank, data_parallel_size
        self._skips_bad_rows = on_bad_row == "skip"
        columns = [OPTIONAL_FIELDS[name] for name in required_fields]
        self._convert = functools.partial(sample_of_row, required=columns, vocab_size=vocab_size)
        self._makes_ids_distinct = distinct_ids
        self.num_skipped = 0
        """Number of bad rows in this rank's share that were skipped so far."""
        self._rows = self._read()

    def seek(self, num_slots: int) -> None:
        """Continue after `num_slots` rows of the stream, including bad ones, which any number of
        data-parallel ranks has read.

        Pass the same files in the same order. The last file may have more rows, and more files may
        follow. If files have fewer rows, the first pull raises a ValueError.
        """
        self._rows = self._read(num_slots)

    def pull(self, count: int) -> list[Sample | None]:
        """Pull the next `count` of this rank's rows, fewer only at the end of the files. None is a
        bad row.

        Raises:
            RowError: a row is invalid (a ValueError). The next pull starts after it.
            ValueError: a file's content does not match its name, or it is shorter than before.
        """
        samples: list[Sample | None] = []
        rows = itertools.islice(self._rows, count * self._size)
        for row in itertools.islice(rows, self._rank, None, self._size):
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

    def _read(self, start: int = 0) -> Iterator[PlacedRow]:
        """Yield the rows of the stream from row `start` on."""
        passed = 0
        try:
            for file, path in enumerate(self._paths):
                row, rows = open_rows(path, start - passed)
                passed += row
                for parse in rows:
                    yield file, row, parse
                    row, passed, start = row + 1, passed + 1, start + 1
            if passed < start:
                raise ValueError(
                    f"--rollout-files: the files have {passed} rows, but the checkpoint stopped "
                    f"after {start}. Pass the same files in the same order, or start a new run."
                )
        except Exception:
            # After an error the generator would look like the end of the files.
            self._rows = self._read(start)
            raise

    def _sample(self, file: int, row: int, parse: ParseRow) -> Sample:
        path = self._paths[file]
        name = f"{path.name} row {row}"
        # Not the path, because a checkpoint may have samples of files that were moved since.
        id_source = f"file {file + 1} of --rollout-files"
        try:
            sample = self._convert(parse(), name=name, id_source=id_source)
            return with_distinct_ids(sample, file) if self._makes_ids_distinct else sample
        except ValueError as error:
            problem = str(error).removeprefix(f"{name}: ")
            # The column `log_probs` fills `old_log_probs`.
            raise RowError(str(path), row, problem.removeprefix("old_")) from None


@dataclass
class RolloutFileReport:
    """Result of `validate_rollout_file`."""

    path: str
    num_rows: int = 0
    num_bad_rows: int = 0
    num_tokens: int = 0
    """Prompt and response tokens in valid rows."""
    num_active_tokens: int = 0
    num_documents: int = 0
    """Rollouts in valid rows. A row without a `rollout_id` is one."""
    num_scattered: int = 0
    """Rows that continue a prompt group or rollout after rows of a different one."""
    errors: list[RowError] = field(default_factory=list)
    """Errors of the first bad rows."""
    scattered: list[str] = field(default_factory=list)
    """Descriptions of the first scattered rows. A run that needs whole prompt groups stops at
    one."""


def validate_rollout_file(
    *paths: str | Path,
    required_fields: Collection[str] = (),
    vocab_size: int | None = None,
    distinct_ids: bool = False,
    max_errors: int = 20,
) -> RolloutFileReport:
    """Check every row of rollout files, and that the rows of each prompt group and rollout are
    contiguous.

    Memory holds the ids of all prompt groups and rollouts, and one row. For further arguments and
    errors see `RolloutFiles`.

    Args:
        paths: the files. Groups and rollouts are checked over all of them.
        max_errors: bad and scattered rows beyond this number are only counted.
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
                        f"{sample.name}: {name} {identifier} returns after rows with a different "
                        "one. Make its rows contiguous, or use a new id."
                    )
            latest[name] = identifier
            if identifier is not None:
                ids.add(identifier)
    return report
