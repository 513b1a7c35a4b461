"""examples/train.py from rollout files: its steps, and that a run that goes on equals one that was
never stopped.
"""

import argparse
import errno
import functools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from .trainer_run import (
    TRACKER,
    WHOLE_GROUPS,
    copy_after_step,
    end_of,
    hold_at,
    output_of,
    run,
    start,
    steps_of,
    wait,
    wait_for_steps,
    write_rollouts,
)

pytestmark = pytest.mark.full

STEPS = WHOLE_GROUPS + "--train-iters 6 --save-interval 3 "


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", 40)


@pytest.fixture(scope="module")
def uninterrupted(rollouts: Path) -> Path:
    folder = rollouts.with_name("uninterrupted")
    run(rollouts, folder, f"{STEPS}--tensorboard-dir {folder}/tensorboard")
    return folder


@pytest.fixture
def stopped(uninterrupted: Path, tmp_path: Path) -> Path:
    """The run as it was when its third step was done."""
    return copy_after_step(3, uninterrupted, tmp_path / "run")


def break_call(function: str, error: Exception | None, only: int | None, rank: int) -> None:
    """Put a mock in the place of a function, on every rank or on one."""
    if only in (None, rank):
        mock.patch(function, side_effect=error).start()


def checkpoints_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("iter_*"))


def is_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Of the metrics that are known, the others being None."""
    first, second = (
        [{name: value for name, value in step.items() if value is not None} for step in steps]
        for steps in (found, expected)
    )
    near = [pytest.approx(step, rel=1e-4, abs=1e-5) for step in second]
    return first == near


def test_steps_hold_whole_groups_and_say_what_they_hold(uninterrupted: Path) -> None:
    steps = steps_of(uninterrupted)
    assert len(steps) == 6 and any(step["docs"] > 10 for step in steps)
    assert sum(step["skipped_rows"] for step in steps) > 0
    for number, step in enumerate(steps, 1):
        assert step["step"] == number and 10 <= step["docs"] < 14
        assert step["aggregation_checksum"] == pytest.approx(1.0, abs=1e-6)
        assert step["grad_norm"] > 0.0 and 0.0 <= step["reward"] <= 2.0
        # The rate falls to zero over --train-iters, whatever a step holds.
        assert step["learning_rate"] == pytest.approx(1e-2 * (7 - number) / 6)
    assert checkpoints_of(uninterrupted) == ["iter_0000003", "iter_0000006"]
    assert (uninterrupted / TRACKER).read_text() == "6"


def test_tensorboard_has_the_metrics_and_megatrons_own(uninterrupted: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(uninterrupted / "tensorboard"))
    events.Reload()
    written = [event.value for event in events.Scalars("pg_loss")]
    assert written == pytest.approx([step["pg_loss"] for step in steps_of(uninterrupted)])
    assert len(events.Scalars("grad-norm")) == len(events.Scalars("loss-scale")) == 6


def test_a_run_is_extended(rollouts: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """With the schedule of the new length, and refused without the flag that says so."""
    longer, extended = f"{WHOLE_GROUPS}--train-iters 8 --save-interval 8 ", tmp_path / "run"
    copy_after_step(6, uninterrupted, extended)
    said = end_of(rollouts, extended, longer)
    assert "--override-opt-param-scheduler" in said
    run(rollouts, extended, longer + "--override-opt-param-scheduler")
    steps = steps_of(extended)
    assert steps[:6] == steps_of(uninterrupted)
    assert [step["step"] for step in steps[6:]] == [7, 8]
    # Linear from 1e-2 to 0 over 8 steps, the seventh at 6 / 8 and the last at 7 / 8 of the way.
    assert [step["learning_rate"] for step in steps[6:]] == pytest.approx([2e-2 / 8, 1e-2 / 8])


def test_exit_interval_ends_a_run_after_a_checkpoint(rollouts, uninterrupted, tmp_path):
    """And the run goes on with its own file of settings."""
    run(rollouts, tmp_path / "run", f"{STEPS}--save-interval 100 --exit-interval 2")
    assert len(steps_of(tmp_path / "run")) == 2
    flags = f"--config {tmp_path}/run/settings.yaml --exit-interval 100"
    run(None, tmp_path / "run", flags, base="", model="")
    assert checkpoints_of(tmp_path / "run") == ["iter_0000002", "iter_0000006"]
    assert steps_of(tmp_path / "run") == steps_of(uninterrupted)


@pytest.mark.parametrize(
    ("world_size", "flags"), [(2, "--context-parallel-size 2"), (1, "")], ids=["cp2", "dp1"]
)
def test_a_run_of_two_data_parallel_ranks_goes_on_on_others(
    rollouts: Path, uninterrupted: Path, stopped: Path, world_size: int, flags: str
) -> None:
    # The budget changes the order of sums and nothing else, so it may change too.
    run(rollouts, stopped, f"{STEPS}{flags} --max-tokens-per-microbatch 128", world_size=world_size)
    assert is_close(steps_of(stopped), steps_of(uninterrupted))


def test_forgetting_a_part_of_the_checkpoint_is_noticed(rollouts, uninterrupted, stopped):
    """The mutant of the tests above: samples that were carried over are lost."""
    run(rollouts, stopped, STEPS, prepare=_lose_carried_samples)
    assert not is_close(steps_of(stopped), steps_of(uninterrupted))


def _lose_carried_samples(rank: int) -> None:
    from megatron_pg.rollout_files import StepCollector

    load_state = StepCollector.load_state

    def load_less(self: StepCollector, state: Any) -> None:
        load_state(self, state._replace(carried=()))

    StepCollector.load_state = load_less


def test_the_end_of_the_files_ends_the_run(tmp_path: Path) -> None:
    short = write_rollouts(tmp_path / "short.jsonl", 5)
    num_rows = len(short.read_text().splitlines())
    flags = WHOLE_GROUPS + "--train-iters 9 --save-interval 100"
    for _ in range(2):  # and again, with nothing left to do
        run(short, tmp_path / "run", flags)
        steps = steps_of(tmp_path / "run")
        assert sum(step["docs"] + step["skipped_rows"] for step in steps) == num_rows
        assert checkpoints_of(tmp_path / "run") == [f"iter_{len(steps):07d}"]
        assert len(steps) < 9


def test_what_megatron_left_of_a_killed_save_is_passed_over(rollouts, uninterrupted, stopped):
    """A tracker file cut to nothing, and half a checkpoint of the step that comes."""
    (stopped / TRACKER).write_text("")
    half = stopped / "iter_0000006"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    (half / "__7_0.distcp").write_bytes(b"of another sharding")
    run(rollouts, stopped, STEPS)
    assert steps_of(stopped) == steps_of(uninterrupted)
    assert not (half / "__7_0.distcp").exists() and (half / "metadata.json").exists()


def test_finetune_begins_with_the_weights_alone(rollouts, uninterrupted, tmp_path):
    flags = f"{STEPS}--load {uninterrupted} --finetune"
    run(rollouts, tmp_path / "run", flags)
    found, first = steps_of(tmp_path / "run"), steps_of(uninterrupted)
    assert [step["docs"] for step in found] == [step["docs"] for step in first]
    assert found[0]["learning_rate"] == first[0]["learning_rate"]
    # The weights are not those of the beginning.
    assert abs(found[0]["new_logprobs"] - first[0]["new_logprobs"]) > 1e-3
    # Started again with the same flags it would begin once more, over what it has done.
    said = end_of(rollouts, tmp_path / "run", flags)
    assert "has checkpoints of a different run: resume it" in said


def test_a_second_run_in_the_same_folder_is_refused(rollouts: Path, tmp_path: Path) -> None:
    many = write_rollouts(tmp_path / "rollouts.jsonl", 400)
    first = start(many, tmp_path / "run", STEPS + "--train-iters 1000")
    try:
        wait_for_steps(first, tmp_path / "run", 1)
        for rank in first:  # in the middle of a run, however long the second takes to begin
            os.kill(rank.pid or 0, signal.SIGSTOP)
        metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
        assert "a different run is writing" in end_of(rollouts, tmp_path / "run", STEPS)
        assert all(rank.is_alive() for rank in first)
        assert (tmp_path / "run/metrics.jsonl").read_bytes().startswith(metrics)
    finally:
        for rank in first:
            rank.kill()
            rank.join()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-distributed-optimizer", "cannot load the moments of torch's Adam"),
        ("--weight-decay 0.5", "start weight decay"),
        ("--eps-clip 0.1", "eps_clip 0.2, but this run has 0.1"),
        ("--docs-per-step 12", "docs_per_step 10, but this run has 12"),
        # Those after it are trained on.
        ("--held-out-tasks 32", "held_out_tasks 64, but this run has 32"),
    ],
)
def test_a_run_with_other_settings_does_not_go_on(rollouts, stopped, flags, message):
    metrics = (stopped / "metrics.jsonl").read_bytes()
    assert message in end_of(rollouts, stopped, f"{STEPS}{flags}")
    assert (stopped / "metrics.jsonl").read_bytes() == metrics


def test_rollouts_that_end_before_the_place_of_the_checkpoint_are_refused(
    rollouts: Path, stopped: Path
) -> None:
    (stopped / "other").mkdir()
    other = stopped / "other" / rollouts.name
    other.write_text("".join(rollouts.read_text().splitlines(keepends=True)[:2]))
    said = end_of(other, stopped, STEPS)
    assert "error: --rollout-files: the files have 2 rows, but the checkpoint stopped after" in said


def hide_place(rank: int) -> None:
    """Show a checkpoint as a pre-training run leaves it, without a place in the rollouts."""
    function = "trainer.checkpoint.dist_checkpointing.load_common_state_dict"
    mock.patch(function, return_value={"args": argparse.Namespace()}).start()


def test_a_checkpoint_of_another_program_is_named(rollouts: Path, stopped: Path) -> None:
    said = end_of(rollouts, stopped, STEPS + "--train-iters 9", prepare=hide_place)
    assert "a different program and has no position in the rollouts" in said


def test_a_damaged_checkpoint_is_named(rollouts: Path, stopped: Path) -> None:
    for path in (stopped / "iter_0000003").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    said = end_of(rollouts, stopped, STEPS)
    assert f"{stopped}/iter_0000003 cannot be read (rank 0)" in said


def test_with_verify_integrity_a_flipped_bit_is_named(rollouts: Path, tmp_path: Path) -> None:
    flags = STEPS + "--verify-integrity "
    run(rollouts, tmp_path / "run", flags + "--exit-interval 3")
    path = tmp_path / "run/iter_0000003/__0_0.distcp"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    said = end_of(rollouts, tmp_path / "run", flags)
    assert "__0_0.distcp" in said and "error: --load cannot be read" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--on-bad-row error", "token id of at least 0 and below"),
        ("--docs-per-step 9", "is split by the end of a step"),
        ("--docs-per-step 9 --loss-aggregation sample_mean", "add --keep-prompt-groups"),
        (WHOLE_GROUPS + "--max-position-embeddings 12", "more than --max-position-embeddings"),
        (WHOLE_GROUPS + "--max-tokens-per-microbatch 12", "more than --max-tokens-per-microbatch"),
    ],
)
def test_what_a_step_cannot_hold_ends_all_ranks_with_a_line(rollouts, tmp_path, flags, message):
    own = "--train-iters 9 --save-interval 9 --seq-length 12 "
    said = end_of(rollouts, tmp_path / "run", own + flags)
    assert [line for line in said.splitlines() if message in line and line.startswith("error: ")]


def test_rollouts_of_a_newer_policy_end_all_ranks_with_a_line(tmp_path: Path) -> None:
    lines = write_rollouts(tmp_path / "rollouts.jsonl", 24).read_text().splitlines()
    newer = [
        row | {"policy_version": 7, "rollout_log_probs": row["log_probs"]}
        for row in map(json.loads, lines)
    ]
    path = tmp_path / "newer.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in newer))
    said = end_of(path, tmp_path / "run", f"{STEPS}--old-log-probs interpolated")
    assert re.search(
        "(?m)^error: .*policy_version.* is 7, newer than the step.s policy_version 0", said
    )


ROWS, DISK = "megatron_pg.rollout_files.source.open_rows", OSError(errno.EIO, "Input/output error")
FULL = OSError(errno.ENOSPC, "No space left on device")
MISSING = FileNotFoundError("--rollout-files: x.jsonl does not exist")
FAULTS = {
    "error: [Errno 5] Input/output error": (ROWS, DISK, 0),
    "error: data-parallel rank 1: OSError: [Errno 5] Input/output error": (ROWS, DISK, 1),
    f"error: the run cannot begin (rank 1): {MISSING}": (
        *("megatron_pg.rollout_files.source.files_of", MISSING, 1),
    ),
    # Rank 0 alone calls it, and the other waits for it in the middle of Megatron's save.
    "cannot be written (rank 0): [Errno 28] No space left on device": (
        *("megatron.core.dist_checkpointing.serialization.save_config", FULL, None),
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_an_error_of_one_rank_ends_all_ranks_with_a_line(rollouts, tmp_path, message):
    prepare = functools.partial(break_call, *FAULTS[message])
    assert message in end_of(rollouts, tmp_path / "run", STEPS, prepare=prepare)
    assert not (tmp_path / "run" / TRACKER).exists()


def test_a_signal_ends_a_run_after_a_checkpoint(rollouts, uninterrupted, tmp_path):
    prepare = functools.partial(hold_at, 3, tmp_path / "run", tmp_path / "sent")
    ranks = start(rollouts, tmp_path / "run", STEPS + "--exit-signal-handler", prepare=prepare)
    wait_for_steps(ranks, tmp_path / "run", 1)
    ranks[1].terminate()  # one is enough
    (tmp_path / "sent").touch()
    assert wait(ranks) == [0, 0], output_of(tmp_path / "run").read_text()
    assert 1 <= len(steps_of(tmp_path / "run")) < 6
    run(rollouts, tmp_path / "run", STEPS)
    assert steps_of(tmp_path / "run") == steps_of(uninterrupted)
