"""The policy objectives against their formulas, value and gradient, token by token."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, pack, policy_loss_from_log_probs, step_totals
from megatron_pg.config.fields import field_docstrings
from megatron_pg.loss import DPPO_DELTAS, objectives
from megatron_pg.loss.objectives import OBJECTIVES, Outcome, clipped_log_ratio, get_objective
from megatron_pg.loss.sequence import SequenceSums
from megatron_pg.loss.tokens import Tokens
from tests.fast import objectives_oracle as oracle
from tests.fast.objectives_oracle import Sequence1
from tests.fast.sequences import (
    OF_LOG_PROBS,
    flat_gradient,
    flat_log_probs,
    grid_sequence,
    package_batch,
    random_sequences,
    stacked,
    tokens_and_sums,
)

LOW, HIGH = math.exp(-0.25), math.exp(0.25)
"""Bounds that a ratio can meet exactly: 1 - (1 - LOW) is LOW."""
DUAL = math.exp(1.125)
"""A bound of dual clip that a ratio can meet exactly; exp(log(3)) is not 3."""

ADVANTAGES = (-2.0, -1.0, 0.0, 0.5, 3.0)
EXTREMES = (-1e4, -25.0, -20.5, -20.0, -19.5, -3.0, 3.0, 19.5, 20.0, 20.5, 25.0, 1e4)
AROUND_BOUNDS = (-0.251, -0.249, -0.125, 0.0, 0.125, 0.249, 0.251, 1.0, 1.101, 1.097)
ON_BOUNDS = (-0.25, 0.25)

HIGHER = {"eps_clip": 1 - LOW, "eps_clip_high": HIGH - 1}
BOUNDS = {"low": LOW, "high": HIGH}
SETTINGS: dict[str, tuple[str, dict, dict]] = {
    # name: (objective, the package's settings, the oracle's)
    "ppo": ("ppo", {"eps_clip": 1 - LOW}, {"low": LOW, "high": 1 + (1 - LOW)}),
    "ppo_clip_higher": ("ppo", HIGHER, BOUNDS),
    "ppo_dual_clip": ("ppo", HIGHER | {"eps_clip_c": 3.0}, BOUNDS | {"dual": 3.0}),
    "ppo_dual_clip_met_exactly": ("ppo", HIGHER | {"eps_clip_c": DUAL}, BOUNDS | {"dual": DUAL}),
    "ppo_dual_clip_below_the_upper_bound": (
        "ppo",
        HIGHER | {"eps_clip_c": 1.125},
        BOUNDS | {"dual": 1.125},
    ),
    "gspo": ("gspo", HIGHER, BOUNDS),
    "gspo_dual_clip": ("gspo", {"eps_clip_c": 1.5}, {"dual": 1.5}),
    "cispo": ("cispo", {"eps_clip_high": HIGH - 1}, {"high": HIGH}),
    "cispo_lower_bound": (
        "cispo",
        HIGHER | {"cispo_lower_bound": True},
        BOUNDS | {"cispo_lower_bound": True},
    ),
    "reinforce": ("reinforce", {}, {}),
    "sft": ("sft", {}, {}),
    "sapo": ("sapo", {}, {}),
    "sapo_taus": ("sapo", {"sapo_tau_pos": 0.7, "sapo_tau_neg": 2.5}, {"taus": (0.7, 2.5)}),
    "dppo_tv": ("dppo_tv", {}, {}),
    "dppo_kl": ("dppo_kl", {}, {}),
    **{
        f"{name}_deltas": (
            name,
            {"dppo_delta": 0.02, "dppo_delta_high": 0.04},
            {"deltas": (0.02, 0.04)},
        )
        for name in ("dppo_tv", "dppo_kl")
    },
    "gmpo": ("gmpo", HIGHER, BOUNDS),
    "gmpo_open_below": ("gmpo", {"eps_clip": 1.0, "eps_clip_high": 0.1}, {"low": 0, "high": 1.1}),
    **{
        f"{name}_against_rollout": (name, {"ratio_anchor": "rollout"}, {"anchor": "rollout"})
        for name in ("ppo", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl", "gmpo")
    },
}
OF_SEQUENCES = [case for case in SETTINGS if case.startswith(("gspo", "gmpo"))]
OF_PROBABILITIES = [case for case in SETTINGS if case.startswith("dppo")]
"""Which need log-probs of at most 0, and have a grid of their own."""

TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 3e-6, "atol": 3e-6},
    # The inputs fit into bfloat16 and the loss is computed in float32; the gradient is rounded back.
    torch.bfloat16: {"rtol": 3e-6, "atol": 3e-6},
}
BFLOAT16_GRADIENT = {"rtol": 2**-8, "atol": 1e-6}


def package_objective(name: str, settings: dict, batch: PackedBatch, log_probs: Tensor) -> Outcome:
    config = PolicyLossConfig(policy_loss=name, **settings)
    return OBJECTIVES[name](config, *tokens_and_sums(config, batch, log_probs))


def check(
    case: str, sequences: list[Sequence1], dtype: torch.dtype, batch: PackedBatch | None = None
) -> None:
    """Value and every element of the gradient, the tokens weighted unequally; `batch` is that of the sequences."""
    name, settings, oracle_settings = SETTINGS[case]
    expected = stacked([oracle.objective(name, s, **oracle_settings) for s in sequences])
    weights = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64)
    expected_gradient = flat_gradient((expected * weights).sum(), sequences)

    log_probs = flat_log_probs(sequences, dtype)
    batch = package_batch(sequences) if batch is None else batch
    found = package_objective(name, settings, batch, log_probs)
    assert found.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (found.loss * weights).sum().backward()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.loss.double(), expected, **tolerance)
    if dtype == torch.bfloat16:
        tolerance = BFLOAT16_GRADIENT
    torch.testing.assert_close(log_probs.grad.double(), expected_gradient, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", SETTINGS)
def test_random_sequences_equal_the_formula(case: str, dtype: torch.dtype) -> None:
    check(case, random_sequences(1), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "case", [case for case in SETTINGS if case not in (*OF_SEQUENCES, *OF_PROBABILITIES)]
)
def test_around_the_bounds_and_at_extreme_ratios(case: str, dtype: torch.dtype) -> None:
    check(case, [grid_sequence((*AROUND_BOUNDS, *EXTREMES), ADVANTAGES)], dtype)


@pytest.mark.parametrize("case", OF_SEQUENCES)
@pytest.mark.parametrize("log_ratio", [*AROUND_BOUNDS, *EXTREMES])
def test_sequence_ratios_around_the_bounds_and_at_extreme_ratios(
    case: str, log_ratio: float
) -> None:
    """Every token of a sequence has the same log-ratio, so it is that of the sequence."""
    check(case, [grid_sequence([log_ratio], ADVANTAGES)], torch.float64)


@pytest.mark.parametrize(
    "case",
    [
        *("ppo_clip_higher", "ppo_dual_clip", "ppo_dual_clip_met_exactly"),
        *("gspo", "cispo_lower_bound"),
    ],
)
def test_on_the_bounds_the_gradient_is_that_of_the_unclipped_side(case: str) -> None:
    for log_ratio in (*ON_BOUNDS, math.log(3.0), math.log(DUAL)):
        check(case, [grid_sequence([log_ratio], ADVANTAGES)], torch.float64)
    sequence = grid_sequence(ON_BOUNDS, [1.0, -1.0])
    name, settings, _ = SETTINGS[case]
    log_probs = flat_log_probs([sequence])
    if name == "gspo":  # whose ratio is that of the sequence, here between the bounds
        return
    found = package_objective(name, settings, package_batch([sequence]), log_probs)
    found.loss.sum().backward()
    assert not found.is_clipped.any()
    assert (log_probs.grad != 0).all()


def test_a_ratio_on_the_bound_of_dual_clip_keeps_its_gradient() -> None:
    sequence = grid_sequence([math.log(DUAL)], [-2.0])
    assert sequence.log_probs.exp().item() == DUAL
    name, settings, _ = SETTINGS["ppo_dual_clip_met_exactly"]
    log_probs = flat_log_probs([sequence])
    package_objective(name, settings, package_batch([sequence]), log_probs).loss.sum().backward()
    assert log_probs.grad.tolist() == [2.0 * DUAL]


@pytest.mark.parametrize(
    "name", ["ppo", "gspo", "cispo", "reinforce", "sapo", "dppo_tv", "dppo_kl", "gmpo"]
)
def test_at_ratio_one_every_objective_has_the_gradient_of_reinforce(name: str) -> None:
    sequences = [
        dataclasses.replace(s, old_log_probs=s.log_probs.tolist()) for s in random_sequences(2)
    ]
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    package_objective(name, {}, batch, log_probs).loss.sum().backward()
    expected = -batch.advantages.double() * batch.loss_mask
    torch.testing.assert_close(log_probs.grad, expected, rtol=0, atol=1e-15)


def test_a_gradient_through_the_sequence_mean_would_be_another_one() -> None:
    """The mutant of gspo: without the stop-gradient a token gets 1/n of every token's gradient."""
    sequences = random_sequences(3)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    package_objective("gspo", {}, batch, log_probs).loss.sum().backward()
    (sequence,) = [s for s in sequences if len(s.loss_mask) == 12]
    active = sequence.active()
    mean = sum(sequence.log_probs[t] - sequence.old_log_probs[t] for t in active) / len(active)
    mutant = sum(
        oracle.surrogate(mean.exp(), sequence.advantages[t], 0.8, 1.2, None) for t in active
    )
    mutant_gradient = flat_gradient(mutant, [sequence])
    start = 7 + 1
    assert not torch.allclose(log_probs.grad[start : start + 12], mutant_gradient, atol=1e-3)


PROBABILITIES = (1e-30, 1e-7, 0.02, 0.3, 0.44, 0.47, 0.6, 0.97, 1 - 1e-6, 1.0)


def probability_grid() -> Sequence1:
    """Every probability against every other, under a positive, a negative and no advantage."""
    triples = list(itertools.product(PROBABILITIES, PROBABILITIES, (1.5, -0.5, 0.0)))
    old, new = ([math.log(triple[place]) for triple in triples] for place in (0, 1))
    as_float32 = torch.tensor(new).double()
    return dataclasses.replace(
        grid_sequence(new, [1.0]),
        log_probs=as_float32.requires_grad_(),
        advantages=[advantage for *_, advantage in triples],
        old_log_probs=torch.tensor(old).tolist(),
        rollout_log_probs=torch.tensor(old).flip(0).tolist(),
    )


@pytest.mark.parametrize("case", OF_PROBABILITIES)
def test_divergences_of_all_probabilities(case: str) -> None:
    sequence = probability_grid()
    check(case, [sequence], torch.float64)
    name, settings, _ = SETTINGS[case]
    found = package_objective(name, settings, package_batch([sequence]), flat_log_probs([sequence]))
    is_dropped = found.is_effectively_clipped
    assert 20 < int(is_dropped.sum()) < 120
    assert (found.loss[is_dropped] == 0).all()
    above = found.log_ratio > 0
    positive = package_batch([sequence]).advantages > 0
    assert (above[is_dropped] == positive[is_dropped]).all()
    assert int(found.is_clipped.sum()) > int(is_dropped.sum())


def test_deltas_that_are_not_given_are_those_of_the_help_text() -> None:
    text = field_docstrings(PolicyLossConfig)["dppo_delta"]
    said = {
        name: float(number) for number, name in re.findall(r"([0-9.]+) (?:nats )?for (\w+)", text)
    }
    assert said == DPPO_DELTAS


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_gmpo_under_the_sample_mean_is_the_objective_of_its_paper(anchor: str) -> None:
    """arXiv:2507.20673 eq. 4, a product over the tokens of a sequence, with one advantage a sequence."""
    sequences = [
        dataclasses.replace(s, advantages=[(-1.0) ** place * (place + 1)] * len(s.advantages))
        for place, s in enumerate(random_sequences(11))
    ]
    low, high = math.exp(-0.2), math.exp(0.1)
    total = oracle.ZERO
    for sequence in sequences:
        product, active = torch.ones((), dtype=torch.float64), sequence.active()
        for t in active:
            against = getattr(sequence, f"{anchor}_log_probs")[t]
            ratio = (sequence.log_probs[t] - against).exp()
            is_positive = sequence.advantages[t] > 0
            clipped = ratio.clamp(low, high)
            product = product * (torch.minimum if is_positive else torch.maximum)(ratio, clipped)
        if active:
            total = total - product ** (1 / len(active)) * sequence.advantages[0] / len(sequences)
    expected = flat_gradient(total, sequences)

    config = PolicyLossConfig(
        policy_loss="gmpo", eps_clip=1 - low, eps_clip_high=high - 1, ratio_anchor=anchor
    )
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    loss, metrics = policy_loss_from_log_probs(
        config, batch, log_probs, None, totals=step_totals(batch.samples)
    )
    loss.backward()
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-12, atol=1e-12)
    assert 0 < metrics["pg_clipfrac"][0] < metrics["clipped_ratio_fraction"][0]


# Mistakes, of which each must be seen.

RIGHT = {name: row.function for name, row in OBJECTIVES.items()}


def swapped_temperatures(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    swapped = dataclasses.replace(
        config, sapo_tau_pos=config.sapo_tau_neg, sapo_tau_neg=config.sapo_tau_pos
    )
    return RIGHT["sapo"](swapped, tokens, sums)


def gate_of_the_log_ratio(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    found = RIGHT["sapo"](config, tokens, sums)
    tau = torch.where(tokens.advantages > 0, config.sapo_tau_pos, config.sapo_tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (tokens.log_probs - tokens.anchor(config)))
    return dataclasses.replace(found, loss=-gate * tokens.advantages)


def dropped_whatever_the_advantage(name: str) -> Callable[..., Outcome]:
    """A symmetric trust region: a token that comes back is dropped too."""

    def mutant(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
        found = RIGHT[name](config, tokens, sums)
        return dataclasses.replace(found, loss=found.loss.masked_fill(found.is_clipped, 0.0))

    return mutant


def divergence_of_the_new_from_the_old(
    config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums
) -> Outcome:
    def reversed_(old: Tensor, new: Tensor) -> Tensor:
        return objectives.binary_divergence(new, old)

    return objectives._divergence_masked(config, tokens, "dppo_kl", reversed_)


def with_sums_of(sums: SequenceSums, values: Tensor) -> SequenceSums:
    """The sums over sequences of other values in the place of `clipped_policy`."""
    wrong = torch.zeros_like(sums.sums["clipped_policy"]).index_add_(0, sums.sample_ids, values)
    return dataclasses.replace(sums, sums={**sums.sums, "clipped_policy": wrong})


def clipped_on_both_sides(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Outcome:
    """The mean of ratios clipped whatever the sign of the advantage."""
    log_ratio = tokens.log_probs.detach().double() - tokens.anchor(config)
    clipped = log_ratio.clamp(math.log(LOW), math.log(HIGH))
    return RIGHT["gmpo"](config, tokens, with_sums_of(sums, clipped))


def mean_of_unclipped_ratios(
    config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums
) -> Outcome:
    """Clipped after the mean instead of before it, as gspo does."""
    log_ratio = tokens.log_probs.detach().double() - tokens.anchor(config)
    return RIGHT["gmpo"](config, tokens, with_sums_of(sums, log_ratio))


MUTANTS = {
    "swapped temperatures": ("sapo_taus", swapped_temperatures),
    "gate of the log-ratio": ("sapo_taus", gate_of_the_log_ratio),
    "dropped whatever the advantage": ("dppo_tv", dropped_whatever_the_advantage("dppo_tv")),
    "the same of dppo_kl": ("dppo_kl", dropped_whatever_the_advantage("dppo_kl")),
    "ratio for probability": (
        "dppo_tv_deltas",
        lambda config, tokens, sums: objectives._divergence_masked(
            config, tokens, "dppo_tv", lambda old, new: ((new - old).exp() - 1).abs()
        ),
    ),
    "divergence the other way": ("dppo_kl_deltas", divergence_of_the_new_from_the_old),
    "clipped on both sides": ("gmpo", clipped_on_both_sides),
    "mean of unclipped ratios": ("gmpo", mean_of_unclipped_ratios),
}


@pytest.mark.parametrize("mistake", MUTANTS)
def test_mistakes_are_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, function = MUTANTS[mistake]
    name = SETTINGS[case][0]
    sequences = [*random_sequences(1, spread=0.6), probability_grid()]
    check(case, sequences, torch.float64)
    monkeypatch.setitem(OBJECTIVES, name, dataclasses.replace(OBJECTIVES[name], function=function))
    with pytest.raises(AssertionError):
        check(case, sequences, torch.float64)


@pytest.mark.parametrize("case", [case for case in SETTINGS if case.endswith("_against_rollout")])
def test_the_anchor_matters(case: str) -> None:
    """Neither the ratio nor the mask or the clip may stay with the old log-probs."""
    name, _, oracle_settings = SETTINGS[case]
    sequences = random_sequences(1)
    old, rollout = (
        stacked([oracle.objective(name, s, **each) for s in sequences])
        for each in ({}, oracle_settings)
    )
    assert not torch.allclose(old, rollout, atol=1e-3)
    batch = dataclasses.replace(package_batch(sequences), old_log_probs=None)
    found = package_objective(name, {"ratio_anchor": "rollout"}, batch, flat_log_probs(sequences))
    torch.testing.assert_close(found.loss, rollout, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *((name, "old_log_probs") for name, row in OBJECTIVES.items() if row.ratio != "none"),
        *((name, "log_probs") for name in OF_LOG_PROBS),
    ],
)
def test_nan_at_an_active_position_reaches_loss_and_gradient(name: str, field: str) -> None:
    sequences = [grid_sequence([0.0, 0.1], [1.0, -1.0])]
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences).detach()
    if field == "log_probs":
        log_probs[1] = torch.nan
    else:
        old_log_probs = batch.old_log_probs.clone()
        old_log_probs[1] = torch.nan
        batch = dataclasses.replace(batch, old_log_probs=old_log_probs)
    log_probs.requires_grad_()
    found = package_objective(name, {}, batch, log_probs)
    found.loss.sum().backward()
    assert torch.isnan(found.loss[1])
    if name not in ("sft", "reinforce"):  # whose gradients do not contain the log-prob
        assert torch.isnan(log_probs.grad[1])


def with_impossible_tokens(sequences: list[Sequence1], field: str) -> list[Sequence1]:
    """Every third log-prob of a field is -inf, under a positive, no or a negative advantage; one sequence has none."""
    found = []
    for number, sequence in enumerate(sequences):
        values = torch.as_tensor(getattr(sequence, field)).detach().double()
        count = len(values) if number else 0
        values = values.where(torch.arange(len(values)) % 3 != 0, -math.inf) if count else values
        advantages = [(1.5, 0.25, -1.0, 0.0)[t // 3 % 4] for t in range(len(values))]
        given = values.requires_grad_() if field == "log_probs" else values.tolist()
        found.append(dataclasses.replace(sequence, advantages=advantages, **{field: given}))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", SETTINGS)
def test_a_token_that_the_policy_cannot_sample(case: str, dtype: torch.dtype) -> None:
    """A ratio is e^-20 without gradient; a log-prob is a loss of infinity, but at an advantage of 0."""
    sequences = with_impossible_tokens(random_sequences(11), "log_probs")
    check(case, sequences, dtype)
    name, settings, _ = SETTINGS[case]
    log_probs = flat_log_probs(sequences)
    found = package_objective(name, settings, package_batch(sequences), log_probs)
    found.loss.sum().backward()
    assert found.loss.isnan().sum() == 0 and log_probs.grad.isfinite().all()
    is_infinite = name in ("reinforce", "cispo", "sft")
    assert found.loss.isfinite().all() != is_infinite


@pytest.mark.parametrize(
    "case", [case for case in SETTINGS if "ratio_anchor" not in SETTINGS[case][1]]
)
def test_a_token_that_the_old_policy_could_not_sample(case: str) -> None:
    """A sample refuses it; the objectives hold its ratio at e^20, without gradient."""
    clean = random_sequences(12)
    sequences = with_impossible_tokens(clean, "old_log_probs")
    advantages = [
        dataclasses.replace(s, old_log_probs=c.old_log_probs)
        for s, c in zip(sequences, clean, strict=True)
    ]
    old_log_probs = torch.tensor([value for s in sequences for value in s.old_log_probs])
    batch = dataclasses.replace(package_batch(advantages), old_log_probs=old_log_probs)
    check(case, sequences, torch.float64, batch)


def test_divergence_of_a_token_that_either_policy_cannot_sample() -> None:
    """0 log 0 is 0: KL(old || new) of {this token, any other} is -log(1 - p) where old has nothing for the token."""
    old = torch.tensor([-math.inf, -math.inf, -1.0, -200.0], dtype=torch.float64)
    new = torch.tensor([math.log(0.5), -3.0, -math.inf, -3.0], dtype=torch.float64)
    found = objectives.binary_divergence(old, new)
    expected = [
        oracle.moved("dppo_kl", *pair) for pair in zip(old.tolist(), new.tolist(), strict=True)
    ]
    torch.testing.assert_close(found.tolist(), expected, rtol=1e-12, atol=0)
    assert expected[0] == pytest.approx(math.log(2)) and expected[2] == math.inf
    assert objectives.binary_divergence(old.float(), new.float()).isfinite().tolist() == [
        True, True, False, True,
    ]  # fmt: skip


def test_clip_flags_and_log_ratio() -> None:
    """is_clipped: outside the range; effectively: on the side that the sign of A makes active."""
    log_ratios = (-1.0, 0.0, 1.0)
    sequence = grid_sequence(log_ratios, (-1.0, 0.0, 1.0))
    found = package_objective("ppo", {}, package_batch([sequence]), flat_log_probs([sequence]))
    clipped = [True] * 3 + [False] * 3 + [True] * 3
    effectively = [True, False, False, False, False, False, False, False, True]
    assert found.is_clipped.tolist() == clipped
    assert found.is_effectively_clipped.tolist() == effectively
    assert found.log_ratio.tolist() == [value for value in log_ratios for _ in range(3)]
    assert not found.log_ratio.requires_grad

    found = package_objective("cispo", {}, package_batch([sequence]), flat_log_probs([sequence]))
    assert found.is_clipped.tolist() == [False] * 6 + [True] * 3
    lower = {"cispo_lower_bound": True}
    found = package_objective("cispo", lower, package_batch([sequence]), flat_log_probs([sequence]))
    assert found.is_clipped.tolist() == clipped


def test_old_log_probs_are_a_constant() -> None:
    log_probs, old_log_probs = torch.zeros(2, 3, requires_grad=True).unbind()
    active = torch.ones(3, dtype=torch.bool)
    (gradient,) = torch.autograd.grad(
        clipped_log_ratio(log_probs, old_log_probs, active).sum(), old_log_probs, allow_unused=True
    )
    assert gradient is None


def test_a_sum_over_sequences_that_was_not_made_is_named() -> None:
    sequences = random_sequences(6)
    config = PolicyLossConfig(policy_loss="gspo")
    tokens, _ = tokens_and_sums(config, package_batch(sequences), flat_log_probs(sequences))
    with pytest.raises(ValueError, match="'policy' was not made"):
        OBJECTIVES["gspo"](config, tokens, SequenceSums(tokens.sample_ids, {}))


@pytest.mark.parametrize("name", OF_LOG_PROBS)
def test_an_empty_micro_batch_is_legal_and_connected(name: str) -> None:
    log_probs = torch.zeros(0, requires_grad=True)
    found = package_objective(name, {}, pack([]), log_probs)
    assert found.loss.shape == (0,) and found.loss.requires_grad


# A user's own loss.

seen: dict[str, Tensor] = {}


def squared_ratio_loss(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    seen.update(old=batch.old_log_probs, advantages=batch.advantages, log_probs=log_probs)
    seen.update(ref=batch.ref_log_probs, rollout=batch.rollout_log_probs)
    return -(batch.advantages * (log_probs - batch.old_log_probs).exp() ** 2)


def loss_of_the_wrong_size(
    config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor
) -> Tensor:
    return log_probs.sum()


def loss_with_metrics(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> object:
    return log_probs, {"mine": 1.0}


def loss_without_gradient(
    config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor
) -> Tensor:
    return -log_probs.detach()


def custom_config(function: str) -> PolicyLossConfig:
    return PolicyLossConfig(custom_policy_loss_path=f"{__name__}:{function}")


def test_custom_loss_gets_masked_inputs_and_passes_no_masked_gradient() -> None:
    sequences = random_sequences(8)
    batch = package_batch(sequences)
    masked = ~batch.loss_mask
    dirty = dataclasses.replace(
        batch,
        old_log_probs=batch.old_log_probs.masked_fill(masked, -torch.inf),
        advantages=batch.advantages.masked_fill(masked, torch.nan),
        ref_log_probs=batch.ref_log_probs.masked_fill(masked, torch.nan),
        rollout_log_probs=batch.rollout_log_probs.masked_fill(masked, torch.inf),
    )
    log_probs = flat_log_probs(sequences).detach().masked_fill(masked, torch.nan).requires_grad_()
    config = custom_config("squared_ratio_loss")
    found = get_objective(config)(config, *tokens_and_sums(config, dirty, log_probs))
    found.loss.sum().backward()
    assert set(seen) == {"old", "advantages", "log_probs", "ref", "rollout"}
    assert all((values[masked] == 0).all() for values in seen.values())
    ratio = (log_probs.detach() - batch.old_log_probs).exp()
    expected = torch.where(batch.loss_mask, -(batch.advantages * ratio**2), 0.0)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(log_probs.grad, 2 * expected)


def test_custom_loss_that_loses_the_gradient_is_refused() -> None:
    """Megatron's schedules would pass over it, and training go on without learning."""
    sequences = random_sequences(9)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    config = custom_config("loss_without_gradient")
    objective = get_objective(config)
    message = "--custom-policy-loss-path .*loss_without_gradient returned a tensor without a grad"
    with pytest.raises(ValueError, match=message):
        objective(config, *tokens_and_sums(config, batch, log_probs))
    detached = tokens_and_sums(config, batch, log_probs.detach())
    assert not objective(config, *detached).loss.requires_grad
    with torch.no_grad():
        objective(config, *tokens_and_sums(config, batch, log_probs))


def loss_of_masked_tokens_too(
    config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor
) -> Tensor:
    return torch.where(batch.loss_mask, log_probs, 1 / log_probs) + 3


def test_custom_loss_is_zero_at_masked_positions() -> None:
    sequences = random_sequences(10)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    config = custom_config("loss_of_masked_tokens_too")
    found = get_objective(config)(config, *tokens_and_sums(config, batch, log_probs))
    found.loss.sum().backward()
    active = batch.loss_mask.double()
    assert torch.equal(found.loss, torch.where(batch.loss_mask, log_probs.detach() + 3, 0.0))
    assert torch.equal(log_probs.grad, active)


@pytest.mark.parametrize("function", ["loss_of_the_wrong_size", "loss_with_metrics"])
def test_custom_loss_of_another_result_is_refused(function: str) -> None:
    sequences = random_sequences(9)
    config = custom_config(function)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    with pytest.raises(ValueError, match="--custom-policy-loss-path .*each token of this rank's"):
        get_objective(config)(config, *tokens_and_sums(config, batch, log_probs))
