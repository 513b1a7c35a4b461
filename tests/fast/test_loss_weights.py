"""Weights of tokens beside the loss mask, against plain loops: every term of the loss, every cut,
both denominators.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import (
    PolicyLossConfig,
    Sample,
    accepted_samples,
    add_policy_loss_args,
    plan_step,
    validate_policy_loss_args,
)
from megatron_pg.cli import main as cli
from megatron_pg.step import batch as packing
from megatron_pg.step.batch import pack
from tests import oracle
from tests.cut_policy_loss import OBJECTIVES, aggregated, package_config, rank_losses, summed_loss
from tests.cut_steps import CUTS, Cut, assert_same, whole
from tests.fast.one_step import PLAIN_SUM, loss_of, reported
from tests.oracle import PlainSample
from tests.random_steps import float32, package_samples, random_logits, random_step, uneven_totals

aggregations = pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
denominators = pytest.mark.parametrize("denominator", ("mask", "weights"))


def weighted_step(seed: int = 5) -> list[PlainSample]:
    """Weights from 0 to 3, NaN where masked; one sample has none, one has zeros alone."""
    rng = random.Random(seed)
    step = []
    for index, sample in enumerate(random_step(seed)):
        weights = [rng.choice([0.0, 0.25, 1.0, rng.uniform(0, 3)]) for _ in sample.loss_mask]
        weights = [
            (0.0 if index == 5 else float32(weight)) if keep else math.nan
            for weight, keep in zip(weights, sample.loss_mask, strict=True)
        ]
        step.append(replace(sample, loss_weights=None if index == 4 else weights))
    return step


def objective_of(aggregation: str, denominator: str, name: str = "everything") -> oracle.Objective:
    objective = aggregated(OBJECTIVES[name], aggregation)
    return replace(objective, loss_weight_denominator=denominator)


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs())


@denominators
@aggregations
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ("everything", "everything_by_the_loss"))
def test_every_cut_equals_the_loops(name, cut, aggregation, denominator) -> None:
    """Metrics are of the tokens that the mask keeps, whatever they weigh."""
    step = weighted_step()
    logits = random_logits(step, seed=3)
    objective = objective_of(aggregation, denominator, name)
    config = package_config(objective)
    results = rank_losses(config, step, logits, CUTS[cut](len(step)))
    expected = oracle.policy_loss(step, logits, objective)
    assert_same(summed_loss(results), expected.loss, logits)
    found = reported(config, *(result.metrics for result in results))
    assert found["aggregation_checksum"] == pytest.approx(1.0, abs=1e-9)
    means = {"ratio_new_old": oracle.document_mean(step, expected.ratios)}
    means["num_tokens"] = oracle.active_tokens(step, range(len(step)))
    assert {name: found[name] for name in means} == pytest.approx(means, rel=1e-9)


@denominators
@aggregations
def test_weights_of_one_change_nothing_to_the_bit(aggregation: str, denominator: str) -> None:
    step = random_step(7)
    ones = [replace(s, loss_weights=[1.0] * s.response_length) for s in step]
    logits = random_logits(step, seed=3)
    losses = []
    for samples, counted in ((step, "mask"), (ones, denominator)):
        config = package_config(objective_of(aggregation, counted))
        losses.append(summed_loss(rank_losses(config, samples, logits, whole(len(step)))))
    gradients = [torch.autograd.grad(loss, logits) for loss in losses]
    assert torch.equal(*losses) and all(map(torch.equal, *gradients))


@aggregations
def test_a_weight_of_zero_is_a_masked_token_where_denominators_count_weights(aggregation):
    rng = random.Random(2)
    step = random_step(8)
    keeps = [[int(rng.random() < 0.6) for _ in s.loss_mask] for s in step]
    weighted, masked = [], []
    for s, keep in zip(step, keeps, strict=True):
        weighted.append(replace(s, loss_weights=list(map(float, keep))))
        masked.append(replace(s, loss_mask=[a * b for a, b in zip(s.loss_mask, keep, strict=True)]))
    logits = random_logits(step, seed=3)
    by_weights = package_config(objective_of(aggregation, "weights"))
    by_mask = package_config(objective_of(aggregation, "mask"))
    expected = summed_loss(rank_losses(by_mask, masked, logits, whole(len(step))))
    found = summed_loss(rank_losses(by_weights, weighted, logits, CUTS["cp_2"](len(step))))
    assert difference(found, expected) < 1e-12
    # The mutant divides by the mask: another objective, but for constant.
    mutant = summed_loss(rank_losses(by_mask, weighted, logits, whole(len(step))))
    assert difference(mutant, expected) > 1e-4


def test_denominators_of_weights_without_weights_are_refused() -> None:
    config = PolicyLossConfig(policy_loss="sft", loss_weight_denominator="weights")
    batch, log_probs = pack([sample(None)]), torch.zeros(3)
    with pytest.raises(ValueError, match="weights, and no sample of the step has loss_weights"):
        loss_of(config, batch, log_probs)
    # Of a step where others have them its tokens weigh 1.
    loss_of(config, batch, log_probs, totals=uneven_totals([sample(None), sample([2.0, 2.0, 0.0])]))
    line = "--loss-weight-denominator weights --policy-loss sft"
    parser = add_policy_loss_args(argparse.ArgumentParser())
    validate_policy_loss_args(parser.parse_args(line.split()), sample_fields=["loss_weights"])
    with pytest.raises(ValueError, match="--loss-weight-denominator weights needs loss_weights"):
        validate_policy_loss_args(parser.parse_args(line.split()), sample_fields=[])


def test_mistakes_of_weights_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of other tokens; weights in the numerator alone."""
    step = weighted_step()
    logits = random_logits(step, seed=3)
    objective = objective_of("sample_mean", "weights")
    expected = oracle.policy_loss(step, logits, objective).loss
    config = package_config(objective)
    cut = CUTS["dp_3_three_micro_batches_cp_4"](len(step))

    def loss_of(cut: Cut) -> Tensor:
        return summed_loss(rank_losses(config, step, logits, cut))

    assert difference(loss_of(cut), expected) < 1e-12
    right = packing._field_in_window

    def of_another_window(field: str, *given: Any) -> Tensor | None:
        values = right(field, *given)
        return values.flip(0) if field == "loss_weights" and values is not None else values

    monkeypatch.setattr(packing, "_field_in_window", of_another_window)
    assert difference(loss_of(cut), expected) > 1e-4
    monkeypatch.setattr(packing, "_field_in_window", right)
    totals = uneven_totals(package_samples(step))
    of_mask = replace(totals)
    vars(of_mask)["_in_loss_weights"] = totals
    wrong = rank_losses(config, step, logits, cut, totals=of_mask)
    assert difference(summed_loss(wrong), expected) > 1e-4


ICEPOP = {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.8, "tis_clip": 1.25}


@denominators
@aggregations
@pytest.mark.parametrize("cut", ("whole", "dp_2_two_micro_batches_cp_2"))
@pytest.mark.parametrize("name", ("everything", "everything_by_the_loss"))
def test_accepted_counts_divide_only_the_policy_loss(name, cut, aggregation, denominator) -> None:
    """KL and entropy sum and count the tokens that IcePop drops, whatever divides the policy
    loss.
    """
    rng, step, kept = random.Random(8), [], []
    for sample in weighted_step():
        rollout = [float32(value + rng.uniform(-0.5, 0.5)) for value in sample.old_log_probs]
        step.append(replace(sample, rollout_log_probs=rollout))
        pairs = zip(sample.old_log_probs, rollout, strict=True)
        factors = [math.exp(old - new) for old, new in pairs]
        mask = [m * (0.8 <= w <= 1.25) for m, w in zip(sample.loss_mask, factors, strict=True)]
        advantages = [a * w for a, w in zip(sample.advantages, factors, strict=True)]
        kept.append(replace(sample, loss_mask=mask, advantages=advantages))
    assert 0 < sum(map(oracle_tokens, kept)) < 0.8 * sum(map(oracle_tokens, step))
    logits, objective = random_logits(step, seed=3), objective_of(aggregation, denominator, name)
    whole_mask, of_kept = (oracle.policy_loss(each, logits, objective) for each in (step, kept))
    terms = whole_mask.loss - whole_mask.pg_loss
    config = package_config(objective, **ICEPOP, rejection_denominator="accepted")
    results = rank_losses(config, step, logits, CUTS[cut](len(step)))
    assert_same(summed_loss(results), of_kept.pg_loss + terms, logits)
    found = reported(config, *(result.metrics for result in results))
    assert found["aggregation_checksum"] == pytest.approx(1.0, abs=1e-9)
    assert found["kl_loss"] == pytest.approx(float(whole_mask.kl_loss), rel=1e-12)


def test_samples_that_were_marked_under_another_denominator_are_refused() -> None:
    def config(denominator: str) -> PolicyLossConfig:
        return PolicyLossConfig(
            **ICEPOP, rejection_denominator="accepted", loss_weight_denominator=denominator
        )

    log_probs: dict[str, Any] = dict.fromkeys(("old_log_probs", "rollout_log_probs"), [-1.0] * 3)
    samples = accepted_samples(config("mask"), [sample([0.5, 2.0, 1.0], **log_probs)])
    assert samples[0].accepted_size == 2.0
    words = "row 7 has an accepted_size of another --loss-weight-denominator"
    with pytest.raises(ValueError, match=words):
        loss_of(config("weights"), pack(samples), torch.zeros(3))
    loss_of(config("mask"), pack(samples), torch.zeros(3))


def oracle_tokens(sample: PlainSample) -> int:
    return sum(sample.loss_mask)


def sample(weights: object, mask: Sequence[int] = (1, 1, 0), **fields: object) -> Sample:
    return Sample([5, 1, 2, 3], 3, list(mask), name="row 7", loss_weights=weights, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("weights", "words"), [
    ([1.0, math.nan, 1.0], r"\[1\] is nan at an active token, expected a finite"),
    ([1.0, -0.5, 1.0], r"\[1\] is -0.5 at an active token"),
    ([math.inf, 0.5, 1.0], r"\[0\] is inf"),
    ([1.0, 1.0], r" is of 2 values, expected one per response token \(3\)"),
    (0.5, " has shape"),
    (["x"], " is no sequence of numbers"),
])  # fmt: skip
def test_bad_weights_are_refused_by_sample_and_position(weights: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"row 7: loss_weights{words}"):
        sample(weights)


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
    with pytest.raises(ValueError, match="no sample of the step has loss_weights"):
        uneven_totals(samples[2:]).counted_in("weights")


def test_a_custom_reducer_sums_weighted_losses() -> None:
    config = PolicyLossConfig(policy_loss="sft", **PLAIN_SUM)
    batch = pack([sample([1.0, 0.5, 0.0])])
    loss, _ = loss_of(config, batch, torch.tensor([-1.0, -4.0, -9.0]))
    assert loss.item() == 1.0 * 1.0 + 0.5 * 4.0
    with pytest.raises(ValueError, match="would ignore --loss-weight-denominator weights"):
        PolicyLossConfig(**PLAIN_SUM, loss_weight_denominator="weights")


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
        ([0.5], "loss_weights is of 1 values, expected one per .*2"),
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
