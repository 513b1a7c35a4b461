"""Rollout files: what a row becomes, what a bad row says, windows, shares of ranks, and going on in
the middle.
"""

import itertools
import json
import math
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pg import Sample, StepCollector
from megatron_pg.rollout_files import (
    RolloutFiles,
    RowError,
    validate_rollout_file,
    with_group_advantages,
)
from tests.fast.refusals import assert_refused, refusal

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

KINDS = ("jsonl", "parquet")
Row = dict[str, Any]


def row(number: int = 0, **changes: Any) -> Row:
    """A good row whose first token is its number; None removes a field."""
    length = number % 3 + 1
    fields = {
        "prompt_ids": [number, 7],
        "response_ids": [5] * length,
        "loss_mask": [1] * length,
        "reward": number / 4,
        "log_probs": [-0.5 - k for k in range(length)],
        "rollout_log_probs": [-0.25] * length,
        "group_index": number // 4,
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def write(folder: Path, rows: list[Row], kind: str, name: str = "rollouts") -> Path:
    path = folder / f"{name}.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(fields) + "\n" for fields in rows))
    else:
        names = sorted({name for fields in rows for name in fields})
        columns = {name: [fields.get(name) for fields in rows] for name in names}
        parquet.write_table(pa.table(columns), path, row_group_size=5, write_page_checksum=True)
    return path


def pull_all(source: RolloutFiles, count: int = 1000) -> list[Sample | None]:
    slots: list[Sample | None] = []
    while part := source.pull(count):
        slots += part
    return slots


def numbers(slots: Sequence[Sample | None]) -> list[int | None]:
    return [None if sample is None else int(sample.tokens[0]) for sample in slots]


def read(*paths: Path, **options: Any) -> list[int | None]:
    """The numbers of all rows of some files."""
    return numbers(pull_all(RolloutFiles(paths, **options)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_becomes_a_sample(tmp_path: Path, kind: str) -> None:
    rows = [
        row(3, response_ids=[4, 5, 6], loss_mask=[1, 0, 1], log_probs=[-1.0, None, -2.5],
            rollout_log_probs=[-1.5, -2.0, -3.0], rollout_id=2**62, text="ignored"),
        row(1, advantages=[0.5, -1.0], ref_log_probs=[-3.0, -4.0], group_index=-(2**63)),
    ]  # fmt: skip
    first, second = pull_all(RolloutFiles([write(tmp_path, rows, kind)]))
    assert first.tokens.tolist() == [3, 7, 4, 5, 6] and first.response_length == 3
    assert first.loss_mask.tolist() == [True, False, True]
    assert first.old_log_probs[[0, 2]].tolist() == [-1.0, -2.5]
    assert math.isnan(first.old_log_probs[1])
    assert first.rollout_log_probs.tolist() == [-1.5, -2.0, -3.0]
    assert first.ref_log_probs is None and first.rollout_id == 2**62
    assert first.reward == 0.75 and first.advantages.tolist() == [0.0] * 3
    assert first.name == f"rollouts.{kind} row 0"
    assert second.advantages.tolist() == [0.5, -1.0] and second.group_index == -(2**63)
    assert second.ref_log_probs.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("kind", KINDS)
def test_kept_sets(tmp_path: Path, kind: str) -> None:
    """Ragged lists of lists, an empty or missing set where all tokens were kept, in the middle of a
    file too.
    """
    sets = [[[5]], [[], [5, 9]], [[5, 1, 2], [7, 5], []], [], [[3, 5], [5]], [[], [], [5]], [[5]]]
    rows = [
        {"prompt_ids": [n], "response_ids": [5] * len(each), "reward": 1.0, "kept_tokens": each}
        for n, each in enumerate(sets)
    ]
    source = RolloutFiles([write(tmp_path, rows, kind)], required_fields=["kept_tokens"])
    for sample, expected in zip(pull_all(source), rows, strict=True):
        kept = sample.kept_tokens
        assert [kept.row(at).tolist() for at in range(len(kept))] == expected["kept_tokens"]
    if kind == "jsonl":
        path = write(tmp_path, [row(1, kept_tokens=[None, [5]])], kind)
        assert pull_all(RolloutFiles([path]))[0].kept_tokens.sizes.tolist() == [0, 1]


VARIANTS = {
    "no mask": row(2, loss_mask=None),
    "a mask of booleans": row(2, loss_mask=[True, True, True]),
    "a mask of floats": row(2, loss_mask=[1.0, 1.0, 1.0]),
    "one advantage for all": row(2, reward=None, advantages=2),
    "no response": row(2, response_ids=[], loss_mask=[], log_probs=[], rollout_log_probs=[]),
    "no optional field": {"prompt_ids": [2], "response_ids": [1], "reward": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_read_alone_and_among_others(tmp_path: Path, kind: str, variant: str) -> None:
    path = write(tmp_path, [VARIANTS[variant]], kind)
    assert read(path) == [2]
    if kind == "jsonl":  # a Parquet column has one type
        path = write(tmp_path, [row(0), VARIANTS[variant], row(1)], kind)
        samples = pull_all(RolloutFiles([path]))
        assert numbers(samples) == [0, 2, 1]
        assert all(bool(sample.loss_mask.all()) for sample in samples)


OF_RESPONSE = "expected .*one per response token"
BAD_ROWS = {
    "prompt_ids is .*missing.*, expected .*integers": row(prompt_ids=None),
    "prompt_ids is .*empty.*, expected .*one token": row(prompt_ids=[]),
    r"response_ids\[0\] is .*1.5.*, expected .*an integer": row(response_ids=[1.5]),
    r"response_ids\[0\] is .*-1.*, expected .*token id": row(response_ids=[-1]),
    r"response_ids\[0\] is .*90.*, expected .*below 90": row(response_ids=[90]),
    r"prompt_ids\[1\] is .*null.*, expected .*an integer": row(prompt_ids=[3, None]),
    "prompt_ids is .*'abc'.*, expected .*list of integers": row(prompt_ids="abc"),
    r"loss_mask\[0\] is .*2.*, expected .*0 or 1": row(loss_mask=[2]),
    f"loss_mask has 2 values, {OF_RESPONSE}": row(loss_mask=[1, 1]),
    f"log_probs has 0 values, {OF_RESPONSE}": row(log_probs=[]),
    r"log_probs\[0\] is .*0.5.*, expected .*at most 0": row(log_probs=[0.5]),
    r"log_probs\[0\] is .*nan.*, expected .*finite": row(log_probs=[None]),
    **{
        rf"{name}\[1\] is .*0.5.*, expected .*a log-prob: a finite number of at most 0": row(
            2, **{name: [0.5e-3, 0.5, -1.0]}
        )
        for name in ("rollout_log_probs", "ref_log_probs")
    },
    "reward is .*missing.*, expected .*advantages": row(reward=None),
    "reward is .*'high'.*, expected .*a number": row(reward="high"),
    "reward is .*True.*, expected .*a number": row(reward=True),
    "advantages is .*'up'.*, expected .*list of numbers": row(advantages="up"),
    f"advantages has 2 values, {OF_RESPONSE}": row(advantages=[1.0, 1.0]),
    r"advantages is .*1e\+39.*, expected .*float32": row(advantages=1e39),
    r"advantages\[0\] is .*-1e\+39.*, expected .*float32": row(advantages=[-1e39]),
    "group_index is .*1.5.*, expected .*an integer of 64 bits": row(group_index=1.5),
    "kept_tokens has 2 sets, expected one per": row(kept_tokens=[[5], [5]]),
    r"kept_tokens\[1\] is .*a set of 2 ids without 5.*, expected .*the sampled token": row(
        2, kept_tokens=[[5], [1, 2], []]
    ),
    r"kept_tokens\[0\] is .*id 90.*, expected .*below 90": row(kept_tokens=[[5, 90]]),
    "kept_tokens is .*'all'.*, expected .*list of lists of integers": row(kept_tokens="all"),
    "log_probs is .*missing.*, expected .*list of numbers": row(log_probs=None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_says_where_and_what(tmp_path: Path, kind: str, message: str) -> None:
    bad = BAD_ROWS[message]
    # In a Parquet file the type of a column is that of all its rows.
    rows = [row(4), row(5), bad, row(6)] if kind == "jsonl" else [bad]
    path = write(tmp_path, rows, kind)
    options: dict[str, Any] = {"required_fields": ["old_log_probs"], "vocab_size": 90}
    with pytest.raises(RowError, match=rf"{kind} row {len(rows) // 2}: {message}") as raised:
        pull_all(RolloutFiles([path], **options))
    assert raised.value.row == len(rows) // 2 and raised.value.file == str(path)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)

    source = RolloutFiles([path], on_bad_row="skip", **options)
    good = [None if r is bad else r["prompt_ids"][0] for r in rows]
    assert numbers(pull_all(source)) == good and source.num_skipped == 1

    report = validate_rollout_file(path, **options)
    assert (report.num_rows, report.num_bad_rows) == (len(rows), 1)
    assert str(report.errors[0]) == str(raised.value)


GOOD_LINE = json.dumps(row(1))
BAD_LINES = {
    "cut short": '{"prompt_ids": [1, 2',
    "no object": "[1, 2]",
    "a key twice": GOOD_LINE[:-1] + ', "reward": 5}',
    "two on a line": GOOD_LINE * 2,
    "NaN": json.dumps(row(1, reward=math.nan)),
    "a huge group": json.dumps(row(1, group_index=2**63)),
    "nested without end": "[" * 100_000,
    "nested too deeply": GOOD_LINE[:-1] + f', "text": {"[" * 100_000}{"]" * 100_000}}}',
    "tokens nested deeply": GOOD_LINE.replace("[1, 7]", "[" * 3000 + "]" * 3000),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_broken_line_spoils_only_itself(tmp_path: Path, case: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(f"{json.dumps(row(3))}\n\n{BAD_LINES[case]}\n  \n{json.dumps(row(4))}")
    with pytest.raises(RowError, match="row 1: "):
        pull_all(RolloutFiles([path]))
    source = RolloutFiles([path], on_bad_row="skip")
    assert numbers(pull_all(source)) == [3, None, 4] and source.num_skipped == 1


def test_a_line_of_many_brackets_is_read(tmp_path: Path) -> None:
    """Their number is no matter: what nests too deeply is refused. The last line may lack its
    newline.
    """
    path = write(tmp_path, [row(0), row(1, text=[[]] * 5000), row(2, text="{[" * 5000)], "jsonl")
    assert read(path) == [0, 1, 2]
    path.write_text(json.dumps(row(3)))
    assert read(path) == [3]


def test_integers_beyond_float64_spoil_only_their_rows(tmp_path: Path) -> None:
    """The integers of Python have no bound."""
    rows = [row(0), row(1, reward=True), row(2, reward=10**400), row(3, advantages=-(10**400))]
    path = write(tmp_path, rows, "jsonl")
    errors = [str(error) for error in validate_rollout_file(path).errors]
    assert [error.split()[3] for error in errors] == ["reward", "reward", "advantages"]
    assert "1000000" in errors[1] and "finite" in errors[1]
    assert read(path, on_bad_row="skip") == [0, None, None, None]


def files_of_both_kinds(folder: Path) -> list[Path]:
    """31 rows in four files, one of them empty."""
    (folder / "b.jsonl").write_text("\n")
    return [
        write(folder, rows_from(0, 13), "parquet", "a"),
        folder / "b.jsonl",
        write(folder, rows_from(13, 7), "jsonl", "c"),
        write(folder, rows_from(20, 11), "parquet", "d"),
    ]


@pytest.mark.parametrize("size", (1, 2, 3, 5))
@pytest.mark.parametrize("count", (1, 3, 4, 40))
def test_ranks_share_the_rows_over_all_files(tmp_path: Path, size: int, count: int) -> None:
    paths = files_of_both_kinds(tmp_path)
    for rank in range(size):
        source = RolloutFiles(paths, data_parallel_rank=rank, data_parallel_size=size)
        assert numbers(pull_all(source, count)) == list(range(rank, 31, size))


@pytest.mark.parametrize("sizes", ((1, 1), (2, 3), (3, 1)))
def test_a_run_goes_on_anywhere_at_any_size(tmp_path: Path, sizes: tuple[int, int]) -> None:
    paths = files_of_both_kinds(tmp_path)
    before, after = sizes
    for num_pulls in range(34 // before):
        seen = []
        for rank in range(before):
            source = RolloutFiles(paths, data_parallel_rank=rank, data_parallel_size=before)
            for _ in range(num_pulls):
                seen += numbers(source.pull(1))
        num_passed = len(seen)
        for rank in range(after):
            source = RolloutFiles(paths, data_parallel_rank=rank, data_parallel_size=after)
            source.seek(num_passed)
            seen += numbers(pull_all(source, 2))
        assert sorted(seen) == list(range(31))


def rows_from(first: int, count: int = 4) -> list[Row]:
    return [row(number) for number in range(first, first + count)]


def resume(paths: Sequence[Path], num_slots: int) -> list[int | None]:
    """The numbers of the rows after the first `num_slots`."""
    source = RolloutFiles(paths)
    source.seek(num_slots)
    return numbers(pull_all(source))


def test_files_in_another_folder_and_rows_after_the_last_go_on(tmp_path: Path) -> None:
    names = {"a": "jsonl", "b": "jsonl", "c": "parquet", "d": "jsonl"}
    (tmp_path / "moved").mkdir()
    paths = [write(tmp_path / "moved", rows_from(n), names[k], k) for n, k in enumerate(names)]
    assert resume([tmp_path / "moved"], 6) == [3, 4, 2, 3, 4, 5, 3, 4, 5, 6]
    assert resume(paths, 16) == []
    paths[3].write_text(f"{paths[3].read_text()}{json.dumps(row(50))}\n")
    more = write(tmp_path / "moved", [row(60)], "jsonl", "e")
    assert resume([*paths, more], 16) == [50, 60]


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_shorter_than_the_place_are_refused(tmp_path: Path, kind: str) -> None:
    paths = [write(tmp_path, rows_from(0, 7), kind, name) for name in "ab"]
    words = "the files have 14 rows, but the checkpoint stopped after 15 | same order"
    source = RolloutFiles(paths)
    source.seek(15)
    for _ in range(2):  # the next pull does not take it for the end
        assert_refused(words, source.pull, 1)


def test_a_directory_stands_for_its_files(tmp_path: Path) -> None:
    files_of_both_kinds(tmp_path)
    for name in ("notes.txt", "notes.gz"):
        (tmp_path / name).write_text("no rollouts")
    (tmp_path / "more").mkdir()
    assert read(tmp_path) == list(range(31))


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_may_end_in_capitals(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, [row(3)], kind)
    capitals = path.rename(path.with_suffix(path.suffix.upper()))
    assert read(tmp_path) == read(capitals) == [3]
    assert validate_rollout_file(capitals).num_rows == 1


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.JSON.ZST", "b.parquet.gz"])
def test_a_compressed_file_is_refused_and_not_passed_over(tmp_path: Path, name: str) -> None:
    write(tmp_path, [row(3)], "jsonl")
    compressed = tmp_path / name
    compressed.write_bytes(b"\x1f\x8b")
    for reader, path in ((read, tmp_path), (read, compressed), (validate_rollout_file, compressed)):
        assert_refused(f"{name} is compressed | Decompress it", reader, path)


def test_a_folder_that_is_named_as_a_file(tmp_path: Path) -> None:
    """Spark writes such folders: one of them may be given, and one among files is refused."""
    folder = tmp_path / "part.parquet"
    folder.mkdir()
    write(folder, [row(3)], "parquet")
    assert read(folder) == [3]
    write(tmp_path, [row(4)], "jsonl", "a")
    words = "part.parquet is a folder, | Pass the folder itself"
    assert_refused(words, RolloutFiles, [tmp_path])


def test_a_column_that_comes_twice_is_refused(tmp_path: Path) -> None:
    names = ["prompt_ids", "response_ids", "reward", "text", "text"]
    values = [pa.array([[1]]), pa.array([[2]]), *[pa.array([1.0])] * 3]
    path = tmp_path / "twice.parquet"
    parquet.write_table(pa.Table.from_arrays(values, names), path, write_page_checksum=True)
    assert read(path) == [1]  # other columns are ignored
    names[3] = "reward"
    parquet.write_table(pa.Table.from_arrays(values, names), path, write_page_checksum=True)
    for reader in (read, validate_rollout_file):
        assert_refused("twice.parquet has 2 columns reward", reader, path)


def test_bad_files_and_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "x.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    none, path = [tmp_path / "none.jsonl"], write(tmp_path, [row()], "jsonl")
    assert_refused("none.jsonl does not exist", RolloutFiles, none, error=FileNotFoundError)
    for paths, options, words in (
        ([], {}, "--rollout-files requires at least one file"),
        ([tmp_path / "x.csv"], {}, "x.csv does not end in"),
        ([tmp_path / "empty"], {}, "has no rollout file"),
        ([path], {"on_bad_row": "drop"}, "--on-bad-row | not 'drop'"),
        ([path], {"required_fields": ["reward"]}, "no column fills 'reward'"),
        ([path], {"vocab_size": 0}, "vocab_size is 0"),
        ([path], {"data_parallel_rank": 2, "data_parallel_size": 2}, "0 <= rank < size"),
    ):
        assert_refused(words, RolloutFiles, paths, **options)
    assert_refused("x.parquet is not a readable Parquet file", read, tmp_path / "x.parquet")


def test_samples_share_no_memory_with_their_window(tmp_path: Path) -> None:
    """One that is carried over would keep the whole window alive, and a checkpoint would hold
    it.
    """
    path = write(tmp_path, rows_from(0, 200), "parquet")
    sample = RolloutFiles([path]).pull(200)[7]
    for value in vars(sample).values():
        if isinstance(value, torch.Tensor):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_rewards_become_advantages_within_their_groups(tmp_path: Path) -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 3.0, 3.0]
    rows = [row(i, reward=reward, group_index=i // 4) for i, reward in enumerate(rewards)]
    samples = RolloutFiles([write(tmp_path, rows, "jsonl")]).pull(6)
    # The prompt of a row here is its number.
    replaced, step = with_group_advantages(samples, method="dr_grpo", allow_different_prompts=True)
    assert [sample.advantages[0].item() for sample in replaced] == [0.5, -0.5, -0.5, 0.5, 0, 0]
    assert step.zero_advantage_groups == (1,)
    lone = Sample([0, 1], 1, [1], group_index=0, name="online answer")
    assert_refused("online answer has no reward", with_group_advantages, [lone])


@pytest.mark.parametrize(
    ("method", "expected"), [("reward", [1, 0, 2]), ("step_rloo", [0, -1.5, 1.5])]
)
def test_a_baseline_of_the_step_needs_no_prompt_groups(method, expected, tmp_path: Path) -> None:
    rows = [row(i, reward=reward) for i, reward in enumerate([1.0, 0.0, 2.0])]
    for fields in rows:
        fields.pop("group_index", None)
    samples = RolloutFiles([write(tmp_path, rows, "jsonl")]).pull(3)
    replaced, step = with_group_advantages(samples, method=method)
    assert [sample.advantages[0].item() for sample in replaced] == expected
    assert step.num_groups == 3
    assert_refused(
        "has no group_index, which --advantage grpo requires", with_group_advantages, samples
    )


def test_a_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first row of Parquet; JSON Lines do without."""
    paths = {kind: write(tmp_path, [row(3)], kind) for kind in KINDS}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "megatron_pg.rollout_files.parquet_file", raising=False)
    words = "pip install 'pyarrow>=15'"
    assert_refused(words, RolloutFiles, [paths["parquet"]], error=ImportError)
    assert read(paths["jsonl"]) == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_columns_of_vllm_are_read(tmp_path: Path, kind: str) -> None:
    """As the columns of ours that mean the same; not in the place of one of ours, nor one alone."""
    names = {"prompt_ids": "prompt_token_ids", "response_ids": "token_ids"}
    names["rollout_log_probs"] = "logprobs"
    ours = [row(n, rollout_log_probs=[-0.25 - n] * (n % 3 + 1)) for n in range(3)]
    theirs = [{names.get(name, name): value for name, value in fields.items()} for fields in ours]
    expected = pull_all(RolloutFiles([write(tmp_path, ours, kind, "ours")]))
    found = pull_all(RolloutFiles([write(tmp_path, theirs, kind)]))
    for sample, same in zip(found, expected, strict=True):
        assert sample.tokens.tolist() == same.tokens.tolist()
        assert sample.response_length == same.response_length
        assert torch.equal(sample.rollout_log_probs, same.rollout_log_probs)
    both = [row(3, prompt_token_ids=[8, 9], token_ids=[1, 2, 3], logprobs=[-9.0])]
    (kept,) = pull_all(RolloutFiles([write(tmp_path, both, kind, "both")]))
    assert kept.tokens.tolist() == [3, 7, 5] and kept.rollout_log_probs.tolist() == [-0.25]
    whole = row(3, response_ids=None, token_ids=[3, 7, 5])  # without prompt_token_ids: of what?
    path = write(tmp_path, [whole], kind, "whole")
    assert_refused("response_ids is missing", read, path, error=RowError)


def test_validate_names_groups_and_rollouts_whose_rows_are_scattered(tmp_path: Path) -> None:
    """As the run says at the step after; rows of one that follow each other are not, over two files
    neither.
    """

    def grouped(name: str, groups: Sequence[int], rollouts: Sequence[int | None] = ()) -> Path:
        ids = itertools.zip_longest(groups, rollouts)
        rows = [row(group_index=group, rollout_id=rollout) for group, rollout in ids]
        return write(tmp_path, rows, "jsonl", name)

    whole = grouped("whole", [1, 1, 2, 2], [5, 5, 6, None])
    report = validate_rollout_file(whole)
    assert (report.num_scattered, report.scattered, report.num_documents) == (0, [], 3)
    report = validate_rollout_file(grouped("scattered", [1, 2, 1, 2], [5, 6, 7, 6]))
    assert report.num_scattered == 3 and report.num_documents == 3
    assert report.scattered[0].startswith("scattered.jsonl row 2: group_index 1 returns")
    assert "rollout_id 6 returns" in report.scattered[2]
    other = grouped("other", [2, 3, 1])
    both = validate_rollout_file(whole, other, max_errors=1)
    assert both.num_scattered == 1
    assert both.scattered[0].startswith("other.jsonl row 2: group_index 1")
    assert validate_rollout_file(whole, other, distinct_ids=True).num_scattered == 0
    source = RolloutFiles([grouped("again", [1, 1, 2, 2, 1, 1, 3, 3])])
    collector = StepCollector(source, docs_per_step=2, mode="exact", keep_prompt_groups=True)
    message = refusal(lambda: [*iter(collector.collect, None)])
    assert "prompt group" in message and "(group_index) is split" in message
    assert "prompt mean" not in message  # no setting here asks for it
