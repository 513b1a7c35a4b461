"""The divergence estimates against their formulas, value and gradient, token by token."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig
from megatron_pg.loss.regularizers import KL_ESTIMATES, kl_estimate
from tests.fast import objectives_oracle as oracle
from tests.fast.objectives_oracle import Sequence1
from tests.fast.sequences import (
    flat_gradient,
    flat_log_probs,
    grid_sequence,
    package_batch,
    random_sequences,
    stacked,
    tokens_and_sums,
)

KINDS = oracle.KL_ESTIMATES
DIFFERENCES = (-1e4, -25.0, -20.5, -19.5, -2.5, -1e-3, 0.0, 1e-3, 2.5, 10.9, 19.5, 20.5, 1e4)


def kl_penalty(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    return kl_estimate(config, tokens_and_sums(config, batch, log_probs)[0])


TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 3e-6, "atol": 1e-7},
    torch.bfloat16: {"rtol": 3e-6, "atol": 1e-7},
}


def config(kind: str, unbiased: bool) -> PolicyLossConfig:
    return PolicyLossConfig(kl_loss_coef=0.1, kl_loss_type=kind, use_unbiased_kl=unbiased)


def check(kind: str, unbiased: bool, sequences: list[Sequence1], dtype: torch.dtype) -> None:
    expected = stacked([oracle.kl(s, kind, unbiased=unbiased) for s in sequences])
    expected_gradient = flat_gradient(expected.sum(), sequences)
    log_probs = flat_log_probs(sequences, dtype)
    found = kl_penalty(config(kind, unbiased), package_batch(sequences), log_probs)
    found.sum().backward()
    torch.testing.assert_close(found.double(), expected, **TOLERANCES[dtype])
    tolerance = TOLERANCES[dtype]
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 2**-8, "atol": 1e-6}
    torch.testing.assert_close(log_probs.grad.double(), expected_gradient, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_random_sequences_equal_the_formula(kind, unbiased, dtype):
    check(kind, unbiased, random_sequences(1), dtype)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_differences_equal_the_formula(kind, unbiased):
    check(kind, unbiased, [grid_sequence(DIFFERENCES, [1.0])], torch.float64)


def penalty_and_gradient(
    settings: PolicyLossConfig, sequence: Sequence1
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = flat_log_probs([sequence])
    found = kl_penalty(settings, package_batch([sequence]), log_probs)
    found.sum().backward()
    return found.detach(), log_probs.grad


@pytest.mark.parametrize(("log_ratio", "product"), [(0.1, 10.0), (-6.0, 0.3530)])
def test_the_unbiased_low_var_kl_clamps_the_product(log_ratio, product):
    """k3 = 9.1 and 142: r k3 is held within +-10, above and below what a clamp of k3 alone would give."""
    difference = {0.1: 10.0 + 0.1, -6.0: -5.0}[log_ratio]
    sequence = dataclasses.replace(
        grid_sequence([log_ratio], [1.0]), ref_log_probs=[log_ratio - difference]
    )
    found, gradient = penalty_and_gradient(config("low_var_kl", True), sequence)
    assert found.item() == pytest.approx(product, rel=1e-3)
    assert (gradient.item() == 0) == (product == 10.0)
    of_k3_alone = math.exp(log_ratio) * min(math.exp(-difference) - 1 + difference, 10.0)
    assert abs(of_k3_alone - product) > 0.05


def with_gradient_of_k2(kind: str) -> PolicyLossConfig:
    return PolicyLossConfig(kl_loss_coef=0.1, kl_loss_type=kind, kl_loss_gradient="k2")


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_k2_beside_the_value_of_any_estimate(kind):
    sequences = [*random_sequences(1), grid_sequence(DIFFERENCES, [1.0])]
    expected = stacked([oracle.kl(s, kind, gradient_of_k2=True) for s in sequences])
    values = stacked([oracle.kl(s, kind) for s in sequences])
    gradient = flat_gradient(expected.sum(), sequences)
    log_probs = flat_log_probs(sequences)
    found = kl_penalty(with_gradient_of_k2(kind), package_batch(sequences), log_probs)
    found.sum().backward()
    torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_probs.grad, gradient, rtol=1e-12, atol=1e-12)
    of_itself = flat_gradient(values.sum(), sequences)
    assert torch.allclose(of_itself, gradient) == (kind == "k2"), "the mutant: its own gradient"


@pytest.mark.parametrize("settings", [{}, {"unbiased": True}, {"gradient_of_k2": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_the_policy_cannot_sample(kind, settings):
    """k3 and low_var_kl hold d within +-20; k1 and k2 are infinite; the gradient of k2 leaves the token out."""
    (sequence,) = random_sequences(1)[:1]
    values = sequence.log_probs.detach().index_fill(0, torch.tensor([0, 3]), -math.inf)
    sequence = dataclasses.replace(sequence, log_probs=values.requires_grad_(), loss_mask=[1] * 7)
    expected = stacked([oracle.kl(sequence, kind, **settings)])
    gradient = flat_gradient(expected.sum(), [sequence])
    of_k2 = "gradient_of_k2" in settings
    chosen = with_gradient_of_k2(kind) if of_k2 else config(kind, "unbiased" in settings)
    found, of_found = penalty_and_gradient(chosen, sequence)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_found, gradient, rtol=1e-12, atol=1e-12)
    assert found.isfinite().all() == (kind in ("k3", "low_var_kl"))
    assert of_found.isfinite().all() == (of_k2 or kind in ("k3", "low_var_kl", "k1"))


def test_k3_keeps_its_digits_near_zero_in_float32():
    """exp(-d) - 1 + d would round to 0 or to an epsilon of float32 here; the estimate is d^2 / 2."""
    difference = torch.tensor([1e-4, -1e-4, 3e-4])
    found = KL_ESTIMATES["k3"].function(difference)
    torch.testing.assert_close(found, difference.square() / 2, rtol=2e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_at_an_active_position_stays_visible(kind):
    sequences = [grid_sequence([0.0, 0.1], [1.0])]
    batch = package_batch(sequences)
    ref_log_probs = torch.tensor([0.0, math.nan])
    batch = dataclasses.replace(batch, ref_log_probs=ref_log_probs)
    found = kl_penalty(config(kind, False), batch, flat_log_probs(sequences))
    assert torch.isnan(found).tolist() == [False, True]


def test_the_unbiased_gradient_passes_through_the_ratio():
    """The mutant with a stopped ratio has another gradient."""
    sequences = random_sequences(3)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    kl_penalty(config("k3", True), batch, log_probs).sum().backward()
    mutant_log_probs = flat_log_probs(sequences)
    ratio = (mutant_log_probs.detach() - batch.old_log_probs).exp()
    (ratio * kl_penalty(config("k3", False), batch, mutant_log_probs)).sum().backward()
    assert not torch.allclose(log_probs.grad, mutant_log_probs.grad, atol=1e-4)
