"""Weights of tokens in addition to the loss mask. Their numbers: `test_cut_invariance`."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pg import (
    PolicyLossConfig,
    Sample,
    accepted_samples,
    add_policy_loss_args,
    plan_step,
    validate_policy_loss_args,
)
from megatron_pg.cli import main as cli
from megatron_pg.step.batch import pack
from tests.fast.one_step import PLAIN_SUM, loss_of, reported
from tests.fast.refusals import assert_refused
from tests.random_steps import uneven_totals


def sample(weights: object, mask: Sequence[int] = (1, 1, 0), **fields: object) -> Sample:
    return Sample([5, 1, 2, 3], 3, list(mask), name="row 7", loss_weights=weights, **fields)  # type: ignore[arg-type]


WEIGHTED = PolicyLossConfig(policy_loss="sft", loss_weight_denominator="weights")


def settings_for(sample_fields: Sequence[str]) -> None:
    parser = add_policy_loss_args(argparse.ArgumentParser())
    line = "--loss-weight-denominator weights --policy-loss sft"
    validate_policy_loss_args(parser.parse_args(line.split()), sample_fields=sample_fields)


def loss_of_marked(denominator: str) -> None:
    """Mark the accepted tokens under `mask`, and compute the loss under a denominator."""

    def config(denominator: str) -> PolicyLossConfig:
        return PolicyLossConfig(
            use_tis=True,
            tis_mode="mask",
            tis_clip_low=0.8,
            tis_clip=1.25,
            rejection_denominator="accepted",
            loss_weight_denominator=denominator,
        )

    log_probs: dict[str, Any] = dict.fromkeys(("old_log_probs", "rollout_log_probs"), [-1.0] * 3)
    samples = accepted_samples(config("mask"), [sample([0.5, 2.0, 1.0], **log_probs)])
    assert samples[0].accepted_size == 2.0
    loss_of(config(denominator), pack(samples), torch.zeros(3))


REFUSED: dict[str, Callable[[], Any]] = {
    "weights requires loss_weights, which no sample": lambda: loss_of(
        WEIGHTED, pack([sample(None)]), torch.zeros(3)
    ),
    "requires loss_weights, which no sample of the step has": lambda: uneven_totals(
        [sample(None)]
    ).counted_in("weights"),
    "loss_weights for --loss-weight-denominator weights": lambda: settings_for([]),
    "row 7 has an accepted_size for a different --loss-weight-denominator": lambda: loss_of_marked(
        "weights"
    ),
    "ignores --loss-weight-denominator weights": lambda: PolicyLossConfig(
        **PLAIN_SUM, loss_weight_denominator="weights"
    ),
    "row 7: loss_weights[1] is -0.5 at an active token": lambda: sample([1.0, -0.5, 1.0]),
    "row 7: loss_weights has 2 values, expected one per response token (3)": lambda: sample(
        [1.0, 1.0]
    ),
    "row 7: loss_weights has shape": lambda: sample(0.5),
    "row 7: loss_weights is not a sequence of numbers": lambda: sample(["x"]),
}


@pytest.mark.parametrize("words", REFUSED)
def test_weights_that_do_not_fit_are_refused(words: str) -> None:
    assert_refused(words, REFUSED[words])


def test_weights_that_fit_are_taken() -> None:
    """Of a step where others have them, the tokens of a sample without them weigh 1."""
    totals = uneven_totals([sample(None), sample([2.0, 2.0, 0.0])])
    loss_of(WEIGHTED, pack([sample(None)]), torch.zeros(3), totals=totals)
    settings_for(["loss_weights"])
    loss_of_marked("mask")


def test_weights_at_masked_tokens_may_be_anything() -> None:
    assert sample([1.0, 0.5, math.nan]).loss_weights.tolist() == [1.0, 0.5, 0.0]
    assert sample([1.0, 0.5, -3.0]).loss_weight == 1.5


def test_weights_that_change_after_the_step_was_counted_are_noticed() -> None:
    one = sample([1.0, 0.5, 0.0])
    other = replace(one, loss_weights=[1.0, 1.0, 0.0])
    config = PolicyLossConfig(check_aggregation=True, policy_loss="reinforce")
    totals, log_probs = uneven_totals([one]), torch.zeros(3)
    with pytest.raises(RuntimeError, match="checksum is 1.333333"):
        reported(config, loss_of(config, pack([other]), log_probs, totals=totals)[1])
    reported(config, loss_of(config, pack([one]), log_probs, totals=totals)[1])


def test_the_plan_counts_weights() -> None:
    samples = [sample(weights, rollout_id=3) for weights in ([1.0, 0.5, 0.0], [2.0, 2.0, 0.0])]
    samples.append(sample(None))
    totals = plan_step(samples, max_tokens_per_microbatch=8).totals
    assert (totals.num_active_tokens, totals.num_rollouts) == (6, 2)
    assert totals.counted_in("mask") is totals
    by_weight = totals.counted_in("weights")
    assert by_weight.num_active_tokens == 7.5
    assert by_weight.rollout_denominators(samples).tolist() == [5.5, 5.5, 2.0]


def test_a_custom_reducer_sums_weighted_losses() -> None:
    config = PolicyLossConfig(policy_loss="sft", **PLAIN_SUM)
    batch = pack([sample([1.0, 0.5, 0.0])])
    loss, _ = loss_of(config, batch, torch.tensor([-1.0, -4.0, -9.0]))
    assert loss.item() == 1.0 * 1.0 + 0.5 * 4.0


def rollout_file(folder: Path, *weights: object) -> Path:
    row = {"prompt_ids": [1], "response_ids": [2, 3], "reward": 1.0}
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps({**row, "loss_weights": w}) + "\n" for w in weights))
    return path


def test_rollout_files_have_a_column_of_weights(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from megatron_pg.rollout_files import RolloutFiles, RowError

    rows = RolloutFiles([rollout_file(tmp_path, [0.5, 2], None)]).pull(2)
    assert rows[0].loss_weights.tolist() == [0.5, 2.0] and rows[1].loss_weights is None
    for wrong, words in (
        ([0.5, -1], r"loss_weights\[1\] is -1.*expected .*0 or more"),
        ([0.5], "loss_weights has 1 values, expected one per .*2"),
        ([0.5, "x"], "loss_weights"),
        ([0.5, None], r"loss_weights\[1\] is null|loss_weights\[1\] is nan"),
    ):
        with pytest.raises(RowError, match=words):
            RolloutFiles([rollout_file(tmp_path, wrong)]).pull(1)


@pytest.mark.parametrize(
    ("denominator", "shares"), [("mask", [1 / 4, 3 / 4]), ("weights", [1 / 2, 1 / 2])]
)
def test_explain_shares_out_what_the_weights_say(denominator, shares, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    path = rollout_file(tmp_path, [0.5, 0.5], [3.0, 0.0])
    line = f"explain --rollout-files {path} --json --loss-weight-denominator {denominator}"
    assert cli(line.split()) == 0
    found = json.loads(capsys.readouterr().out)["aggregations"]
    assert found["sample_mean"]["sample_share"] == pytest.approx(shares)
    assert found["token_mean"]["sample_share"] == pytest.approx([1 / 4, 3 / 4])
    assert found["token_mean"]["outer_count"] == 4
