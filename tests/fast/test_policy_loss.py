"""policy_loss_function from logits, on every rank of a cut step, against the oracle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.from_logits import policy_loss_function
from megatron_pg.step.batch import PackedBatch, pack
from tests import oracle
from tests.cut_policy_loss import (
    OBJECTIVES,
    RankLoss,
    aggregated,
    package_config,
    rank_losses,
    summed_loss,
    summed_metrics,
)
from tests.cut_steps import CUTS, Cut, assert_same, gradients, random_cut, whole
from tests.dispatches import CountDispatches
from tests.fast.one_step import loss_of
from tests.fast.sequences import flat_log_probs, package_batch, random_sequences
from tests.oracle import Objective, PlainSample
from tests.random_steps import (
    package_samples,
    plain_sample,
    random_logits,
    random_step,
    uneven_totals,
)


def check_policy_loss(
    step: list[PlainSample], logits: list[Tensor], objective: Objective, cut: Cut
) -> list[RankLoss]:
    """The ranks' losses add up to the oracle's, with its gradient for every logit."""
    results = rank_losses(package_config(objective), step, logits, cut)
    expected = oracle.policy_loss(step, logits, objective)
    assert_same(summed_loss(results), expected.loss, logits)
    return results


AGGREGATIONS = pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)


@AGGREGATIONS
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_equal_the_oracle(name: str, aggregation: str) -> None:
    step = random_step(seed=20)
    objective = aggregated(OBJECTIVES[name], aggregation)
    check_policy_loss(step, random_logits(step), objective, whole(len(step)))


@AGGREGATIONS
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["everything", "everything_by_the_loss"])
def test_no_cut_changes_value_or_gradient(name: str, cut: str, aggregation: str) -> None:
    """The KL and entropy terms are sample means, or follow the aggregation of the policy loss."""
    step = random_step(seed=21)
    objective = aggregated(OBJECTIVES[name], aggregation)
    check_policy_loss(step, random_logits(step), objective, CUTS[cut](len(step)))


@pytest.mark.parametrize("aggregation", ["prompt_mean", "token_mean", "constant"])
def test_the_two_aggregations_of_the_regularizers_differ(aggregation: str) -> None:
    """Each, taken for the other, is noticed; under the sample mean they are one."""
    step = random_step(seed=21)
    by_the_loss = aggregated(OBJECTIVES["everything_by_the_loss"], aggregation)
    logits, both = random_logits(step), []
    for objective in (by_the_loss, replace(by_the_loss, regularizer_aggregation="sample_mean")):
        results = rank_losses(package_config(objective), step, logits, CUTS["cp_2"](len(step)))
        both.append((summed_loss(results), oracle.policy_loss(step, logits, objective).loss))
    for (found, _), (_, other) in (both, reversed(both)):
        with pytest.raises(AssertionError):
            assert_same(found, other, logits)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_samples=st.integers(1, 7),
    dp_size=st.integers(1, 2),
    num_microbatches=st.integers(1, 3),
    cp_size=st.sampled_from((1, 2, 4, 8)),
    aggregation=st.sampled_from(oracle.AGGREGATIONS),
    name=st.sampled_from(sorted(OBJECTIVES)),
)
def test_random_steps_and_cuts(seed, num_samples, aggregation, name, **sizes) -> None:
    step = random_step(seed, num_samples=num_samples)
    cut = random_cut(random.Random(seed), num_samples, **sizes)
    objective = aggregated(OBJECTIVES[name], aggregation)
    check_policy_loss(step, random_logits(step, seed), objective, cut)


@pytest.mark.parametrize("cp_size", (1, 2, 4))
def test_padding_takes_no_part(cp_size: int) -> None:
    """The extra segment that sequence parallelism asks for; its logits are NaN here."""
    step = random_step(seed=33)
    logits = random_logits(step)
    objective = OBJECTIVES["everything"]
    cut = replace(CUTS["ragged_dp_3_with_empty_micro_batches"](len(step)), cp_size=cp_size)
    config = package_config(objective)
    results = rank_losses(config, step, logits, cut, pad_to_multiple=16 * cp_size)
    assert all(result.batch.window.num_tokens % (16 * cp_size) == 0 for result in results)
    assert_same(summed_loss(results), oracle.policy_loss(step, logits, objective).loss, logits)


def test_the_random_ratios_reach_every_side_of_the_clip() -> None:
    """A step without clipped tokens would make the tests above blind to the clip."""
    step = random_step(seed=20)
    result = oracle.policy_loss(step, random_logits(step), Objective())
    pairs = [
        (ratio.item(), advantage)
        for sample, ratios in zip(step, result.ratios, strict=True)
        for ratio, advantage in zip(ratios, sample.advantages, strict=True)
        if ratio > 0
    ]
    for positive in (True, False):
        ratios = [ratio for ratio, advantage in pairs if (advantage > 0) == positive]
        assert any(ratio < 0.8 for ratio in ratios)
        assert any(0.8 <= ratio <= 1.2 for ratio in ratios)
        assert any(ratio > 2.0 for ratio in ratios)  # also beyond the dual clip


def test_ratio_is_one_at_the_first_step_whatever_the_temperature() -> None:
    """The symptom in the field: old log-probs at temperature t against new ones at 1."""
    step = random_step(seed=22)
    logits = random_logits(step)
    objective = Objective(rollout_temperature=0.6)
    old = oracle.policy_loss(step, logits, objective).log_probs
    pairs = zip(step, old, strict=True)
    step = [replace(sample, old_log_probs=values.tolist()) for sample, values in pairs]
    metrics = []
    for changes in ({"eps_clip": 1e-4}, {"rollout_temperature": 1.0}):
        config = package_config(replace(objective, **changes))
        metrics.append(summed_metrics(rank_losses(config, step, logits, whole(len(step)))))
    right, mutant = metrics  # at temperature 1 the ratios are far from 1
    assert right["clipped_ratio_fraction"] == 0.0
    assert right["ratio_new_old"] == pytest.approx(1.0, abs=1e-6)
    assert abs(mutant["ratio_new_old"] - 1.0) > 0.1


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@AGGREGATIONS
def test_a_gradient_that_is_divided_twice(aggregation: str, cp_size: int) -> None:
    """By the outer count of this step, whatever it is: two steps of one config have two divisors."""
    objective = aggregated(OBJECTIVES["everything"], aggregation)
    config = package_config(objective, divide_gradient_twice=True)
    counts = []
    for seed, num_samples, num_groups in ((23, 9, 3), (24, 5, 1)):
        step = random_step(seed=seed, num_samples=num_samples, num_groups=num_groups)
        logits = random_logits(step)
        counts.append(oracle.outer_count(step, aggregation))
        results = rank_losses(config, step, logits, whole(len(step), cp_size=cp_size))
        expected = oracle.policy_loss(step, logits, objective)
        assert abs(expected.loss.item() - expected.pg_loss.item()) > 0.01
        assert_same(summed_loss(results), expected.loss / counts[-1], logits)
        metrics = summed_metrics(results)
        assert metrics["pg_loss"] == pytest.approx(expected.pg_loss.item(), rel=1e-12)
    assert counts[0] != counts[1]


def frozen_sample_mean(log_probs: Tensor, batch: PackedBatch, lengths: list[int]) -> Tensor:
    """GRPO's loss of N samples as it stands in the papers, float32 throughout; never to be changed."""
    ratio, advantages = (log_probs - batch.old_log_probs).exp(), batch.advantages
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    active = torch.zeros(len(lengths)).index_add_(0, sample, batch.loss_mask.float()).clamp(min=1)
    weights = batch.loss_mask.double() / active.double()[sample]
    return (surrogate * weights.float()).sum() / len(lengths)


@pytest.mark.parametrize("seed", range(5))
def test_the_default_is_the_plain_sample_mean_to_the_bit(seed: int) -> None:
    sequences = random_sequences(seed, spread=0.5)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences, torch.float32)
    frozen = frozen_sample_mean(log_probs, batch, [len(s.loss_mask) for s in sequences])
    loss, _ = loss_of(PolicyLossConfig(), batch, log_probs)
    assert loss.dtype == torch.float32 and torch.equal(loss, frozen)
    found, expected = (torch.autograd.grad(each, log_probs)[0] for each in (loss, frozen))
    assert torch.equal(found, expected)
    assert ((log_probs - batch.old_log_probs).exp()[batch.loss_mask] > 1.2).any()
    other, _ = loss_of(PolicyLossConfig(loss_aggregation="token_mean"), batch, log_probs)
    assert not torch.equal(other, frozen)


def test_padded_vocabulary_takes_no_part() -> None:
    step = random_step(seed=24)
    logits = random_logits(step)
    padded = [torch.nn.functional.pad(part, (0, 5), value=30.0) for part in logits]
    objective = OBJECTIVES["everything"]
    config, vocab_size = package_config(objective), logits[0].shape[1]
    results = rank_losses(config, step, padded, whole(len(step)), vocab_size=vocab_size)
    assert_same(summed_loss(results), oracle.policy_loss(step, logits, objective).loss, logits)


def test_float32_stays_within_float32_of_the_oracle() -> None:
    step = random_step(seed=25)
    logits = random_logits(step)
    objective = OBJECTIVES["everything"]
    batch, packed = pack(package_samples(step)), torch.cat(logits).float()
    totals = uneven_totals(batch.samples)
    loss, _ = policy_loss_function(package_config(objective), batch, packed, totals=totals)
    assert loss.dtype == torch.float32
    expected = oracle.policy_loss(step, logits, objective).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found, wanted = (torch.cat(gradients(each, logits)) for each in (loss, expected))
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def count_dispatches(num_samples: int, aggregation: str) -> tuple[int, int]:
    """Operators of a micro-batch's loss, forward and backward, the reducer's factory included."""
    samples = package_samples([plain_sample([1, 0, 1]) for _ in range(num_samples)])
    config = package_config(aggregated(Objective(entropy_coef=0.1), aggregation))
    batch = pack(samples, cp_rank=1, cp_size=2)
    totals = uneven_totals(samples)
    logits = torch.zeros(batch.window.local_tokens, 11, requires_grad=True)
    policy_loss_function(config, batch, logits, totals=totals)  # fills what is cached
    with CountDispatches() as forward:
        loss, _ = policy_loss_function(config, batch, logits, totals=totals)
    with CountDispatches() as backward:
        loss.backward()
    return len(forward.names), len(backward.names)


@AGGREGATIONS
def test_dispatches_do_not_grow_with_samples(aggregation: str) -> None:
    assert count_dispatches(2, aggregation) == count_dispatches(500, aggregation)


def test_logits_of_another_length_are_refused() -> None:
    step = random_step(seed=31)
    batch = pack(package_samples(step), cp_rank=0, cp_size=2)
    totals = uneven_totals(package_samples(step))
    unsharded = torch.cat(random_logits(step))
    sizes = f"{len(unsharded)} rows and the micro-batch {batch.window.local_tokens} tokens"
    with pytest.raises(ValueError, match=f"logits have {sizes}"):
        policy_loss_function(package_config(Objective()), batch, unsharded, totals=totals)
