"""Every two settings of the loss on together, against the float64 formulas: value, terms,
gradients.

The rows are generated so that each pair of choices stands in one of them. All constants differ from
each other and from the counts of the step: where two are equal, one taken for the other is not
seen.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss import micro_batch, policy_loss
from megatron_pg.loss.corrections import accepted_samples
from megatron_pg.step.batch import pack
from tests import oracle as step_oracle
from tests.fast import objectives_oracle as oracle
from tests.fast.objectives_oracle import Correction, Sequence1
from tests.fast.one_step import loss_of, reported
from tests.fast.sequences import flat_gradient, flat_log_probs, package_sample, random_sequence
from tests.oracle import PlainSample
from tests.random_steps import plain_sample

EPS_LOW, EPS_HIGH, DUAL = 0.06, 0.11, 1.07
DIVISOR, GRAD_DIVISOR = 3.3, 11.9
TAUS, DELTAS = (1.3, 2.9), {"dppo_delta": 0.013, "dppo_delta_high": 0.021}
KL_COEF, ENTROPY_COEF = 0.37, 0.23
SEQUENCE = (0.6, float("inf"))
GEOMETRIC, OPSM_DELTA = (0.93, 1.06), 0.04
ACCEPTED = {"rejection_denominator": "accepted"}
MEANS = ("sample_mean", "prompt_mean", "token_mean")
KL, ENTROPY = {"kl_loss_coef": KL_COEF}, {"entropy_coef": ENTROPY_COEF}
BY_THE_LOSS = {"regularizer_aggregation": "loss"}
Settings = dict[str, Any]


def tis(low: float, high: float, **others: str) -> Settings:
    return {"use_tis": True, "tis_clip_low": low, "tis_clip": high, **others}


def rejection(level: str, low: float, high: float) -> Settings:
    bounds = {f"{level}_rejection_low": low, f"{level}_rejection_high": high}
    return {f"use_{level}_rejection": True, **bounds}


FACTORS: dict[str, dict[str, Settings]] = {
    "objective": {
        **{name: {"policy_loss": name} for name in ("ppo", "gspo", "cispo", "reinforce", "sft")},
        **{name: {"policy_loss": name} for name in ("dis", "vespo")},
        "sapo": {"policy_loss": "sapo", "sapo_tau_pos": TAUS[0], "sapo_tau_neg": TAUS[1]},
        **{name: {"policy_loss": name, **DELTAS} for name in ("dppo_tv", "dppo_kl")},
        "gmpo": {"policy_loss": "gmpo"},
    },
    "anchor": {"old": {}, "rollout": {"ratio_anchor": "rollout"}},
    "clip": {
        "off": {},
        "both": {"eps_clip": EPS_LOW, "eps_clip_high": EPS_HIGH},
        "dual": {"eps_clip_c": DUAL},
        "cispo_low": {"cispo_lower_bound": True},
    },
    "aggregation": {
        **{name: {"loss_aggregation": name} for name in MEANS},
        "constant": {"loss_aggregation": "constant", "loss_aggregation_divisor": DIVISOR},
    },
    "tis": {
        "off": {},
        "token": tis(0.91, 1.12),
        "sequence": tis(0.7, 1.4, tis_level="sequence"),
        "geometric": tis(0.97, 1.03, tis_level="geometric"),
        "mask": tis(0.81, 1.22, tis_mode="mask"),
        "mask_sequence": tis(0.4, 2.6, tis_mode="mask", tis_level="sequence"),
        "mask_accepted": tis(0.81, 1.22, tis_mode="mask", **ACCEPTED),
    },
    "geometric": {
        "off": {},
        "on": rejection("geometric", *GEOMETRIC),
        "sequence": rejection("sequence", *SEQUENCE),
        "on_accepted": {**rejection("geometric", *GEOMETRIC), **ACCEPTED},
    },
    "opsm": {"off": {}, "on": {"use_opsm": True, "opsm_delta": OPSM_DELTA}},
    "kl": {
        "off": {},
        **{name: {**KL, "kl_loss_type": name} for name in oracle.KL_ESTIMATES},
        "unbiased": {**KL, "kl_loss_type": "k2", "use_unbiased_kl": True},
        "gradient_of_k2": {**KL, "kl_loss_type": "k3", "kl_loss_gradient": "k2"},
        "by_the_loss": {**KL, **BY_THE_LOSS},
    },
    "entropy": {"off": {}, "on": ENTROPY, "by_the_loss": {**ENTROPY, **BY_THE_LOSS}},
    "grad_divisor": {"off": {}, "on": {"grad_divisor": GRAD_DIVISOR}},
    "metrics": {"basic": {}, "none": {"pg_metrics": "none"}},
}
"""The settings by factor and choice; the first choice of each is what the config has by itself, or
as good as it."""

WITHOUT_CLIP = ("reinforce", "sft", "sapo", "dppo_tv", "dppo_kl", "vespo")
CORRECTING = ("clip", "tis", "geometric", "opsm", "kl", "entropy", "grad_divisor")
"""Factors whose first choice is off."""

Row = dict[str, str]
"""A choice for every factor."""
Choice = tuple[str, str]
DEFAULTS = {factor: next(iter(by_name)) for factor, by_name in FACTORS.items()}
CHOICES = [(factor, choice) for factor, by_name in FACTORS.items() for choice in by_name]


def config_of(row: Row) -> PolicyLossConfig:
    settings: Settings = {}
    for factor, choice in row.items():
        settings |= FACTORS[factor][choice]
    return PolicyLossConfig(**settings)


def is_legal(row: Row) -> bool:
    """Whether the config takes the choices together; factors without a choice stay at their
    defaults.
    """
    if row.get("clip", "off") != "off" and row.get("objective") in WITHOUT_CLIP:
        return False  # --eps-clip has a default and is passed over there
    try:
        config_of(row)
    except ValueError:
        return False
    return True


@functools.cache
def legal_pairs() -> frozenset[frozenset[Choice]]:
    """Some choices need a third: the clip of another objective, say."""
    found = set()
    for pair in itertools.combinations(CHOICES, 2):
        row = dict(pair)
        others = [{"objective": name} for name in FACTORS["objective"] if "objective" not in row]
        if len(row) == 2 and any(is_legal(row | other) for other in [{}, *others]):
            found.add(frozenset(pair))
    return frozenset(found)


def pairs_of(row: Row) -> set[frozenset[Choice]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


@functools.cache
def rows() -> tuple[Row, ...]:
    """Rows that hold every legal pair: each begins with a pair not held yet, and takes what holds
    most others.
    """
    missing, found = set(legal_pairs()), []
    while missing:
        row: Row = dict(sorted(min(missing, key=sorted)))
        for factor in FACTORS:
            if factor not in row:
                legal = [{**row, factor: choice} for choice in FACTORS[factor]]
                legal = [each for each in legal if is_legal(each)]
                row = max(legal, key=lambda each: len(pairs_of(each) & missing))
        found.append({factor: row[factor] for factor in FACTORS})
        missing -= pairs_of(row)
    return tuple(found)


# The step, and what it comes to.


def sequences() -> list[Sequence1]:
    """Nine responses: kept or rejected by geometric rejection, by OPSM, by both; one masked, one of
    no token.
    """
    made = [random_sequence(40 + n, n, spread=SPREAD) for n in LENGTHS]
    return [*made, random_sequence(3, 3, active_rate=0.0)]


LENGTHS, SPREAD = (7, 1, 12, 0, 5, 9, 6, 8), 0.4
GROUPS = (0, 0, 1, 1, 1, 2, 2, 2, 2)
ROLLOUTS = (None, None, 5, 5, None, None, None, None, None)


@dataclass
class Outcome:
    """A loss, the terms that it reports, and its gradient for log-probs and entropy, [tokens]
    each.
    """

    loss: Tensor
    reported: dict[str, float]
    gradient: Tensor
    entropy_gradient: Tensor

    def differs(self, other: Outcome) -> bool:
        pairs = ((self.gradient, other.gradient), (self.entropy_gradient, other.entropy_gradient))
        return any(not torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in pairs)


def entropies(count: int) -> Tensor:
    return torch.linspace(0.3, 2.1, count, dtype=torch.float64).requires_grad_()


@functools.cache
def expected(config: PolicyLossConfig) -> Outcome:
    """By the formulas, token by token."""
    kind = config.tis_level if config.use_tis else None
    if config.use_tis and config.tis_mode == "mask":
        kind = "mask" if kind == "token" else f"{kind}_mask"
    correction = Correction(
        kind,
        config.tis_clip_low,
        config.tis_clip,
        geometric=GEOMETRIC if config.use_geometric_rejection else None,
        sequence=SEQUENCE if config.use_sequence_rejection else None,
        opsm_delta=OPSM_DELTA if config.use_opsm else None,
        anchor=config.ratio_anchor,
    )
    clip = {
        "low": 1 - config.eps_clip,
        "high": 1 + (config.eps_clip_high or config.eps_clip),
        "dual": config.eps_clip_c,
        "cispo_lower_bound": config.cispo_lower_bound,
        "taus": TAUS,
        "deltas": tuple(DELTAS.values()),
        "anchor": config.ratio_anchor,
    }
    step = sequences()
    pg_losses = [oracle.objective(config.policy_loss, s, **clip) for s in step]
    corrected = [oracle.correct(s, x, correction) for s, x in zip(step, pg_losses, strict=True)]
    losses = [loss for loss, _ in corrected]
    lengths = [len(s.loss_mask) for s in step]
    entropy = entropies(sum(lengths))

    def of_masks(masks: Any) -> list[PlainSample]:
        ids = zip(masks, GROUPS, ROLLOUTS, strict=True)
        return [plain_sample(mask, group=group, rollout=rollout) for mask, group, rollout in ids]

    # KL and entropy are of the tokens that were active before any rejection, whatever the policy
    # loss is divided by.
    plain = accepted = of_masks([s.loss_mask for s in step])
    if config.rejection_denominator == "accepted":
        accepted = of_masks([mask for _, mask in corrected])
    aggregation, divisor = config.loss_aggregation, config.loss_aggregation_divisor
    is_whole = config.regularizer_aggregation == "loss"

    def regularizer(values: Any) -> Tensor:
        mode = aggregation if is_whole else "sample_mean"
        return step_oracle.aggregate(plain, values, mode, divisor)

    pg = step_oracle.aggregate(accepted, losses, aggregation, divisor)
    terms, penalty = {"pg_loss": pg}, torch.zeros((), dtype=torch.float64)
    if config.kl_loss_coef:
        options = {"unbiased": config.use_unbiased_kl, "anchor": config.ratio_anchor}
        options["gradient_of_k2"] = config.kl_loss_gradient == "k2"
        terms["kl_loss"] = regularizer([oracle.kl(s, config.kl_loss_type, **options) for s in step])
        penalty = penalty + config.kl_loss_coef * terms["kl_loss"]
    if config.entropy_coef:
        terms["entropy_loss"] = regularizer(entropy.split(lengths))
        penalty = penalty - config.entropy_coef * terms["entropy_loss"]
    loss = terms["loss"] = pg + penalty
    if config.grad_divisor:
        own, others = (step_oracle.outer_count(x, aggregation) for x in (accepted, plain))
        factor = others if is_whole else config.grad_divisor
        loss = (pg * own + penalty * factor) / config.grad_divisor
    options = {"allow_unused": True, "retain_graph": True, "materialize_grads": True}
    (entropy_gradient,) = torch.autograd.grad(loss, [entropy], **options)
    numbers = {name: value.item() for name, value in terms.items()}
    return Outcome(loss.detach(), numbers, flat_gradient(loss, step), entropy_gradient)


def found(config: PolicyLossConfig) -> Outcome:
    """By the package."""
    drawn = sequences()
    ids = zip(drawn, GROUPS, ROLLOUTS, strict=True)
    samples = [package_sample(s, group_index=g, rollout_id=rollout) for s, g, rollout in ids]
    batch, log_probs = pack(accepted_samples(config, samples)), flat_log_probs(drawn)
    leaves = [log_probs, entropies(log_probs.numel())]
    loss, metrics = loss_of(config, batch, *leaves)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return Outcome(loss.detach(), reported(config, metrics), *gradients)


def check(config: PolicyLossConfig) -> None:
    right, ours = expected(config), found(config)
    tolerance = {"rtol": 3e-6, "atol": 1e-7}
    torch.testing.assert_close(ours.loss, right.loss, **tolerance)
    torch.testing.assert_close(ours.gradient, right.gradient, **tolerance)
    torch.testing.assert_close(ours.entropy_gradient, right.entropy_gradient, **tolerance)
    terms = {name: ours.reported[name] for name in right.reported}
    assert terms == pytest.approx(right.reported, rel=3e-6, abs=1e-7)
    assert ours.reported["aggregation_checksum"] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("number", range(len(rows())))
def test_two_settings_together_equal_the_formulas(number: int) -> None:
    check(config_of(rows()[number]))


def test_the_rows_hold_every_pair_that_the_config_takes() -> None:
    held = set().union(*map(pairs_of, rows()))
    every = {frozenset(pair) for pair in itertools.combinations(CHOICES, 2)}
    refused = {pair for pair in every - held if len({factor for factor, _ in pair}) == 2}
    assert {tuple(sorted(pair)) for pair in refused} == set(REFUSED)


MASKS = ("mask", "mask_accepted", "mask_sequence")
REFUSED = (
    *[(("clip", "dual"), ("objective", name)) for name in ("cispo", "gmpo", "dis", *WITHOUT_CLIP)],
    *[
        (("clip", "cispo_low"), ("objective", n))
        for n in ("ppo", "gspo", "gmpo", "dis", *WITHOUT_CLIP)
    ],
    *[(("clip", "both"), ("objective", name)) for name in WITHOUT_CLIP],
    *[(("anchor", "rollout"), ("tis", tis)) for tis in FACTORS["tis"] if tis != "off"],
    *[(("objective", "dis"), ("tis", tis)) for tis in FACTORS["tis"] if tis != "off"],
    *[(("anchor", "rollout"), ("objective", name)) for name in ("reinforce", "sft", "dis")],
    *[(("geometric", "on_accepted"), ("tis", tis)) for tis in MASKS],
    *[(("geometric", kind), ("tis", "mask_accepted")) for kind in ("on", "sequence")],
    (("geometric", "on_accepted"), ("opsm", "on")),
    (("opsm", "on"), ("tis", "mask_accepted")),
)
"""The pairs that it refuses, as its messages say."""


def both_tell(row: Row, pair: frozenset[Choice]) -> bool:
    """Whether the gradients are others without the one choice, and without the other."""
    right = expected(config_of(row))
    return all(expected(config_of(row | {each: "off"})).differs(right) for each, _ in pair)


@pytest.mark.parametrize("factor", CORRECTING)
def test_both_settings_of_a_pair_tell(factor: str) -> None:
    """A row in which one of them changes nothing says nothing of the two together; then they are
    tried by themselves.
    """
    pairs = {
        frozenset([(factor, choice), (other, second)])
        for choice in FACTORS[factor]
        for other in CORRECTING[CORRECTING.index(factor) + 1 :]
        for second in FACTORS[other]
        if "off" not in (choice, second)
    }
    for pair in pairs & legal_pairs():
        if not any(pair <= row.items() and both_tell(row, pair) for row in rows()):
            alone = [DEFAULTS | dict(pair) | {"objective": name} for name in FACTORS["objective"]]
            row = next(each for each in alone if is_legal(each) and both_tell(each, pair))
            check(config_of(row))


# Mistakes that no setting alone shows.


def last_rejection_decides(config, tokens, loss, sums, rows):
    """The mask of one correction takes the place of another's."""
    kept, found = tokens.loss_mask, corrections_of(config, tokens, loss, sums, rows)
    for row in rows:
        loss, kept, _ = row.function(config, tokens, sums, loss)
    return found._replace(loss=torch.where(kept, loss, 0.0), loss_mask=kept)


def rejection_forgets_weights(config, tokens, loss, sums, rows):
    """A rejection begins with the loss that no weight has touched."""
    found = corrections_of(config, tokens, loss, sums, rows)
    if len(rows) < 2:
        return found
    return found._replace(loss=torch.where(found.loss_mask, loss, 0.0))


def divisor_of_all_terms(resolved, tokens, weights, *others):
    """`grad_divisor` divides the KL and entropy terms too."""
    terms, divisor = terms_of(resolved, tokens, weights, *others), resolved.config.grad_divisor
    if divisor is None:
        return terms
    loss = terms.reported["loss"] * float(weights.outer_count) / divisor
    return replace(terms, loss=loss)


def divisor_of_none(resolved, *others):
    """`grad_divisor` takes the KL and entropy terms away."""
    terms = terms_of(resolved, *others)
    if resolved.config.grad_divisor is None:
        return terms
    penalty = terms.reported["loss"] - terms.reported["pg_loss"]
    return replace(terms, loss=terms.loss - penalty)


corrections_of, terms_of = policy_loss.apply_corrections, micro_batch.policy_loss
MUTANTS: dict[Callable[..., Any], tuple[Any, str]] = {
    last_rejection_decides: (policy_loss, "apply_corrections"),
    rejection_forgets_weights: (policy_loss, "apply_corrections"),
    divisor_of_all_terms: (micro_batch, "policy_loss"),
    divisor_of_none: (micro_batch, "policy_loss"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_in_pairs_are_caught(mutant, monkeypatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant], mutant)

    def fails(row: Row) -> bool:
        try:
            check(config_of(row))
        except AssertionError:
            return True
        return False

    assert any(map(fails, rows()))
    alone = [DEFAULTS | {factor: choice} for factor, choice in CHOICES if factor in CORRECTING]
    for row in filter(is_legal, alone):
        check(config_of(row))  # where one is on, nothing shows
