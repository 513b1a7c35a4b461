"""Rollout files that are damaged, changed or none: refused by name, whatever becomes of bad
rows.
"""

import os
import re
from pathlib import Path

import pytest

from megatron_pg.rollout_files import RolloutFiles, validate_rollout_file
from tests.fast.test_rollout_files import numbers, pull_all, row, write

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NUM_ROWS = 600


def refused(path: Path, message: str) -> None:
    """Also under --on-bad-row skip, and in a report."""
    for on_bad_row in ("error", "skip"):
        with pytest.raises(ValueError, match=message):
            pull_all(RolloutFiles([path], on_bad_row=on_bad_row))
    with pytest.raises(ValueError, match=message):
        validate_rollout_file(path)


def write_parquet(path: Path, **options: object) -> bytearray:
    rows = [row(number, group_index=number) for number in range(NUM_ROWS)]
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=200, **options)
    return bytearray(path.read_bytes())


def flip(path: Path, contents: bytearray, column: str, row_group: int) -> None:
    """One bit in the middle of the pages of a column."""
    metadata = parquet.ParquetFile(path).metadata.row_group(row_group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    chunk = next(each for each in chunks if each.path_in_schema.split(".")[0] == column)
    contents[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(contents)


@pytest.mark.parametrize("column", ["prompt_ids", "log_probs", "reward", "group_index"])
@pytest.mark.parametrize("row_group", [0, 2])
def test_a_bit_that_flipped_in_a_file_with_checksums_is_seen(tmp_path, column, row_group):
    path = tmp_path / "rollouts.parquet"
    uncompressed = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    flip(path, write_parquet(path, **uncompressed), column, row_group)
    refused(path, rf"{re.escape(str(path))} is not a readable Parquet file \(.*CRC")


def test_without_checksums_a_bit_that_flipped_makes_other_rows(tmp_path):
    """What the test above would not see if its files had none."""
    path = tmp_path / "rollouts.parquet"
    flip(path, write_parquet(path, compression="none", use_dictionary=False), "group_index", 2)
    groups = [sample.group_index for sample in pull_all(RolloutFiles([path]))]
    assert len(groups) == NUM_ROWS and groups != list(range(NUM_ROWS))


@pytest.mark.parametrize(
    "options", [{}, {"compression": "none", "use_dictionary": False}, {"data_page_version": "2.0"}]
)
def test_a_file_without_checksums_is_named_once(tmp_path, caplog, monkeypatch, options):
    for name in ("first", "second"):
        write_parquet(tmp_path / f"{name}.parquet", **options)
    checked = tmp_path / "checked.parquet"
    write_parquet(checked, write_page_checksum=True, **options)
    others = [tmp_path / "first.parquet", tmp_path / "second.parquet"]
    for rank, paths, named in (
        ("0", [checked], []),
        ("0", [checked, *others], ["first"]),
        ("1", others, []),
    ):
        monkeypatch.setattr("megatron_pg.rollout_files.parquet_file._unchecked", [])
        monkeypatch.setenv("LOCAL_RANK", rank)
        caplog.clear()
        pull_all(RolloutFiles(paths, distinct_ids=True))
        assert re.findall(r"(\w+)\.parquet has no page checksums", caplog.text) == named


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_parquet_file_that_was_cut_short(tmp_path, kept):
    path = tmp_path / "rollouts.parquet"
    contents = write_parquet(path)
    path.write_bytes(contents[: int(kept * len(contents))])
    refused(path, f"{re.escape(str(path))} is not a readable Parquet file")


def test_pages_that_cannot_be_decoded(tmp_path):
    """The footer is whole, so that the file opens and fails in the middle of a run."""
    path = tmp_path / "rollouts.parquet"
    contents = write_parquet(path)
    pages = parquet.ParquetFile(path).metadata.row_group(2).column(0)
    first = pages.dictionary_page_offset or pages.data_page_offset
    contents[first : first + pages.total_compressed_size] = b"\xff" * pages.total_compressed_size
    path.write_bytes(contents)
    source = RolloutFiles([path], on_bad_row="skip")
    assert numbers(source.pull(150)) == list(range(150))
    refused(path, f"{re.escape(str(path))} is not a readable Parquet file")


def test_a_pipe_is_no_file(tmp_path):
    """To open one would wait for its writer for ever."""
    os.mkfifo(tmp_path / "rollouts.jsonl")
    for paths in ([tmp_path], [tmp_path / "rollouts.jsonl"]):
        with pytest.raises(ValueError, match="rollouts.jsonl is a pipe, .*which a resumed run"):
            RolloutFiles(paths)


@pytest.mark.parametrize("name", [".rollouts", "._rollouts"])
def test_a_hidden_file_of_a_folder_is_named(tmp_path, name):
    hidden = write(tmp_path, [row(3)], "jsonl", name)
    write(tmp_path, [row(4)], "jsonl")
    with pytest.raises(ValueError, match=f"{re.escape(str(hidden))} is hidden"):
        RolloutFiles([tmp_path])
    assert numbers(pull_all(RolloutFiles([hidden]))) == [3], "who names it means it"
