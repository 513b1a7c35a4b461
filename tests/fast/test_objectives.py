"""The policy objectives against their formulas, value and gradient, token by token."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, Sample, pack
from megatron_pg.config.settings import fields_of
from megatron_pg.loss import DPPO_DELTAS
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.objectives import OBJECTIVES, Outcome, clipped_log_ratio, get_objective
from megatron_pg.loss.resolved import resolve
from megatron_pg.loss.sequence import sequence_units
from tests.fast import objectives_oracle as oracle
from tests.fast.objectives_oracle import Sequence1
from tests.fast.one_step import loss_of
from tests.fast.refusals import assert_refused
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
CISPO_LOWER = {"cispo_lower_bound": True}
GAMMAS = {"vespo_k_pos": 0.7, "vespo_lambda_pos": 0.1, "vespo_k_neg": 5.0, "vespo_lambda_neg": 0.0}
"""Of which the last two grow with the ratio without end."""
DELTAS = {"dppo_delta": 0.02, "dppo_delta_high": 0.04}
SETTINGS: dict[str, tuple[str, dict, dict]] = {
    # name: (objective, the package's settings, the oracle's)
    "ppo": ("ppo", {"eps_clip": 1 - LOW}, {"low": LOW, "high": 1 + (1 - LOW)}),
    "ppo_clip_higher": ("ppo", HIGHER, BOUNDS),
    "ppo_dual_clip": ("ppo", HIGHER | {"eps_clip_c": 3.0}, BOUNDS | {"dual": 3.0}),
    "ppo_dual_clip_met_exactly": ("ppo", HIGHER | {"eps_clip_c": DUAL}, BOUNDS | {"dual": DUAL}),
    "ppo_dual_clip_below_upper": ("ppo", HIGHER | {"eps_clip_c": 1.125}, BOUNDS | {"dual": 1.125}),
    "gspo": ("gspo", HIGHER, BOUNDS),
    "gspo_dual_clip": ("gspo", {"eps_clip_c": 1.5}, {"dual": 1.5}),
    "cispo": ("cispo", {"eps_clip_high": HIGH - 1}, {"high": HIGH}),
    "cispo_lower_bound": ("cispo", HIGHER | CISPO_LOWER, BOUNDS | CISPO_LOWER),
    "dis": ("dis", HIGHER, BOUNDS),
    "dis_open_below": ("dis", {"eps_clip": 1.0, "eps_clip_high": 3.0}, {"low": 0, "high": 4.0}),
    "vespo": ("vespo", {}, {}),
    "vespo_flat": ("vespo", GAMMAS, {"gammas": tuple(GAMMAS.values())}),
    "reinforce": ("reinforce", {}, {}),
    "sft": ("sft", {}, {}),
    "sapo": ("sapo", {}, {}),
    "sapo_taus": ("sapo", {"sapo_tau_pos": 0.7, "sapo_tau_neg": 2.5}, {"taus": (0.7, 2.5)}),
    "dppo_tv": ("dppo_tv", {}, {}),
    "dppo_kl": ("dppo_kl", {}, {}),
    "dppo_tv_deltas": ("dppo_tv", DELTAS, {"deltas": (0.02, 0.04)}),
    "dppo_kl_deltas": ("dppo_kl", DELTAS, {"deltas": (0.02, 0.04)}),
    "gmpo": ("gmpo", HIGHER, BOUNDS),
    "gmpo_open_below": ("gmpo", {"eps_clip": 1.0, "eps_clip_high": 0.1}, {"low": 0, "high": 1.1}),
    **{
        f"{name}_against_rollout": (name, {"ratio_anchor": "rollout"}, {"anchor": "rollout"})
        for name in ("ppo", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl", "gmpo", "vespo")
    },
    **{
        f"{name}_by_turn": (name, {"sequence_unit": "turn"}, {"by_turn": True})
        for name in ("gspo", "gmpo")
    },
}
NOT_REINFORCE_AT_RATIO_ONE = ("sft",)
INFINITE_AT_PROBABILITY_ZERO = ("reinforce", "cispo", "sft", "dis_open_below", "vespo")
OF_PROBABILITIES = [case for case in SETTINGS if case.startswith("dppo")]
"""Which need log-probs of at most 0, and have a grid of their own."""
ANCHORS = dict.fromkeys(OBJECTIVES, "old_log_probs") | {"dis": "rollout_log_probs"}

TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 3e-6, "atol": 3e-6},
    # The inputs fit into bfloat16 and the loss is computed in float32; the gradient is rounded
    # back.
    torch.bfloat16: {"rtol": 3e-6, "atol": 3e-6},
}
BFLOAT16_GRADIENT = {"rtol": 2**-8, "atol": 1e-6}


def package_objective(name: str, settings: dict, batch: PackedBatch, log_probs: Tensor) -> Outcome:
    config = PolicyLossConfig(policy_loss=name, **settings)
    return OBJECTIVES[name].function(config, *tokens_and_sums(config, batch, log_probs))


def objective_of(case: str, sequences: list[Sequence1]) -> tuple[Outcome, Tensor]:
    """The outcome of a case, and the gradient of its sum for the log-probs."""
    name, settings, _ = SETTINGS[case]
    log_probs = flat_log_probs(sequences)
    outcome = package_objective(name, settings, package_batch(sequences), log_probs)
    return outcome, torch.autograd.grad(outcome.loss.sum(), log_probs)[0]


def check(case: str, sequences: list[Sequence1], dtype: torch.dtype, batch=None) -> None:
    """Value and every element of the gradient, the tokens weighted unequally; `batch` is that of
    the sequences.
    """
    name, settings, oracle_settings = SETTINGS[case]
    expected = stacked([oracle.objective(name, s, **oracle_settings) for s in sequences])
    weights = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64)
    expected_gradient = flat_gradient((expected * weights).sum(), sequences)

    log_probs = flat_log_probs(sequences, dtype)
    batch = package_batch(sequences) if batch is None else batch
    if "anchor" in oracle_settings:  # neither ratio nor mask nor clip reads the old log-probs
        batch = replace(batch, old_log_probs=None)
    found = package_objective(name, settings, batch, log_probs)
    assert found.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (found.loss * weights).sum().backward()
    torch.testing.assert_close(found.loss.double(), expected, **TOLERANCES[dtype])
    tolerance = BFLOAT16_GRADIENT if dtype == torch.bfloat16 else TOLERANCES[dtype]
    torch.testing.assert_close(log_probs.grad.double(), expected_gradient, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", SETTINGS)
def test_random_sequences_equal_the_formula(case: str, dtype: torch.dtype) -> None:
    check(case, random_sequences(1), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", sorted(SETTINGS.keys() - {*OF_PROBABILITIES}))
def test_around_the_bounds_and_at_extreme_ratios(case: str, dtype: torch.dtype) -> None:
    """Every token of a sequence has one log-ratio, which then is that of the sequence too."""
    check(case, [grid_sequence([r], ADVANTAGES) for r in (*AROUND_BOUNDS, *EXTREMES)], dtype)


@pytest.mark.parametrize(
    "case", ["ppo_clip_higher", "ppo_dual_clip", "ppo_dual_clip_met_exactly", "cispo_lower_bound"]
)
def test_on_the_bounds_the_gradient_is_that_of_the_unclipped_side(case: str) -> None:
    grids = [grid_sequence([r], ADVANTAGES) for r in (*ON_BOUNDS, math.log(3.0), math.log(DUAL))]
    for name in (case, "gspo"):
        check(name, grids, torch.float64)
    found, gradient = objective_of(case, [grid_sequence(ON_BOUNDS, [1.0, -1.0])])
    assert not found.is_clipped.any() and (gradient != 0).all()
    if case == "ppo_dual_clip_met_exactly":
        sequence = grid_sequence([math.log(DUAL)], [-2.0])
        assert sequence.log_probs.exp().item() == DUAL
        assert objective_of(case, [sequence])[1].tolist() == [2.0 * DUAL]


@pytest.mark.parametrize(
    "name", [name for name in OF_LOG_PROBS if name not in NOT_REINFORCE_AT_RATIO_ONE]
)
def test_at_ratio_one_every_objective_has_the_gradient_of_reinforce(name: str) -> None:
    pairs = ((s, s.log_probs.tolist()) for s in random_sequences(2))
    sequences = [replace(s, old_log_probs=now, rollout_log_probs=now) for s, now in pairs]
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    package_objective(name, {}, batch, log_probs).loss.sum().backward()
    expected = -batch.advantages.double() * batch.loss_mask
    torch.testing.assert_close(log_probs.grad, expected, rtol=0, atol=1e-15)


def test_mutant_a_gradient_through_the_sequence_mean_would_be_another_one() -> None:
    """The mutant of gspo: without the stop-gradient a token gets 1/n of every token's gradient."""
    sequence = random_sequences(3)[2]
    active = sequence.active()
    ratio = oracle.mean([sequence.log_probs[t] - sequence.old_log_probs[t] for t in active]).exp()
    losses = [oracle.surrogate(ratio, sequence.advantages[t], LOW, HIGH, None) for t in active]
    mutant = flat_gradient(sum(losses), [sequence])
    assert not torch.allclose(objective_of("gspo", [sequence])[1], mutant, atol=1e-3)


PROBABILITIES = (1e-30, 1e-7, 0.02, 0.3, 0.44, 0.47, 0.6, 0.97, 1 - 1e-6, 1.0)


def probability_grid() -> Sequence1:
    """Every probability against every other, under a positive, a negative and no advantage."""
    triples = list(itertools.product(PROBABILITIES, PROBABILITIES, (1.5, -0.5, 0.0)))
    old, new = ([math.log(triple[place]) for triple in triples] for place in (0, 1))
    as_float32 = torch.tensor(new).double()
    return replace(
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
    found, _ = objective_of(case, [sequence])
    is_dropped = found.is_effectively_clipped
    assert 20 < int(is_dropped.sum()) < 120 and (found.loss[is_dropped] == 0).all()
    positive = torch.tensor(sequence.advantages) > 0
    assert ((found.log_ratio > 0) == positive)[is_dropped].all()
    assert int(found.is_clipped.sum()) > int(is_dropped.sum())


def test_deltas_that_are_not_given_are_those_of_the_help_text() -> None:
    text = fields_of(PolicyLossConfig)["dppo_delta"].help
    said = re.findall(r"([0-9.]+) (?:nats )?for (\w+)", text)
    assert {name: float(number) for number, name in said} == DPPO_DELTAS


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_gmpo_under_the_sample_mean_is_the_objective_of_its_paper(anchor: str) -> None:
    """arXiv:2507.20673 eq. 4, a product over the tokens of a sequence, with one advantage a
    sequence.
    """
    pairs = zip(random_sequences(11), (1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0), strict=True)
    sequences = [replace(s, advantages=[value] * len(s.advantages)) for s, value in pairs]
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

    clip = {"eps_clip": 1 - low, "eps_clip_high": high - 1}
    config = PolicyLossConfig(policy_loss="gmpo", ratio_anchor=anchor, **clip)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    loss, metrics = loss_of(config, batch, log_probs)
    loss.backward()
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-12, atol=1e-12)
    assert 0 < metrics["pg_clipfrac"][0] < metrics["clipped_ratio_fraction"][0]


# Mistakes, of which each must be seen.


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *((name, ANCHORS[name]) for name, row in OBJECTIVES.items() if row.ratio != "none"),
        *((name, "log_probs") for name in OF_LOG_PROBS),
    ],
)
def test_nan_at_an_active_position_reaches_loss_and_gradient(name: str, field: str) -> None:
    sequences = [grid_sequence([0.0, 0.1], [1.0, -1.0])]
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences).detach()
    values = log_probs if field == "log_probs" else getattr(batch, field)
    values[1] = torch.nan
    log_probs.requires_grad_()
    found = package_objective(name, {}, batch, log_probs)
    found.loss.sum().backward()
    assert torch.isnan(found.loss[1])
    if name not in ("sft", "reinforce"):  # whose gradients do not contain the log-prob
        assert torch.isnan(log_probs.grad[1])


def with_impossible_tokens(sequences: list[Sequence1], field: str) -> list[Sequence1]:
    """Every third log-prob of a field is -inf, under a positive, no or a negative advantage; one
    sequence has none.
    """
    found = []
    for number, sequence in enumerate(sequences):
        values = torch.as_tensor(getattr(sequence, field)).detach().double()
        count = len(values) if number else 0
        values = values.where(torch.arange(len(values)) % 3 != 0, -math.inf) if count else values
        advantages = [(1.5, 0.25, -1.0, 0.0)[t // 3 % 4] for t in range(len(values))]
        given = values.requires_grad_() if field == "log_probs" else values.tolist()
        found.append(replace(sequence, advantages=advantages, **{field: given}))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", SETTINGS)
def test_a_token_that_the_policy_cannot_sample(case: str, dtype: torch.dtype) -> None:
    """A ratio is e^-20 without gradient; a log-prob is a loss of infinity, but at an advantage
    of 0.
    """
    sequences = with_impossible_tokens(random_sequences(11), "log_probs")
    check(case, sequences, dtype)
    found, gradient = objective_of(case, sequences)
    assert not found.loss.isnan().any() and gradient.isfinite().all()
    is_finite = {case, SETTINGS[case][0]}.isdisjoint(INFINITE_AT_PROBABILITY_ZERO)
    assert found.loss.isfinite().all() == is_finite


@pytest.mark.parametrize("case", [case for case in SETTINGS if not case.endswith("_rollout")])
def test_a_token_that_the_old_policy_could_not_sample(case: str) -> None:
    """A sample refuses it; the objectives hold its ratio at e^20, without gradient."""
    clean = random_sequences(12)
    sequences = with_impossible_tokens(clean, "old_log_probs")
    pairs = zip(sequences, clean, strict=True)
    batch = package_batch([replace(s, old_log_probs=c.old_log_probs) for s, c in pairs])
    old_log_probs = torch.tensor([value for s in sequences for value in s.old_log_probs])
    check(case, sequences, torch.float64, replace(batch, old_log_probs=old_log_probs))


def test_clip_flags_and_log_ratio() -> None:
    """is_clipped: outside the range; effectively: on the side that the sign of A makes active."""
    log_ratios = (-1.0, 0.0, 1.0)
    sequence = grid_sequence(log_ratios, (-1.0, 0.0, 1.0))
    batch, log_probs = package_batch([sequence]), flat_log_probs([sequence])
    found = package_objective("ppo", {}, batch, log_probs)
    clipped = [True] * 3 + [False] * 3 + [True] * 3
    assert found.is_clipped.tolist() == clipped
    assert found.is_effectively_clipped.tolist() == [True] + [False] * 7 + [True]
    assert found.log_ratio.tolist() == [value for value in log_ratios for _ in range(3)]
    assert not found.log_ratio.requires_grad
    found = package_objective("cispo", {}, batch, log_probs)
    assert found.is_clipped.tolist() == [False] * 6 + [True] * 3
    assert package_objective("cispo", CISPO_LOWER, batch, log_probs).is_clipped.tolist() == clipped


def test_old_log_probs_are_a_constant() -> None:
    log_probs, old_log_probs = torch.zeros(2, 3, requires_grad=True).unbind()
    active = torch.ones(3, dtype=torch.bool)
    total = clipped_log_ratio(log_probs, old_log_probs, active).sum()
    assert torch.autograd.grad(total, old_log_probs, allow_unused=True) == (None,)


# A user's own loss.

seen: dict[str, Tensor] = {}


def squared_ratio_loss(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    seen.update(old=batch.old_log_probs, advantages=batch.advantages, log_probs=log_probs)
    seen.update(ref=batch.ref_log_probs, rollout=batch.rollout_log_probs)
    loss = -(batch.advantages * (log_probs - batch.old_log_probs).exp() ** 2)
    return torch.where(batch.loss_mask, loss, 1 / log_probs + 3)  # masked ones are passed over


def custom_outcome(function: str, batch: PackedBatch, log_probs: Tensor) -> Outcome:
    config = PolicyLossConfig(custom_policy_loss_path=f"{__name__}:{function}")
    return get_objective(config)(config, *tokens_and_sums(config, batch, log_probs))


def test_custom_loss_gets_masked_inputs_and_passes_no_masked_gradient() -> None:
    sequences = random_sequences(8)
    batch = package_batch(sequences)
    masked, garbage = ~batch.loss_mask, {"old_log_probs": -torch.inf, "advantages": torch.nan}
    garbage |= {"ref_log_probs": torch.nan, "rollout_log_probs": torch.inf}
    fields = {n: getattr(batch, n).masked_fill(masked, value) for n, value in garbage.items()}
    dirty = replace(batch, **fields)
    log_probs = flat_log_probs(sequences).detach().masked_fill(masked, torch.nan).requires_grad_()
    found = custom_outcome("squared_ratio_loss", dirty, log_probs)
    found.loss.sum().backward()
    assert set(seen) == {"old", "advantages", "log_probs", "ref", "rollout"}
    assert all((values[masked] == 0).all() for values in seen.values())
    ratio = (log_probs.detach() - batch.old_log_probs).exp()
    expected = torch.where(batch.loss_mask, -(batch.advantages * ratio**2), 0.0)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(log_probs.grad, 2 * expected)


def loss_without_gradient(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor):
    return -log_probs.detach()


def test_custom_loss_that_loses_the_gradient_is_refused() -> None:
    """Megatron's schedules would pass over it, and training go on without learning."""
    sequences = random_sequences(9)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    name = "loss_without_gradient"
    words = f"--custom-policy-loss-path | {name} returned a tensor without a grad"
    assert_refused(words, custom_outcome, name, batch, log_probs)
    assert not custom_outcome(name, batch, log_probs.detach()).loss.requires_grad
    with torch.no_grad():
        custom_outcome(name, batch, log_probs)


def loss_of_the_wrong_size(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor):
    return log_probs.sum()


def loss_with_metrics(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor):
    return log_probs, {"mine": 1.0}


@pytest.mark.parametrize("function", ["loss_of_the_wrong_size", "loss_with_metrics"])
def test_custom_loss_of_another_result_is_refused(function: str) -> None:
    sequences, words = random_sequences(9), "--custom-policy-loss-path | each token of this rank's"
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    assert_refused(words, custom_outcome, function, batch, log_probs)


def test_turns_are_numbered_over_samples_and_refused_out_of_order() -> None:
    def sample(turns: object) -> Sample:
        return Sample([1] * 5, 4, [1] * 4, turn_ids=turns, name="a")

    config = PolicyLossConfig(policy_loss="gspo", sequence_unit="turn")
    ids, owners = sequence_units(config, [sample([-1, -1, 3, 3]), sample([3, 3, 3, 9])])
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 2, 3] and owners.tolist() == [0, 0, 1, 1]
    assert_refused("a: turn_ids[2] is 0, less than the id before it", sample, [0, 1, 0, 1])
    assert_refused("a: turn_ids has 3 values", sample, [0, 1, 2])
    assert_refused(
        "a: turn_ids has dtype torch.float64, expected integers", sample, [0.0, 1.0, 1.0, 2.0]
    )
    assert_refused(
        "a has no turn_ids, required by --sequence-unit turn",
        MicroBatchLoss,
        resolve(config),
        pack([replace(sample(None), old_log_probs=[-1.0] * 4)]),
        None,
    )
    assert_refused(
        "--sequence-unit turn has no effect without a sum", PolicyLossConfig, sequence_unit="turn"
    )
