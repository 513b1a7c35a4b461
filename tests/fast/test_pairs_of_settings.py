"""Every two settings of the loss on together, against the float64 formulas: value, terms, gradients.

The rows are generated so that each pair of choices stands in one of them. All constants differ from each other and
from the counts of the step: where two are equal, one taken for the other is not seen.
"""

from __future__ import annotations

import dataclasses
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
from megatron_pg.loss.aggregation import Weights
from megatron_pg.loss.corrections import CORRECTIONS, Corrected, accepted_samples
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.loss.metrics import reduce_metrics
from megatron_pg.loss.policy_loss import Terms
from megatron_pg.loss.sequence import SequenceSums
from megatron_pg.loss.tokens import Tokens
from megatron_pg.step.batch import pack
from tests import oracle as step_oracle
from tests.fast import objectives_oracle as oracle
from tests.fast.objectives_oracle import Correction, Sequence1
from tests.fast.sequences import flat_gradient, flat_log_probs, package_sample, random_sequence
from tests.random_steps import uneven_totals

EPS_LOW, EPS_HIGH, DUAL = 0.06, 0.11, 1.07
DIVISOR, GRAD_DIVISOR = 3.3, 11.9
TAUS, DELTAS = (1.3, 2.9), {"dppo_delta": 0.013, "dppo_delta_high": 0.021}
KL_COEF, ENTROPY_COEF = 0.37, 0.23
SEQUENCE = (0.6, float("inf"))
GEOMETRIC, OPSM_DELTA = (0.93, 1.06), 0.04
BOUNDS = dict(zip(("geometric_rejection_low", "geometric_rejection_high"), GEOMETRIC, strict=True))
ICEPOP = {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.81, "tis_clip": 1.22}
ACCEPTED = {"rejection_denominator": "accepted"}

Settings = dict[str, Any]
FACTORS: dict[str, dict[str, Settings]] = {
    "objective": {
        **{name: {"policy_loss": name} for name in ("ppo", "gspo", "cispo", "reinforce", "sft")},
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
        **{
            name: {"loss_aggregation": name}
            for name in ("sample_mean", "prompt_mean", "token_mean")
        },
        "constant": {"loss_aggregation": "constant", "loss_aggregation_divisor": DIVISOR},
    },
    "tis": {
        "off": {},
        "token": {"use_tis": True, "tis_clip_low": 0.91, "tis_clip": 1.12},
        "sequence": {
            "use_tis": True,
            "tis_level": "sequence",
            "tis_clip_low": 0.7,
            "tis_clip": 1.4,
        },
        "geometric": {
            "use_tis": True,
            "tis_level": "geometric",
            "tis_clip_low": 0.97,
            "tis_clip": 1.03,
        },
        "mask": ICEPOP,
        "mask_sequence": {**ICEPOP, "tis_level": "sequence", "tis_clip_low": 0.4, "tis_clip": 2.6},
        "mask_accepted": {**ICEPOP, **ACCEPTED},
    },
    "geometric": {
        "off": {},
        "on": {"use_geometric_rejection": True, **BOUNDS},
        "sequence": {
            "use_sequence_rejection": True,
            "sequence_rejection_low": SEQUENCE[0],
            "sequence_rejection_high": SEQUENCE[1],
        },
        "on_accepted": {"use_geometric_rejection": True, **BOUNDS, **ACCEPTED},
    },
    "opsm": {"off": {}, "on": {"use_opsm": True, "opsm_delta": OPSM_DELTA}},
    "kl": {
        "off": {},
        **{
            name: {"kl_loss_coef": KL_COEF, "kl_loss_type": name}
            for name in ("k1", "k2", "k3", "low_var_kl")
        },
        "unbiased": {"kl_loss_coef": KL_COEF, "kl_loss_type": "k2", "use_unbiased_kl": True},
        "gradient_of_k2": {"kl_loss_coef": KL_COEF, "kl_loss_type": "k3", "kl_loss_gradient": "k2"},
        "by_the_loss": {"kl_loss_coef": KL_COEF, "regularizer_aggregation": "loss"},
    },
    "entropy": {
        "off": {},
        "on": {"entropy_coef": ENTROPY_COEF},
        "by_the_loss": {"entropy_coef": ENTROPY_COEF, "regularizer_aggregation": "loss"},
    },
    "grad_divisor": {"off": {}, "on": {"grad_divisor": GRAD_DIVISOR}},
    "metrics": {"basic": {}, "none": {"pg_metrics": "none"}},
}
"""The settings by factor and choice; the first choice of each is what the config has by itself, or as good as it."""

WITHOUT_CLIP = ("reinforce", "sft", "sapo", "dppo_tv", "dppo_kl")
CORRECTING = ("clip", "tis", "geometric", "opsm", "kl", "entropy", "grad_divisor")
"""Factors whose first choice is off."""

Row = dict[str, str]
"""A choice for every factor."""
Choice = tuple[str, str]


DEFAULTS = {factor: next(iter(by_name)) for factor, by_name in FACTORS.items()}


def settings_of(row: Row) -> Settings:
    return {
        name: value
        for factor, choice in row.items()
        for name, value in FACTORS[factor][choice].items()
    }


def is_legal(row: Row) -> bool:
    """Whether the config takes the choices together; factors without a choice stay at their defaults."""
    if row.get("clip", "off") != "off" and row.get("objective") in WITHOUT_CLIP:
        return False  # --eps-clip has a default and is passed over there
    try:
        PolicyLossConfig(**settings_of(row))
    except ValueError:
        return False
    return True


def choices() -> list[Choice]:
    return [(factor, choice) for factor, by_name in FACTORS.items() for choice in by_name]


def legal_pairs() -> set[frozenset[Choice]]:
    pairs = itertools.combinations(choices(), 2)
    return {frozenset(pair) for pair in pairs if pair[0][0] != pair[1][0] and _is_legal_pair(pair)}


def _is_legal_pair(pair: tuple[Choice, Choice]) -> bool:
    """Some choices need a third: the clip of another objective, say."""
    row = dict(pair)
    others = [{"objective": name} for name in FACTORS["objective"] if "objective" not in row]
    return any(is_legal(row | other) for other in [{}, *others])


def pairs_of(row: Row) -> set[frozenset[Choice]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


@functools.cache
def rows() -> tuple[Row, ...]:
    """Rows that hold every legal pair: each begins with a pair not held yet, and takes what holds most others."""
    missing, found = legal_pairs(), []
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
    """Nine responses: kept or rejected by geometric rejection, by OPSM, by both; one masked, one of no token."""
    made = [random_sequence(40 + n, n, spread=SPREAD) for n in LENGTHS]
    return [*made, random_sequence(3, 3, active_rate=0.0)]


LENGTHS, SPREAD = (7, 1, 12, 0, 5, 9, 6, 8), 0.4
GROUPS = (0, 0, 1, 1, 1, 2, 2, 2, 2)
ROLLOUTS = (None, None, 5, 5, None, None, None, None, None)


@dataclass
class Outcome:
    """A loss, the terms that it reports, and its gradient for log-probs and entropy, [tokens] each."""

    loss: Tensor
    reported: dict[str, float]
    gradient: Tensor
    entropy_gradient: Tensor

    def differs(self, other: Outcome) -> bool:
        pairs = ((self.gradient, other.gradient), (self.entropy_gradient, other.entropy_gradient))
        return any(not torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in pairs)


def entropies(count: int) -> Tensor:
    return torch.linspace(0.3, 2.1, count, dtype=torch.float64).requires_grad_()


def expected(settings: Settings) -> Outcome:
    """By the formulas, token by token."""
    return _expected(PolicyLossConfig(**settings))


@functools.cache
def _expected(config: PolicyLossConfig) -> Outcome:
    get = dataclasses.asdict(config)
    tis = None
    if get["use_tis"]:
        tis = get["tis_level"]
        if get["tis_mode"] == "mask":
            tis = {"token": "mask", "sequence": "sequence_mask", "geometric": "geometric_mask"}[tis]
    correction = Correction(
        tis,
        get["tis_clip_low"],
        get["tis_clip"],
        geometric=GEOMETRIC if get["use_geometric_rejection"] else None,
        sequence=SEQUENCE if get["use_sequence_rejection"] else None,
        opsm_delta=OPSM_DELTA if get["use_opsm"] else None,
        anchor=get["ratio_anchor"],
    )
    clip = {
        "low": 1 - get["eps_clip"],
        "high": 1 + (get["eps_clip_high"] or get["eps_clip"]),
        "dual": get["eps_clip_c"],
        "cispo_lower_bound": get["cispo_lower_bound"],
        "taus": TAUS,
        "deltas": tuple(DELTAS.values()),
        "anchor": get["ratio_anchor"],
    }
    drawn = step = sequences()
    if get["rejection_denominator"] == "accepted":
        zeros = [[oracle.ZERO] * len(s.loss_mask) for s in step]
        masks = [oracle.correct(s, z, correction)[1] for s, z in zip(step, zeros, strict=True)]
        step = [replace(s, loss_mask=mask) for s, mask in zip(step, masks, strict=True)]
    losses = [
        oracle.correct(s, oracle.objective(get["policy_loss"], s, **clip), correction)[0]
        for s in step
    ]
    entropy = entropies(sum(len(s.loss_mask) for s in step))
    of_sample = entropy.split([len(s.loss_mask) for s in step])
    plain = [
        step_oracle.PlainSample(
            [0] * (len(s.loss_mask) + 2), len(s.loss_mask), s.loss_mask, s.advantages, s.old_log_probs,
            group_index=group, rollout_id=rollout,
        )
        for s, group, rollout in zip(step, GROUPS, ROLLOUTS, strict=True)
    ]  # fmt: skip
    aggregation = get["loss_aggregation"]
    divisor, is_whole = get["loss_aggregation_divisor"], get["regularizer_aggregation"] == "loss"
    pg = step_oracle.aggregate(plain, losses, aggregation, divisor)

    def regularizer(values: Any) -> Tensor:
        return step_oracle.aggregate(
            plain, values, aggregation if is_whole else "sample_mean", divisor
        )

    reported, penalty = {"pg_loss": pg}, torch.zeros((), dtype=torch.float64)
    if get["kl_loss_coef"]:
        kind = {
            "unbiased": get["use_unbiased_kl"],
            "anchor": get["ratio_anchor"],
            "gradient_of_k2": get["kl_loss_gradient"] == "k2",
        }
        kl = [oracle.kl(s, get["kl_loss_type"], **kind) for s in step]
        reported["kl_loss"] = regularizer(kl)
        penalty = penalty + get["kl_loss_coef"] * reported["kl_loss"]
    if get["entropy_coef"]:
        reported["entropy_loss"] = regularizer(of_sample)
        penalty = penalty - get["entropy_coef"] * reported["entropy_loss"]
    loss = pg + penalty
    reported["loss"] = loss
    if get["grad_divisor"]:
        factor = step_oracle.outer_count(plain, aggregation) / get["grad_divisor"]
        loss = (pg + penalty) * factor if is_whole else pg * factor + penalty
    (entropy_gradient,) = torch.autograd.grad(
        loss, [entropy], allow_unused=True, retain_graph=True, materialize_grads=True
    )
    numbers = {name: value.item() for name, value in reported.items()}
    return Outcome(loss.detach(), numbers, flat_gradient(loss, drawn), entropy_gradient)


def found(settings: Settings) -> Outcome:
    """By the package."""
    config = PolicyLossConfig(**settings)
    drawn = sequences()
    samples = [
        package_sample(s, group_index=group, rollout_id=rollout)
        for s, group, rollout in zip(drawn, GROUPS, ROLLOUTS, strict=True)
    ]
    samples = accepted_samples(config, samples)
    log_probs = flat_log_probs(drawn)
    entropy = entropies(log_probs.numel())
    loss, metrics = policy_loss_from_log_probs(
        config, pack(samples), log_probs, entropy, totals=uneven_totals(samples)
    )
    gradients = torch.autograd.grad(
        loss, [log_probs, entropy], allow_unused=True, materialize_grads=True
    )
    reported = reduce_metrics(config, [metrics], contributes=True, device="cpu")
    return Outcome(loss.detach(), reported, *gradients)


def check(settings: Settings) -> None:
    right, ours = expected(settings), found(settings)
    tolerance = {"rtol": 3e-6, "atol": 1e-7}
    torch.testing.assert_close(ours.loss, right.loss, **tolerance)
    torch.testing.assert_close(ours.gradient, right.gradient, **tolerance)
    torch.testing.assert_close(ours.entropy_gradient, right.entropy_gradient, **tolerance)
    assert {name: ours.reported[name] for name in right.reported} == pytest.approx(
        right.reported, rel=3e-6, abs=1e-7
    )
    assert ours.reported["aggregation_checksum"] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("number", range(len(rows())))
def test_two_settings_together_equal_the_formulas(number: int) -> None:
    check(settings_of(rows()[number]))


def test_the_rows_hold_every_pair_that_the_config_takes() -> None:
    held = set().union(*map(pairs_of, rows()))
    every = {frozenset(pair) for pair in itertools.combinations(choices(), 2)}
    refused = {pair for pair in every - held if len({factor for factor, _ in pair}) == 2}
    assert {tuple(sorted(pair)) for pair in refused} == set(REFUSED)


REFUSED = (
    *[(("clip", "dual"), ("objective", name)) for name in ("cispo", "gmpo", *WITHOUT_CLIP)],
    *[(("clip", "cispo_low"), ("objective", n)) for n in ("ppo", "gspo", "gmpo", *WITHOUT_CLIP)],
    *[(("clip", "both"), ("objective", name)) for name in WITHOUT_CLIP],
    *[(("anchor", "rollout"), ("tis", tis)) for tis in FACTORS["tis"] if tis != "off"],
    *[(("anchor", "rollout"), ("objective", name)) for name in ("reinforce", "sft")],
    *[
        (("geometric", "on_accepted"), ("tis", tis))
        for tis in ("mask", "mask_accepted", "mask_sequence")
    ],
    *[(("geometric", kind), ("tis", "mask_accepted")) for kind in ("on", "sequence")],
    (("geometric", "on_accepted"), ("opsm", "on")),
    (("opsm", "on"), ("tis", "mask_accepted")),
)
"""The pairs that it refuses, as its messages say."""


def both_tell(row: Row, pair: frozenset[Choice]) -> bool:
    """Whether the gradients are others without the one choice, and without the other."""
    right = expected(settings_of(row))
    return all(expected(settings_of(row | {each: "off"})).differs(right) for each, _ in pair)


@pytest.mark.parametrize("factor", CORRECTING)
def test_both_settings_of_a_pair_tell(factor: str) -> None:
    """A row in which one of them changes nothing says nothing of the two together; then they are tried by themselves."""
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
            check(settings_of(row))


# Mistakes that no setting alone shows.


def last_rejection_decides(
    config: PolicyLossConfig, tokens: Tokens, loss: Tensor, sums: SequenceSums
) -> Corrected:
    """The mask of one correction takes the place of another's."""
    kept, found = tokens.loss_mask, corrections_of(config, tokens, loss, sums)
    for row in CORRECTIONS.rows_on(config):
        loss, kept, _ = row.function(config, tokens, sums, loss)
    return found._replace(loss=torch.where(kept, loss, 0.0), loss_mask=kept)


def rejection_forgets_weights(
    config: PolicyLossConfig, tokens: Tokens, loss: Tensor, sums: SequenceSums
) -> Corrected:
    """A rejection begins with the loss that no weight has touched."""
    found = corrections_of(config, tokens, loss, sums)
    if len(CORRECTIONS.rows_on(config)) < 2:
        return found
    return found._replace(loss=torch.where(found.loss_mask, loss, 0.0))


def divisor_of_all_terms(
    config: PolicyLossConfig, tokens: Tokens, weights: Weights, *others: Any
) -> Terms:
    """`grad_divisor` divides the KL and entropy terms too."""
    terms = terms_of(config, tokens, weights, *others)
    if config.grad_divisor is None:
        return terms
    loss = terms.reported["loss"] * float(weights.outer_count) / config.grad_divisor
    return replace(terms, loss=loss)


def divisor_of_none(config: PolicyLossConfig, *others: Any) -> Terms:
    """`grad_divisor` takes the KL and entropy terms away."""
    terms = terms_of(config, *others)
    if config.grad_divisor is None:
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
def test_mistakes_in_pairs_are_caught(
    mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*MUTANTS[mutant], mutant)

    def fails(row: Row) -> bool:
        try:
            check(settings_of(row))
        except AssertionError:
            return True
        return False

    assert any(map(fails, rows()))
    for factor in CORRECTING:
        for choice in FACTORS[factor]:
            if is_legal(DEFAULTS | {factor: choice}):
                check(settings_of(DEFAULTS | {factor: choice}))  # where one is on, nothing shows
