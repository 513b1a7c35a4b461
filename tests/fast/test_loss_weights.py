"""Weights of tokens beside the loss mask, against plain loops: every term of the loss, every cut, both denominators."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import (
    PolicyLossConfig,
    Sample,
    add_policy_loss_args,
    plan_step,
    policy_loss_from_log_probs,
    step_totals,
    validate_policy_loss_args,
)
from megatron_pg.cli import main as cli
from megatron_pg.loss.metrics import reduce_metrics
from megatron_pg.loss.reducer import WeightedSum
from megatron_pg.step import batch as packing
from megatron_pg.step.batch import pack
from tests import oracle
from tests.cut_policy_loss import (
    OBJECTIVES,
    RankLoss,
    aggregated,
    package_config,
    rank_losses,
    summed_loss,
)
from tests.cut_steps import CUTS, Cut, assert_same, whole
from tests.oracle import PlainSample
from tests.random_steps import float32, package_samples, random_logits, random_step, uneven_totals

DENOMINATORS = ("mask", "weights")


def weighted_step(seed: int = 5) -> list[PlainSample]:
    """Weights from 0 to 3, NaN where masked; one sample has none, one has zeros alone."""
    rng = random.Random(seed)
    step = []
    for index, sample in enumerate(random_step(seed)):
        weights = [
            float32(rng.choice([0.0, 0.25, 1.0, rng.uniform(0, 3)])) for _ in sample.loss_mask
        ]
        weights = [0.0 for _ in weights] if index == 5 else weights
        weights = [
            w if keep else math.nan for w, keep in zip(weights, sample.loss_mask, strict=True)
        ]
        step.append(dataclasses.replace(sample, loss_weights=None if index == 4 else weights))
    return step


def objective_of(aggregation: str, denominator: str) -> oracle.Objective:
    objective = aggregated(OBJECTIVES["everything"], aggregation)
    return dataclasses.replace(objective, loss_weight_denominator=denominator)


def reduced(config: PolicyLossConfig, results: Sequence[RankLoss]) -> dict[str, float]:
    metrics = [result.metrics for result in results]
    return reduce_metrics(config, metrics, contributes=True, device="cpu")


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs())


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_equals_the_loops(cut: str, aggregation: str, denominator: str) -> None:
    step = weighted_step()
    logits = random_logits(step, seed=3)
    objective = objective_of(aggregation, denominator)
    config = package_config(objective)
    results = rank_losses(config, step, logits, CUTS[cut](len(step)))
    expected = oracle.policy_loss(step, logits, objective)
    assert_same(summed_loss(results), expected.loss, logits)
    found = reduced(config, results)
    assert found["aggregation_checksum"] == pytest.approx(1.0, abs=1e-9)
    # Metrics are of the tokens that the mask keeps, whatever they weigh.
    plain = [dataclasses.replace(sample, loss_weights=None) for sample in step]
    by_mask = package_config(objective_of(aggregation, "mask"))
    bare = reduced(by_mask, rank_losses(by_mask, plain, logits, whole(len(step))))
    names = ("ratio_new_old", "advantage", "num_tokens", "max_advantage")
    assert all(found[name] == pytest.approx(bare[name], rel=1e-9) for name in names)


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_terms_by_the_loss_are_weighted_as_it_is(aggregation: str, denominator: str) -> None:
    step = weighted_step()
    logits = random_logits(step, seed=3)
    objective = aggregated(OBJECTIVES["everything_by_the_loss"], aggregation)
    objective = dataclasses.replace(objective, loss_weight_denominator=denominator)
    cut = CUTS["dp_2_two_micro_batches_cp_2"](len(step))
    found = summed_loss(rank_losses(package_config(objective), step, logits, cut))
    assert_same(found, oracle.policy_loss(step, logits, objective).loss, logits)


def test_missing_weights_are_1_whatever_the_default_dtype() -> None:
    step = [Sample([1, 2, 3], 2, [1, 1], loss_weights=weights) for weights in ([0.5, 2.0], None)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        weights = pack(step).loss_weights
    finally:
        torch.set_default_dtype(torch.float32)
    assert weights is not None and weights.dtype == torch.float32
    assert weights.tolist() == [0.5, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_weights_of_one_change_nothing_to_the_bit(aggregation: str, denominator: str) -> None:
    step = random_step(7)
    ones = [dataclasses.replace(s, loss_weights=[1.0] * s.response_length) for s in step]
    logits = random_logits(step, seed=3)
    losses = [
        summed_loss(
            rank_losses(
                package_config(objective_of(aggregation, of)), each, logits, whole(len(step))
            )
        )
        for each, of in ((step, "mask"), (ones, denominator))
    ]
    gradients = [torch.autograd.grad(loss, logits) for loss in losses]
    assert torch.equal(losses[0], losses[1])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_a_weight_of_zero_is_a_masked_token_where_denominators_count_weights(
    aggregation: str,
) -> None:
    rng = random.Random(2)
    step = random_step(8)
    keeps = [[int(rng.random() < 0.6) for _ in s.loss_mask] for s in step]
    weighted = [
        dataclasses.replace(s, loss_weights=list(map(float, keep)))
        for s, keep in zip(step, keeps, strict=True)
    ]
    masked = [
        dataclasses.replace(s, loss_mask=[a * b for a, b in zip(s.loss_mask, keep, strict=True)])
        for s, keep in zip(step, keeps, strict=True)
    ]
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
        policy_loss_from_log_probs(
            config, batch, log_probs, None, totals=step_totals([sample(None)])
        )
    # Of a step where others have them its tokens weigh 1.
    totals = step_totals([sample(None), sample([2.0, 2.0, 0.0])])
    policy_loss_from_log_probs(config, batch, log_probs, None, totals=totals)
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
    of_mask = dataclasses.replace(totals)
    vars(of_mask)["_in_loss_weights"] = totals
    wrong = rank_losses(config, step, logits, cut, totals=of_mask)
    assert difference(summed_loss(wrong), expected) > 1e-4


def sample(weights: object, mask: Sequence[int] = (1, 1, 0), **fields: object) -> Sample:
    return Sample([5, 1, 2, 3], 3, list(mask), name="row 7", loss_weights=weights, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            [1.0, math.nan, 1.0],
            r"row 7: loss_weights\[1\] is nan at an active token, expected a finite",
        ),
        ([1.0, -0.5, 1.0], r"row 7: loss_weights\[1\] is -0.5 at an active token"),
        ([math.inf, 0.5, 1.0], r"row 7: loss_weights\[0\] is inf"),
        ([1.0, 1.0], r"row 7: loss_weights is of 2 values, expected one per response token \(3\)"),
        (0.5, r"row 7: loss_weights has shape"),
        (["x"], "row 7: loss_weights is no sequence of numbers"),
    ],
)
def test_bad_weights_are_refused_by_sample_and_position(weights: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample(weights)


def test_weights_at_masked_tokens_may_be_anything() -> None:
    assert sample([1.0, 0.5, math.nan]).loss_weights.tolist() == [1.0, 0.5, 0.0]
    assert sample([1.0, 0.5, -3.0]).loss_weight == 1.5


def test_the_identity_of_a_sample_knows_its_weights() -> None:
    """A sample whose weights changed after the totals were counted is not the one that was counted."""
    plain, one, other = sample(None), sample([1.0, 0.5, 0.0]), sample([0.5, 1.0, 0.0])
    assert len({each.identity for each in (plain, one, other)}) == 3
    config, log_probs = (
        PolicyLossConfig(check_aggregation=True, policy_loss="reinforce"),
        torch.zeros(3),
    )
    totals = uneven_totals([one])
    with pytest.raises(RuntimeError, match="not of this step: row 7"):
        _, metrics = policy_loss_from_log_probs(
            config, pack([other]), log_probs, None, totals=totals
        )
        reduce_metrics(config, [metrics], contributes=True, device="cpu")
    _, metrics = policy_loss_from_log_probs(config, pack([one]), log_probs, None, totals=totals)
    reduce_metrics(config, [metrics], contributes=True, device="cpu")


def test_the_plan_counts_weights() -> None:
    samples = [
        sample([1.0, 0.5, 0.0], rollout_id=3),
        sample([2.0, 2.0, 0.0], rollout_id=3),
        sample(None),
    ]
    totals = plan_step(samples, max_tokens_per_microbatch=8).totals
    assert (totals.num_active_tokens, totals.num_rollouts) == (6, 2)
    assert totals.counted_in("mask") is totals
    by_weight = totals.counted_in("weights")
    assert by_weight.num_active_tokens == 7.5
    assert by_weight.rollout_denominators(samples).tolist() == [5.5, 5.5, 2.0]
    without = uneven_totals(samples[2:])
    with pytest.raises(ValueError, match="no sample of the step has loss_weights"):
        without.counted_in("weights")


def plain_sum(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[Tensor],
    calculate_per_token_loss: bool,
):
    return WeightedSum(torch.cat(loss_masks).double())


def test_a_custom_reducer_sums_weighted_losses() -> None:
    path = f"{__name__}:plain_sum"
    config = PolicyLossConfig(policy_loss="sft", custom_pg_loss_reducer_function_path=path)
    one = sample([1.0, 0.5, 0.0])
    loss, _ = policy_loss_from_log_probs(
        config, pack([one]), torch.tensor([-1.0, -4.0, -9.0]), None, totals=uneven_totals([one])
    )
    assert loss.item() == 1.0 * 1.0 + 0.5 * 4.0
    with pytest.raises(ValueError, match="would ignore --loss-weight-denominator weights"):
        PolicyLossConfig(
            custom_pg_loss_reducer_function_path=path, loss_weight_denominator="weights"
        )


def rollout_file(folder: Path, *weights: object) -> Path:
    rows = [
        {"prompt_ids": [1], "response_ids": [2, 3], "reward": 1.0, "loss_weights": each}
        for each in weights
    ]
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
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


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_explain_shares_out_what_the_weights_say(
    denominator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    path = rollout_file(tmp_path, [0.5, 0.5], [3.0, 0.0])
    line = f"explain --rollout-files {path} --json --loss-weight-denominator {denominator}"
    assert cli(line.split()) == 0
    found = json.loads(capsys.readouterr().out)["aggregations"]
    of_samples = {"mask": [1 / 4, 3 / 4], "weights": [1 / 2, 1 / 2]}[denominator]
    assert found["sample_mean"]["sample_share"] == pytest.approx(of_samples)
    assert found["token_mean"]["sample_share"] == pytest.approx([1 / 4, 3 / 4])
    assert found["token_mean"]["outer_count"] == {"mask": 4, "weights": 4}[denominator]
