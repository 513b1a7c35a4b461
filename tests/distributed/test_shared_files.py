"""Rollout files that ranks read together: each row by one of them, the same samples as by one reader, and one error for all."""

import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_pg.rollout_files import RolloutFiles, RolloutPosition, StepCollector, reader, sharing
from megatron_pg.rollout_files.schema import ParseRow

from .launch import RankError, refusal, run_ranks

NUM_ROWS = 61
PIECE_BYTES = 300


def row(number: int, **changes: Any) -> dict[str, Any]:
    """Rows of very different lengths: some fill several pieces of JSON Lines, some pieces hold many."""
    length = 200 if number % 13 == 5 else number % 3 + 1
    fields = {"prompt_ids": [number], "response_ids": [5] * length, "reward": number / 4}
    return fields | {"group_index": number // 4} | changes


def write(folder: Path, **bad: Any) -> list[str]:
    """61 rows in five files, of one to five pieces, of which one file is empty; `bad` changes row 40."""
    pa, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    rows = [row(number, **(bad if number == 40 else {})) for number in range(NUM_ROWS)]
    paths = [folder / name for name in ("a.jsonl", "b.jsonl", "c.parquet", "d.jsonl", "e.parquet")]
    for path, (first, end) in zip(
        paths, ((0, 20), (20, 20), (20, 33), (33, 50), (50, 61)), strict=True
    ):
        if path.suffix == ".jsonl":
            lines = [
                json.dumps(fields) + "\n" * (1 + at % 2)
                for at, fields in enumerate(rows[first:end])
            ]
            path.write_text("\n" + "".join(lines).rstrip())
        else:
            table = pa.Table.from_pylist(rows[first:end])
            parquet.write_table(table, path, row_group_size=5, write_page_checksum=True)
    return list(map(str, paths))


def place() -> dict[str, Any]:
    return {"data_parallel_rank": dist.get_rank(), "data_parallel_size": dist.get_world_size()}


def shared(paths: Sequence[str], **options: Any) -> RolloutFiles:
    return RolloutFiles(paths, **place() | {"reading_group": dist.group.WORLD} | options)


Samples = list[tuple[int, str]]
"""The numbers and names of a rank's samples."""


def read(paths: Sequence[str], counts: Sequence[int]) -> tuple[Samples, int]:
    """A rank's samples, pulled by these counts in turn to the end, and the rows that it read from the files."""
    passed: list[ParseRow] = []

    def counted(path: Path, size: int) -> Iterator[Any]:
        def opened(piece: Any) -> tuple[int, Iterator[ParseRow]]:
            num_rows, rows = piece()
            return num_rows, (passed.append(parse) or parse for parse in rows)

        yield from (functools.partial(opened, piece) for piece in reader.pieces_of(path, size))

    with small_pieces(), mock.patch.object(sharing, "pieces_of", counted):
        source, samples = shared(paths), []
        while source.position.file < len(paths):
            samples += [sample for count in counts for sample in source.pull(count)]
    return named(samples), len(passed)


def small_pieces() -> Any:
    return mock.patch.object(reader, "PIECE_BYTES", PIECE_BYTES)


def named(samples: Sequence[Any]) -> Samples:
    return [(int(sample.tokens[0]), sample.name) for sample in samples]


def by_itself(paths: Sequence[str], rank: int, size: int) -> Samples:
    source = RolloutFiles(paths, data_parallel_rank=rank, data_parallel_size=size)
    return named(source.pull(NUM_ROWS))


def check_rows(paths: Sequence[str], ranks: Sequence[tuple[Samples, int]]) -> None:
    for rank, (samples, _) in enumerate(ranks):
        assert samples == by_itself(paths, rank, len(ranks))
    assert sum(num_read for _, num_read in ranks) == NUM_ROWS
    assert all(num_read for _, num_read in ranks)


@pytest.mark.parametrize("world_size", (1, 2, 3, 5))
def test_each_row_is_read_once_and_is_where_one_reader_has_it(tmp_path, world_size) -> None:
    """61 rows leave an uneven tail at each of these sizes."""
    paths = write(tmp_path)
    for counts in ((3, 1), (NUM_ROWS,)):
        check_rows(paths, run_ranks(read, world_size, paths, counts))


def read_with(mutant: str, paths: Sequence[str]) -> tuple[Samples, int]:
    """As `read`, with a mistake: another rank than the row's own has it, or pieces overlap."""
    take, stretch = sharing.SharedReading._take, reader._stretch

    def dealt_anew(self: Any, wanted: int) -> Any:
        self._rank = (self._rank + 1) % self._size
        return take(self, wanted)

    def overlapping(path: Path, start: int) -> Any:
        return stretch(path, max(start - PIECE_BYTES // 2, 0))

    with (
        mock.patch.object(sharing.SharedReading, "_take", dealt_anew)
        if mutant == "dealing"
        else mock.patch.object(reader, "_stretch", overlapping)
    ):
        return read(paths, (3, 1))


@pytest.mark.parametrize("mutant", ("dealing", "pieces"))
def test_a_mistake_in_sharing_is_noticed(tmp_path: Path, mutant: str) -> None:
    paths = write(tmp_path)
    with pytest.raises((AssertionError, RankError)):
        check_rows(paths, run_ranks(read_with, 2, mutant, paths))


def pull(paths: Sequence[str], num_pulls: int, position: RolloutPosition | None) -> Any:
    with small_pieces():
        source = shared(paths)
        if position is not None:
            source.seek(position)
        samples = [sample for _ in range(num_pulls) for sample in source.pull(2)]
    return named(samples), source.position


@pytest.mark.parametrize("sizes", ((2, 3), (3, 2)))
def test_a_run_goes_on_at_another_size(tmp_path: Path, sizes: tuple[int, int]) -> None:
    paths = write(tmp_path)
    before, after = sizes
    for num_pulls in (1, 5, 9):
        ranks = run_ranks(pull, before, paths, num_pulls, None)
        assert len({position for _, position in ranks}) == 1
        seen = [sample for samples, _ in ranks for sample in samples]
        assert len(seen) == min(2 * num_pulls * before, NUM_ROWS)
        for samples, _ in run_ranks(pull, after, paths, NUM_ROWS, ranks[0][1]):
            seen += samples
        assert sorted(number for number, _ in seen) == list(range(NUM_ROWS))


def pull_beside_model_parallel_ranks(paths: Sequence[str]) -> Samples:
    """Ranks 0 and 1 are data-parallel rank 0, the others 1."""
    with small_pieces():
        place = {"data_parallel_rank": dist.get_rank() // 2, "data_parallel_size": 2}
        return named(shared(paths, **place).pull(NUM_ROWS))


def test_ranks_that_train_on_the_same_samples_all_have_them(tmp_path: Path) -> None:
    paths = write(tmp_path)
    ranks = run_ranks(pull_beside_model_parallel_ranks, 4, paths)
    assert ranks == [by_itself(paths, rank // 2, 2) for rank in range(4)]


def collect(paths: list[Sequence[str]]) -> tuple[str, float]:
    """What a rank is told that reads its own list of files, and the seconds until then: gloo would wait for 30 minutes."""
    began = time.monotonic()

    def steps() -> None:
        source = shared(paths[dist.get_rank() % len(paths)])
        group = dist.group.WORLD
        collector = StepCollector(source, docs_per_step=8, data_parallel_group=group)
        while collector.collect() is not None:
            pass

    with small_pieces():
        return refusal(ValueError, steps), time.monotonic() - began


def check_told(ranks: Sequence[tuple[str, float]], words: str) -> None:
    for told, seconds in ranks:
        assert words in told and seconds < 60


def test_a_bad_row_ends_all_ranks(tmp_path: Path) -> None:
    paths = write(tmp_path, reward="high")
    check_told(run_ranks(collect, 3, [paths]), "d.jsonl row 7: reward is 'high'")


def test_damage_that_one_rank_meets_ends_all_ranks(tmp_path: Path) -> None:
    paths = write(tmp_path)
    damaged = bytearray(Path(paths[2]).read_bytes())
    damaged[len(damaged) // 3] ^= 255
    Path(paths[2]).write_bytes(damaged)
    check_told(
        run_ranks(collect, 3, [paths]), "c.parquet: expected a Parquet file that can be read"
    )


def test_ranks_that_see_other_files_are_refused(tmp_path: Path) -> None:
    paths = write(tmp_path)
    ranks = run_ranks(collect, 2, [paths, paths[:1]])
    check_told(ranks, "rank 1 reads other samples than rank 0")


def lone_place(paths: Sequence[str]) -> str:
    return refusal(ValueError, shared(paths, data_parallel_size=3).pull, 1)


def test_a_reading_group_without_some_rank_is_refused(tmp_path: Path) -> None:
    for told in run_ranks(lone_place, 2, write(tmp_path)):
        assert "reading_group lacks data-parallel rank 2 of 3" in told


def test_a_file_that_is_shorter_than_the_position_is_refused(tmp_path: Path) -> None:
    paths = write(tmp_path)
    for told in run_ranks(shortened, 2, paths):
        assert "d.jsonl has 17 rows and the checkpoint stopped after 18" in told


def shortened(paths: Sequence[str]) -> str:
    source = shared(paths)
    source.seek(RolloutPosition(3, 18, source.position.files))
    return refusal(ValueError, source.pull, 1)
