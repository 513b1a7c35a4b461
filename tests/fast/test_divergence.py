"""The divergence estimates against their formulas, value and gradient, token by token."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, adapted_kl
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


def config(kind: str, unbiased: bool = False, gradient_of_k2: bool = False) -> PolicyLossConfig:
    gradient = {"kl_loss_gradient": "k2"} if gradient_of_k2 else {}
    settings = {"kl_loss_type": kind, "use_unbiased_kl": unbiased, **gradient}
    return PolicyLossConfig(kl_loss_coef=0.1, **settings)


def kl_penalty(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    return kl_estimate(config, tokens_and_sums(config, batch, log_probs)[0])


def penalty_and_gradient(
    config: PolicyLossConfig, sequences: list[Sequence1], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    log_probs = flat_log_probs(sequences, dtype)
    found = kl_penalty(config, package_batch(sequences), log_probs)
    found.sum().backward()
    return found.detach().double(), log_probs.grad.double()


TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (3e-6, 1e-7),
    torch.bfloat16: (3e-6, 1e-7),
}


def assert_close(found: Tensor, expected: Tensor, tolerance: tuple[float, float]) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance[0], atol=tolerance[1])


def check(
    kind: str, sequences: list[Sequence1], dtype: torch.dtype = torch.float64, **settings: bool
) -> tuple[Tensor, Tensor]:
    expected = stacked([oracle.kl(s, kind, **settings) for s in sequences])
    values = stacked([oracle.kl(s, kind, unbiased="unbiased" in settings) for s in sequences])
    found = penalty_and_gradient(config(kind, **settings), sequences, dtype)
    assert_close(found[0], values.detach(), TOLERANCES[dtype])
    tolerance = (2**-8, 1e-6) if dtype == torch.bfloat16 else TOLERANCES[dtype]
    assert_close(found[1], flat_gradient(expected.sum(), sequences), tolerance)
    return found


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("settings", [{}, {"unbiased": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_random_sequences_equal_the_formula(kind, settings, dtype):
    check(kind, random_sequences(1), dtype, **settings)


@pytest.mark.parametrize("settings", [{}, {"unbiased": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_differences_equal_the_formula(kind, settings):
    check(kind, [grid_sequence(DIFFERENCES, [1.0])], **settings)


@pytest.mark.parametrize(("log_ratio", "product"), [(0.1, 10.0), (-6.0, 0.3530)])
def test_the_unbiased_low_var_kl_clamps_the_product(log_ratio, product):
    """k3 = 9.1 and 142: r k3 is held within +-10, above and below what a clamp of k3 alone would
    give.
    """
    difference = {0.1: 10.0 + 0.1, -6.0: -5.0}[log_ratio]
    sequence = grid_sequence([log_ratio], [1.0])
    sequence = dataclasses.replace(sequence, ref_log_probs=[log_ratio - difference])
    found, gradient = penalty_and_gradient(config("low_var_kl", True), [sequence])
    assert found.item() == pytest.approx(product, rel=1e-3)
    assert (gradient.item() == 0) == (product == 10.0)
    of_k3_alone = math.exp(log_ratio) * min(math.exp(-difference) - 1 + difference, 10.0)
    assert abs(of_k3_alone - product) > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_k2_beside_the_value_of_any_estimate(kind):
    sequences = [*random_sequences(1), grid_sequence(DIFFERENCES, [1.0])]
    _, gradient = check(kind, sequences, gradient_of_k2=True)
    of_itself = flat_gradient(stacked([oracle.kl(s, kind) for s in sequences]).sum(), sequences)
    assert torch.allclose(of_itself, gradient) == (kind == "k2"), "the mutant: its own gradient"


@pytest.mark.parametrize("settings", [{}, {"unbiased": True}, {"gradient_of_k2": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_the_policy_cannot_sample(kind, settings):
    """k3 and low_var_kl hold d within +-20; k1 and k2 are infinite; the gradient of k2 leaves the
    token out.
    """
    (sequence,) = random_sequences(1)[:1]
    values = sequence.log_probs.detach().index_fill(0, torch.tensor([0, 3]), -math.inf)
    sequence = dataclasses.replace(sequence, log_probs=values.requires_grad_(), loss_mask=[1] * 7)
    found, gradient = check(kind, [sequence], **settings)
    assert found.isfinite().all() == (kind in ("k3", "low_var_kl"))
    is_finite = "gradient_of_k2" in settings or kind in ("k3", "low_var_kl", "k1")
    assert gradient.isfinite().all() == is_finite


def test_k3_keeps_its_digits_near_zero_in_float32():
    """exp(-d) - 1 + d would round to 0 or to an epsilon of float32 here; the estimate is d^2 /
    2.
    """
    difference = torch.tensor([1e-4, -1e-4, 3e-4])
    found = KL_ESTIMATES["k3"].function(difference)
    torch.testing.assert_close(found, difference.square() / 2, rtol=2e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_of_the_policy_stays_visible(kind):
    batch = package_batch([grid_sequence([0.0, 0.1], [1.0])])
    found = kl_penalty(config(kind), batch, torch.tensor([-1.0, math.nan]))
    assert torch.isnan(found).tolist() == [False, True]


def test_the_unbiased_gradient_passes_through_the_ratio():
    """The mutant with a stopped ratio has another gradient."""
    sequences = random_sequences(3)
    _, gradient = penalty_and_gradient(config("k3", True), sequences)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    ratio = (log_probs.detach() - batch.old_log_probs).exp()
    (ratio * kl_penalty(config("k3"), batch, log_probs)).sum().backward()
    assert not torch.allclose(gradient, log_probs.grad, atol=1e-4)


@pytest.mark.parametrize(("kl", "num_rollouts", "factor"), [
    (0.02, 50, 1.0),
    (0.021, 50, 1 + 0.05 * 0.5),
    (0.019, 50, 1 - 0.05 * 0.5),
    (3.0, 50, 1 + 0.2 * 0.5),  # at most a fifth over the horizon
    (0.0, 50, 1 - 0.2 * 0.5),
    (-0.4, 400, 0.8),  # a step of more than the horizon counts as the horizon
    (math.nan, 50, 1.0),
])  # fmt: skip
def test_the_coefficient_moves_towards_the_target(kl: float, num_rollouts: int, factor: float):
    """Ziegler et al., arXiv:1909.08593 sec. 2.2, by hand."""
    settings = PolicyLossConfig(kl_loss_coef=0.3, kl_target=0.02, kl_horizon=100)
    found = adapted_kl(settings, {"kl_loss": kl}, num_rollouts)
    assert found.kl_loss_coef == pytest.approx(0.3 * factor)
    assert dataclasses.replace(found, kl_loss_coef=0.3) == settings
    fixed = PolicyLossConfig(kl_loss_coef=0.3)
    assert adapted_kl(fixed, {"kl_loss": kl}, num_rollouts) is fixed
    assert adapted_kl(settings, {}, num_rollouts) is settings  # a step without an active token


def test_a_coefficient_never_leaves_float32():
    for kl, bound in ((0.0, 2.0**-126), (9.0, float(torch.finfo(torch.float32).max))):
        settings = PolicyLossConfig(kl_loss_coef=bound, kl_target=0.1, kl_horizon=1)
        assert adapted_kl(settings, {"kl_loss": kl}, 5).kl_loss_coef == bound
