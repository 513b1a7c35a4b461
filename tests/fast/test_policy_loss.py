"""policy_loss_function from logits, on every rank of a cut step, against the oracle; and masked
positions.

A masked position may hold anything, which reaches neither loss nor gradient; an active one hides
nothing.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.from_logits import policy_loss_function
from megatron_pg.loss.metrics import METRICS
from megatron_pg.step.batch import PackedBatch, pack
from tests import oracle
from tests.cut_policy_loss import (
    OBJECTIVES,
    aggregated,
    local_logits,
    package_config,
    rank_losses,
    summed_loss,
    summed_metrics,
)
from tests.cut_steps import CUTS, Cut, assert_same, gradients, random_cut, whole
from tests.dispatches import CountDispatches
from tests.fast.one_step import loss_of
from tests.fast.refusals import assert_refused
from tests.fast.sequences import flat_log_probs, package_batch, random_sequences
from tests.oracle import Objective, PlainSample
from tests.random_steps import (
    package_samples,
    plain_sample,
    random_logits,
    random_step,
    uneven_totals,
)


def check_policy_loss(step: list[PlainSample], logits: list[Tensor], objective, cut: Cut) -> None:
    """The ranks' losses add up to the oracle's, with its gradient for every logit."""
    found = summed_loss(rank_losses(package_config(objective), step, logits, cut))
    assert_same(found, oracle.policy_loss(step, logits, objective).loss, logits)


AGGREGATIONS = pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)


WITH_TERMS = ("everything", "everything_by_the_loss")
CASES = [(name, "whole") for name in OBJECTIVES] + [
    (name, cut) for name in WITH_TERMS for cut in CUTS
]


@AGGREGATIONS
@pytest.mark.parametrize(("name", "cut"), sorted({*CASES}))
def test_objectives_equal_the_oracle_and_no_cut_changes_them(name, cut, aggregation) -> None:
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
    """The extra segment that sequence parallelism asks for, its logits NaN here; and columns beyond
    the vocabulary.
    """
    step = random_step(seed=33)
    logits = random_logits(step)
    wide = [torch.nn.functional.pad(part, (0, 5), value=30.0) for part in logits]
    objective = OBJECTIVES["everything"]
    cut = replace(CUTS["ragged_dp_3_with_empty_micro_batches"](len(step)), cp_size=cp_size)
    padding = {"pad_to_multiple": 16 * cp_size, "vocab_size": logits[0].shape[1]}
    results = rank_losses(package_config(objective), step, wide, cut, **padding)
    assert all(result.batch.window.num_tokens % (16 * cp_size) == 0 for result in results)
    assert_same(summed_loss(results), oracle.policy_loss(step, logits, objective).loss, logits)


def test_the_random_ratios_reach_every_side_of_the_clip() -> None:
    """A step without clipped tokens would make the tests above blind to the clip."""
    step = random_step(seed=20)
    result = oracle.policy_loss(step, random_logits(step), Objective())
    every = torch.cat(result.ratios)
    advantages = torch.tensor([value for sample in step for value in sample.advantages])
    for side in (advantages > 0, advantages < 0):
        ratios = every[side & (every > 0)]
        assert (ratios < 0.8).any() and ((0.8 <= ratios) & (ratios <= 1.2)).any()
        assert (ratios > 2.0).any()  # also beyond the dual clip


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
    """By the outer count of this step, whatever it is: two steps of one config have two
    divisors.
    """
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
    """GRPO's loss of N samples as it stands in the papers, float32 throughout; never to be
    changed.
    """
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
    given = (package_config(Objective()), batch, unsharded)
    assert_refused(f"logits have {sizes}", policy_loss_function, *given, totals=totals)


ABSENT = {row.name for row in METRICS if {"rollout_log_probs", "policy_version"} & {*row.reads}}
"""Metrics of fields that these samples do not carry: 0 over 0."""


def with_garbage(step: list[PlainSample], garbage: float) -> list[PlainSample]:
    """Every per-token field holds garbage where the mask is 0: tool tokens have no log-probs."""
    spoiled = []
    for sample in step:
        fields = {}
        for name in ("advantages", "old_log_probs", "ref_log_probs"):
            pairs = zip(getattr(sample, name), sample.loss_mask, strict=True)
            fields[name] = [value if keep else garbage for value, keep in pairs]
        spoiled.append(replace(sample, **fields))
    return spoiled


def with_garbage_logits(step, logits, garbage: float) -> list[Tensor]:
    """The logits of rows that score no active token are garbage, and leaves again."""
    spoiled = []
    for sample, part in zip(step, logits, strict=True):
        scored = torch.zeros(len(sample.tokens), 1, dtype=torch.bool)
        for token, keep in enumerate(sample.loss_mask):
            scored[sample.prompt_length + token - 1] = bool(keep)
        spoiled.append(torch.where(scored, part.detach(), garbage).requires_grad_())
    return spoiled


@pytest.mark.parametrize("garbage", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("cp_size", (1, 2))
@pytest.mark.parametrize("name", ("everything", "kl_unbiased", "ppo"))
def test_garbage_at_masked_positions_reaches_neither_loss_nor_gradient(name, cp_size, garbage):
    """-inf or NaN old_log_probs, under exp, give a NaN gradient if only the result is masked."""
    clean = random_step(seed=26)
    assert any(0 in sample.loss_mask for sample in clean)
    clean_logits = random_logits(clean)
    expected = oracle.policy_loss(clean, clean_logits, OBJECTIVES[name]).loss

    step = with_garbage(clean, garbage)
    logits = with_garbage_logits(clean, clean_logits, garbage)
    results = rank_losses(package_config(OBJECTIVES[name]), step, logits, whole(len(step), cp_size))
    found = summed_loss(results)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    wanted = gradients(expected, clean_logits)
    torch.testing.assert_close(gradients(found, logits), wanted, rtol=0, atol=1e-12)
    metrics = summed_metrics(results)
    assert {name for name, value in metrics.items() if not math.isfinite(value)} <= ABSENT


def test_masking_only_the_result_would_give_nan_gradients() -> None:
    """The mutant of the test above: `where` after `exp` is not enough."""
    log_prob = torch.zeros(2, requires_grad=True)
    ratio = (log_prob - torch.tensor([-1.0, -math.inf])).exp()
    torch.where(torch.tensor([True, False]), ratio, 0.0).sum().backward()
    assert log_prob.grad is not None and log_prob.grad[1].isnan()


@pytest.mark.parametrize("garbage", (math.nan, math.inf))
def test_garbage_logits_at_an_active_position_stay_visible(garbage: float) -> None:
    sample = plain_sample([1, 1])
    (logits,) = random_logits([sample])
    with torch.no_grad():
        logits[sample.prompt_length, 3] = garbage
    loss = summed_loss(rank_losses(package_config(Objective()), [sample], [logits], whole(1)))
    assert not loss.isfinite()


@pytest.mark.parametrize("name", ("ppo", "everything"))
def test_ranks_without_an_active_token_stay_connected_to_the_graph(name: str) -> None:
    """An empty micro-batch, a rank without response tokens and a fully masked sample."""
    masked = replace(plain_sample([0, 0]), ref_log_probs=[0.0, 0.0])
    outer_chunks = replace(plain_sample([1] * 4, prompt_length=3), ref_log_probs=[0.0] * 4)
    config = package_config(OBJECTIVES[name])
    totals = uneven_totals(package_samples([masked, outer_chunks]))
    for micro_batch in ([], [masked], [outer_chunks]):
        batch = pack(package_samples(micro_batch), cp_rank=0, cp_size=2)
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        rows = local_logits(micro_batch, random_logits(micro_batch), 0, 2).detach().nan_to_num()
        loss, _ = policy_loss_function(config, batch, rows * weight, totals=totals)
        loss.backward()
        assert loss.item() == 0.0 and weight.grad.item() == 0.0


def test_step_without_an_active_token_is_zero_and_finite() -> None:
    step = [plain_sample([0, 0]), plain_sample([0])]
    logits = random_logits(step)
    for aggregation in oracle.AGGREGATIONS:
        config = package_config(aggregated(Objective(), aggregation))
        loss = summed_loss(rank_losses(config, step, logits, whole(2, cp_size=2)))
        assert loss.item() == 0.0 and not torch.cat(gradients(loss, logits)).any()
