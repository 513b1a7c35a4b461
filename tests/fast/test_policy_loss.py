"""policy_loss_function: bits of the default, precisions, dispatches, refusals.

Its numbers are in `test_cut_invariance`, masked positions in `test_masked_garbage`.
"""

import math

import pytest
import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.from_logits import policy_loss_function
from megatron_pg.step.batch import PackedBatch, pack
from tests import oracle
from tests.cut_policy_loss import EVERYTHING, aggregated, package_config, rank_losses, summed_loss
from tests.cut_steps import gradients, whole
from tests.dispatches import CountDispatches
from tests.fast.one_step import loss_of
from tests.fast.refusals import assert_refused
from tests.fast.sequences import flat_log_probs, package_batch, random_sequences
from tests.oracle import Objective
from tests.random_steps import (
    package_samples,
    plain_sample,
    random_logits,
    random_step,
    uneven_totals,
)

AGGREGATIONS = pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)


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
    objective = EVERYTHING
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


@pytest.mark.parametrize("garbage", (math.nan, math.inf))
def test_garbage_logits_at_an_active_position_stay_visible(garbage: float) -> None:
    sample = plain_sample([1, 1])
    (logits,) = random_logits([sample])
    with torch.no_grad():
        logits[sample.prompt_length, 3] = garbage
    loss = summed_loss(rank_losses(package_config(Objective()), [sample], [logits], whole(1)))
    assert not loss.isfinite()
