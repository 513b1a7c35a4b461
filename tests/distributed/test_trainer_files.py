"""examples/train.py and its rollout files: their formats, what they lack, and what may change when
a run goes on.
"""

import argparse
import json
from pathlib import Path

import pytest

from megatron_pg import PolicyLossConfig

from .trainer_run import WHOLE_GROUPS, copy_after_step, end_of, run, steps_of, write_rollouts

pytestmark = pytest.mark.full

STEPS = WHOLE_GROUPS + "--train-iters 4 --save-interval 2 "
STEPS += "--kl-loss-coef 0.1 --kl-target 0.001 --kl-horizon 20 "


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", 30)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | {"ref_log_probs": [value - 0.3 for value in row["log_probs"]]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def uninterrupted(rollouts: Path) -> Path:
    run(rollouts, rollouts.with_name("uninterrupted"), STEPS)
    return rollouts.with_name("uninterrupted")


@pytest.mark.parametrize(("rows", "message"), [(20, "20 bad rows skipped"), (0, "(no rows)")])
def test_files_without_a_sample_are_no_success(tmp_path: Path, rows: int, message: str) -> None:
    """A misspelt column makes every row a bad one, which --on-bad-row skip passes over."""
    row = {"prompt_ids": [1], "response_id": [2], "reward": 1.0, "group_index": 0}
    path = tmp_path / "misnamed.jsonl"
    path.write_text((json.dumps(row) + "\n") * rows)
    said = end_of(path, tmp_path / "run", STEPS)
    assert f"{path}: no sample in them" in said and message in said


def test_parquet_gives_the_steps_of_json_lines(rollouts, uninterrupted, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    parquet = tmp_path / "rollouts.parquet"
    # Row groups smaller than a step.
    table, options = pyarrow.Table.from_pylist(rows), {"write_page_checksum": True}
    pyarrow.parquet.write_table(table, parquet, row_group_size=7, **options)
    run(parquet, tmp_path / "run", STEPS)
    assert steps_of(tmp_path / "run") == steps_of(uninterrupted)


def test_advantages_and_means_are_of_rollouts(tmp_path: Path) -> None:
    """The first rollout has three rows, of 3, 2 and 1 tokens."""
    from trainer.rollouts import FileSteps

    args = argparse.Namespace(
        **{"advantage": "grpo", "rank": 1, "keep_prompt_groups": True, "whiten_advantages": False},
        **{"task": None, "allow_different_prompts_in_group": False, "max_position_embeddings": 8},
        **{"rollout_files": [tmp_path / "rows.jsonl"], "on_bad_row": "error", "ref_load": None},
        **{
            "vocab_size": 8,
            "distinct_ids": None,
            "docs_per_step": 2,
            "docs_per_step_mode": "exact",
        },
    )
    rows = [
        {"prompt_ids": [1], "response_ids": [2] * length, "log_probs": [-1.0] * length}
        | {"reward": reward, "rollout_id": rollout, "group_index": 0}
        for length, reward, rollout in ((3, 1.0, 7), (2, 1.0, 7), (1, 1.0, 7), (4, 0.0, None))
    ]

    def step() -> tuple[list[float], dict[str, float | None]]:
        args.rollout_files[0].write_text("".join(json.dumps(row) + "\n" for row in rows))
        samples, metrics = FileSteps(args, PolicyLossConfig()).step(0)
        return [float(sample.advantages[0]) for sample in samples], metrics

    advantages, metrics = step()
    assert advantages == pytest.approx([0.5**0.5] * 3 + [-(0.5**0.5)], rel=1e-5)
    expected = {"docs": 2, "skipped_rows": 0, "reward": 0.5, "response_length": 5.0}
    assert metrics == expected
    args.advantage = "rloo"
    assert step()[0] == pytest.approx([1.0] * 3 + [-1.0], rel=1e-5)
    args.whiten_advantages = True  # over ten tokens, of which four are of the second rollout
    assert step()[0] == pytest.approx([0.6**0.5] * 3 + [-(1.35**0.5)], rel=1e-5)
    args.whiten_advantages = False
    rows[3]["advantages"] = 0.25
    with pytest.raises(ValueError, match="row 3 has advantages and .* row 0 only a reward"):
        step()
    # Every row has advantages: those of the file are kept, and rewards are only reported.
    rows = [row | {"advantages": 0.25, "reward": row["reward"] / 2} for row in rows]
    rows[0]["reward"] = None
    assert step() == ([0.25] * 4, expected | {"reward": None})


def test_rejected_tokens_leave_the_denominators(rollouts: Path, tmp_path: Path) -> None:
    """The rollout engine's log-probs are far off in half of the answers, and those are rejected.

    With one token per answer, the mean over documents `rejected_fraction` is a share of the tokens.
    """
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    for index, row in enumerate(rows):
        shift = 2.0 * (index % 2)
        for name in ("response_ids", "log_probs", "ref_log_probs"):
            row[name] = row[name][:1]
        row["rollout_log_probs"] = [value - shift for value in row["log_probs"]]
    far = tmp_path / "far.jsonl"
    far.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = WHOLE_GROUPS + "--train-iters 1 --save-interval 1 --loss-aggregation token_mean "
    flags += "--kl-loss-coef 0.1 --use-geometric-rejection --rejection-denominator "
    first = {}
    for denominator in ("original", "accepted"):
        run(far, tmp_path / denominator, flags + denominator)
        (first[denominator],) = steps_of(tmp_path / denominator)
        assert first[denominator]["aggregation_checksum"] == pytest.approx(1.0, abs=1e-6)
    # The same tokens are kept; only T of the policy loss, what their sum is divided by, differs.
    original, accepted = first["original"], first["accepted"]
    ratio = 1.0 / (1.0 - original["rejected_fraction"])
    assert ratio > 1.3 and original["kl_loss"] > 1e-3
    assert accepted["pg_loss"] == pytest.approx(ratio * original["pg_loss"], rel=1e-5)
    for name in ("kl_loss", "num_tokens", "rejected_fraction"):
        assert accepted[name] == pytest.approx(original[name], rel=1e-5)
    # The same in one pass, whose count is known after it: the gradient is scaled before clipping.
    bounds = "--geometric-rejection-low 0 --geometric-rejection-high 3"
    flags = flags.replace("--kl-loss-coef 0.1", f"--old-log-probs current {bounds}")
    for denominator in ("original", "accepted"):
        run(far, tmp_path / f"current_{denominator}", flags + denominator)
        (first[denominator],) = steps_of(tmp_path / f"current_{denominator}")
        assert first[denominator]["aggregation_checksum"] == pytest.approx(1.0, abs=1e-6)
    current, accepted = first["original"], first["accepted"]
    ratio = 1.0 / (1.0 - current["rejected_fraction"])
    assert 1.3 < ratio < 10
    for name in ("pg_loss", "loss", "grad_norm"):
        assert accepted[name] == pytest.approx(ratio * current[name], rel=1e-5)


def test_a_run_goes_on_with_more_rollouts_in_another_folder(rollouts, uninterrupted, tmp_path):
    stopped = copy_after_step(2, uninterrupted, tmp_path / "run")
    moved = tmp_path / "moved" / rollouts.name
    moved.parent.mkdir()
    moved.write_text(rollouts.read_text() + rollouts.read_text().splitlines()[0])
    run(moved, stopped, STEPS)
    assert steps_of(stopped) == (steps := steps_of(uninterrupted))
    coefficient = 0.1
    for step in steps:  # a fifth over the horizon of 20 rollouts
        assert step["kl_loss_coef"] == pytest.approx(coefficient)
        coefficient *= 1 + 0.2 * step["docs"] / 20
