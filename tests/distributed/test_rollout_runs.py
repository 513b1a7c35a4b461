"""The training script from rollout files: its steps, and that a resumed run equals one that was never stopped."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lanes import in_one_lane

from .rollout_run import (
    TIMEOUT_SECONDS,
    WHOLE_GROUPS,
    copy_after_step,
    output_of,
    run,
    start,
    steps_of,
    wait,
    wait_for_steps,
    write_rollouts,
)

pytest.importorskip("pyarrow")

STEPS = WHOLE_GROUPS + "--train-iters 6 --save-interval 3"


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", 40)


@pytest.fixture(scope="module")
def uninterrupted(rollouts: Path) -> Path:
    run_dir = rollouts.with_name("uninterrupted")
    run(rollouts, run_dir, STEPS)
    return run_dir


@pytest.fixture
def stopped(uninterrupted: Path, tmp_path: Path) -> Path:
    """The run as it was when its third step was done."""
    return copy_after_step(3, uninterrupted, tmp_path / "run")


def end_of(
    rollouts: Path | None, run_dir: Path, flags: str, prepare: Callable[[int], None] | None = None
) -> str:
    """What a run said of which every rank must end by itself, with a message: nobody ends the others."""
    ranks = start(rollouts, run_dir, flags, prepare=prepare)
    for rank in ranks:
        rank.join(TIMEOUT_SECONDS)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    said = output_of(run_dir).read_text()
    assert "Traceback" not in said
    return said


def test_steps_hold_whole_groups_and_say_what_they_hold(uninterrupted: Path) -> None:
    steps = steps_of(uninterrupted)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(10 <= step["docs"] < 14 for step in steps)
    assert any(step["docs"] > 10 for step in steps)
    assert sum(step["skipped_rows"] for step in steps) > 0
    assert all(step["aggregation_checksum"] == pytest.approx(1.0, abs=1e-6) for step in steps)
    assert all(step["grad_norm"] > 0.0 for step in steps)
    assert all(0.0 <= step["reward"] <= 2.0 for step in steps)
    kept = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert kept == ["step_000000_000003", "step_000000_000006"]


def test_a_resumed_run_goes_on_in_the_middle_of_the_file(
    rollouts: Path, uninterrupted: Path, stopped: Path
) -> None:
    checkpoints = stopped / "checkpoints"
    others = {"step_best", "step_000000_000003_keep", "step_000000_000002.old"}
    for other in others:  # a folder that no run named is neither resumed from nor removed
        shutil.copytree(checkpoints / "step_000000_000003", checkpoints / other)
    said = run(rollouts, stopped, STEPS + " --resume")
    assert f"resuming from {checkpoints / 'step_000000_000003'}" in said
    assert steps_of(stopped) == steps_of(uninterrupted)
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"step_000000_000003", "step_000000_000006", *others}


def test_a_damaged_checkpoint_ends_all_ranks_with_a_line(
    rollouts: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir)
    newest, before = (run_dir / f"checkpoints/step_000000_00000{step}" for step in (6, 3))
    damaged = max((newest / "model").iterdir(), key=lambda path: path.stat().st_size)
    contents = bytearray(damaged.read_bytes())
    contents[len(contents) // 2] ^= 1
    damaged.write_bytes(contents)
    said = end_of(rollouts, run_dir, STEPS + " --resume")
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert f"{newest} is damaged (model/{damaged.name} is not as it was written)" in line
    assert f"the whole one before it is {before}" in line
    newest.rename(f"{newest}.damaged")
    assert f"resuming from {before}" in run(rollouts, run_dir, STEPS + " --resume")
    assert steps_of(run_dir) == steps_of(uninterrupted)


@pytest.mark.parametrize(
    ("world_size", "flags"), [(2, "--context-parallel-size 2"), (1, "")], ids=["cp2", "dp1"]
)
def test_a_run_of_two_data_parallel_ranks_is_resumed_on_others(
    rollouts: Path, uninterrupted: Path, stopped: Path, world_size: int, flags: str
) -> None:
    run(rollouts, stopped, f"{STEPS} --resume {flags}", world_size)
    assert _is_close(steps_of(stopped), steps_of(uninterrupted))


def test_forgetting_a_part_of_the_checkpoint_is_noticed(
    rollouts: Path, uninterrupted: Path, stopped: Path
) -> None:
    """The mutant of the tests above: samples that were carried over are lost."""
    run(rollouts, stopped, STEPS + " --resume", prepare=_lose_carried_samples)
    assert not _is_close(steps_of(stopped), steps_of(uninterrupted))


def _lose_carried_samples(rank: int) -> None:
    from megatron_pg.step import StepCollector

    load_states = StepCollector.load_states

    def load_less(self: StepCollector, states: Sequence[Any]) -> None:
        load_states(self, [dataclasses.replace(state, carried=()) for state in states])

    StepCollector.load_states = load_less  # type: ignore[method-assign]


def _is_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(found) == len(expected) and all(
        _known(one) == pytest.approx(_known(other), rel=1e-4, abs=1e-5)
        for one, other in zip(found, expected, strict=True)
    )


def _known(step: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in step.items() if value is not None}


def test_the_end_of_the_files_ends_the_run(tmp_path: Path) -> None:
    short = write_rollouts(tmp_path / "short.jsonl", 5)
    num_rows = len(short.read_text().splitlines())
    run_dir = tmp_path / "run"
    run(short, run_dir, WHOLE_GROUPS + "--train-iters 9 --keep-last-checkpoints 1")
    steps = steps_of(run_dir)
    assert sum(step["docs"] + step["skipped_rows"] for step in steps) == num_rows
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == len(steps) < 9
    kept = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert kept == [f"step_000000_{len(steps):06d}"]


@pytest.mark.parametrize(("rows", "message"), [(20, "20 bad rows skipped"), (0, "(no rows)")])
def test_files_without_a_sample_are_no_success(tmp_path: Path, rows: int, message: str) -> None:
    """A misspelt column makes every row a bad one, which --on-bad-row skip passes over."""
    row = {"prompt_ids": [1], "response_ids": [2], "logprobs": [-1.0], "reward": 1.0}
    path = tmp_path / "misnamed.jsonl"
    path.write_text((json.dumps(row | {"group_index": 0}) + "\n") * rows)
    assert wait(start(path, tmp_path / "run", STEPS)) == [1, 1]
    assert f"{path}: no sample in them" in output_of(tmp_path / "run").read_text()
    assert message in output_of(tmp_path / "run").read_text()


def _without_reasoning_gym(rank: int) -> None:
    """As on a machine that lacks it; what has imported it is forgotten."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("reasoning_gym", "quickstart", "train_grpo"):
            del sys.modules[name]
    sys.modules["reasoning_gym"] = None  # type: ignore[assignment]


@in_one_lane
def test_only_an_online_run_needs_tasks(
    rollouts: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run(rollouts, tmp_path / "run", STEPS, prepare=_without_reasoning_gym)
    assert steps_of(tmp_path / "run") == steps_of(uninterrupted)
    said = end_of(None, tmp_path / "online", "--train-iters 2", _without_reasoning_gym)
    assert "an online run takes its tasks from reasoning-gym" in said
    assert "pip install 'megatron_pg[examples]'" in said


def test_parquet_gives_the_steps_of_json_lines(
    rollouts: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    parquet = tmp_path / "rollouts.parquet"
    # Row groups smaller than a step.
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet, row_group_size=7)
    run(parquet, tmp_path / "run", STEPS)
    assert steps_of(tmp_path / "run") == steps_of(uninterrupted)


def test_rejected_tokens_leave_the_denominators(rollouts: Path, tmp_path: Path) -> None:
    """The rollout engine's log-probs are far off in half of the answers, and those are rejected."""
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    for index, row in enumerate(rows):
        shift = 2.0 * (index % 2)
        row["rollout_log_probs"] = [value - shift for value in row["log_probs"]]
    far = tmp_path / "far.jsonl"
    far.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--train-iters 1 --loss-aggregation token_mean --use-geometric-rejection "
    first = {}
    for denominator in ("original", "accepted"):
        own = f"{WHOLE_GROUPS}{flags}--rejection-denominator {denominator}"
        run(far, tmp_path / denominator, own)
        (first[denominator],) = steps_of(tmp_path / denominator)
        assert first[denominator]["aggregation_checksum"] == pytest.approx(1.0, abs=1e-6)
    # The same tokens are kept; only T, what their sum is divided by, differs.
    original, accepted = first["original"], first["accepted"]
    ratio = original["num_tokens"] / accepted["num_tokens"]
    assert ratio > 1.3
    for name in ("pg_loss", "grad_norm"):
        assert accepted[name] == pytest.approx(ratio * original[name], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--on-bad-row error", "token id of at least 0 and below"),
        ("--docs-per-step 9", "is cut by the end of a step"),
        ("--docs-per-step 9 --loss-aggregation sample_mean", "give --keep-prompt-groups"),
        (WHOLE_GROUPS + "--max-position-embeddings 12", "more than --max-position-embeddings"),
        (WHOLE_GROUPS + "--max-tokens-per-microbatch 12", "more than --max-tokens-per-microbatch"),
    ],
)
def test_what_a_step_cannot_hold_ends_all_ranks_with_a_line(
    rollouts: Path, tmp_path: Path, flags: str, message: str
) -> None:
    said = end_of(rollouts, tmp_path / "run", "--train-iters 9 --seq-length 12 " + flags)
    assert [line for line in said.splitlines() if message in line and line.startswith("error: ")]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_file_that_one_node_cannot_read_ends_all_ranks_with_a_line(
    rollouts: Path, tmp_path: Path, failing: int
) -> None:
    prepare = functools.partial(_fail_to_read, failing)
    whose = "data-parallel rank 1: OSError: " if failing else ""
    said = end_of(rollouts, tmp_path / "run", STEPS, prepare)
    assert f"error: {whose}[Errno 5] Input/output error" in said


def _fail_to_read(failing: int, rank: int) -> None:
    from megatron_pg.rollout_files import source

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if rank == failing:
        source.open_rows = fail  # type: ignore[assignment]


def test_a_checkpoint_that_one_rank_cannot_complete_ends_all_ranks(
    rollouts: Path, tmp_path: Path
) -> None:
    """Rank 0 fails where it writes by itself and the other waits for it, in the middle of Megatron's save."""
    run_dir = tmp_path / "run"
    said = end_of(rollouts, run_dir, STEPS, _fail_to_write_metadata)
    assert "cannot be written (rank 0): [Errno 28] No space left on device" in said
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [
        "partial_step_000000_000003"
    ]


def _fail_to_write_metadata(rank: int) -> None:
    from megatron.core.dist_checkpointing import serialization

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    serialization.save_config = fail


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl", 400)
    first = start(rollouts, tmp_path / "run", STEPS + " --train-iters 1000")
    try:
        wait_for_steps(first, tmp_path / "run", 1)
        for rank in first:  # in the middle of a run, however long the second takes to begin
            os.kill(rank.pid or 0, signal.SIGSTOP)
        metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
        assert "another run is writing" in end_of(rollouts, tmp_path / "run", STEPS)
        assert all(rank.is_alive() for rank in first)
        assert (tmp_path / "run/metrics.jsonl").read_bytes().startswith(metrics)
    finally:
        for rank in first:
            rank.kill()
            rank.join()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-distributed-optimizer", "use_distributed_optimizer False and this run has True"),
        ("--weight-decay 0.5", "weight_decay 0.01 and this run has 0.5"),
        ("--num-query-groups 2 --group-query-attention", "group_query_attention"),
        ("--norm-epsilon 0.5", "layernorm_epsilon 1e-05 and this run has 0.5"),
    ],
)
def test_a_run_with_other_settings_is_not_resumed(
    rollouts: Path, stopped: Path, flags: str, message: str
) -> None:
    assert wait(start(rollouts, stopped, f"{STEPS} --resume {flags}")) == [1, 1]
    assert message in output_of(stopped).read_text()


def test_a_file_that_one_node_does_not_have_ends_all_ranks_with_a_line(
    rollouts: Path, tmp_path: Path
) -> None:
    said = end_of(rollouts, tmp_path / "run", STEPS, _lack_the_files_on_1)
    assert "error: the run cannot begin (rank 1): --rollout-files: x.jsonl does not exist" in said


def _lack_the_files_on_1(rank: int) -> None:
    from megatron_pg.rollout_files import source

    def lack(_: Any) -> None:
        raise FileNotFoundError("--rollout-files: x.jsonl does not exist")

    if rank == 1:
        source.files_of = lack  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda lines: [*lines[1:], lines[0]], "had other contents"),
        (lambda lines: lines[:-1], "bytes"),
    ],
    ids=["reordered", "shorter"],
)
def test_a_run_with_other_rollouts_of_the_same_name_is_not_resumed(
    rollouts: Path, stopped: Path, changed: Callable[[list[str]], list[str]], message: str
) -> None:
    (stopped / "other").mkdir()
    other = stopped / "other" / rollouts.name
    other.write_text("".join(changed(rollouts.read_text().splitlines(keepends=True))))
    metrics = (stopped / "metrics.jsonl").read_bytes()
    assert wait(start(other, stopped, f"{STEPS} --resume")) == [1, 1]
    output = output_of(stopped).read_text()
    assert "error: --rollout-files: file 1 of the 1" in output and message in output
    assert "Traceback" not in output
    assert (stopped / "metrics.jsonl").read_bytes() == metrics


def test_a_run_is_resumed_with_more_rollouts_in_another_folder(
    rollouts: Path, uninterrupted: Path, stopped: Path
) -> None:
    (stopped / "moved").mkdir()
    moved = stopped / "moved" / rollouts.name
    moved.write_text(rollouts.read_text() + rollouts.read_text().splitlines()[0])
    run(moved, stopped, STEPS + " --resume")
    assert steps_of(stopped) == steps_of(uninterrupted)


def test_a_run_is_resumed_with_other_micro_batches(
    rollouts: Path, uninterrupted: Path, stopped: Path
) -> None:
    """The budget changes the order of sums and nothing else, so it may change."""
    run(rollouts, stopped, STEPS + " --resume --max-tokens-per-microbatch 128")
    assert _is_close(steps_of(stopped), steps_of(uninterrupted))
