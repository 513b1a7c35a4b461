"""The settings of the loss by factor and choice, random combinations, and rows with every pair.

All constants differ from each other and from the counts of a step: where two are equal, one taken
for the other is not seen.
"""

import functools
import itertools
import random
from typing import Any

from megatron_pg import PolicyLossConfig
from megatron_pg.config.tables import TABLES, rows_on

Settings = dict[str, Any]
ACCEPTED = {"rejection_denominator": "accepted"}
KL, ENTROPY = {"kl_loss_coef": 0.37}, {"entropy_coef": 0.23}
BY_THE_LOSS = {"regularizer_aggregation": "loss"}
DELTAS = {"dppo_delta": 0.013, "dppo_delta_high": 0.021}


def half_of_likely_tokens(config, batch, log_probs, pg_loss):
    """A user's correction."""
    return pg_loss / 2, log_probs > -1.5


def tis(low: float, high: float, **others: str) -> Settings:
    return {"use_tis": True, "tis_clip_low": low, "tis_clip": high, **others}


def rejection(level: str, low: float, high: float) -> Settings:
    bounds = {f"{level}_rejection_low": low, f"{level}_rejection_high": high}
    return {f"use_{level}_rejection": True, **bounds}


FACTORS: dict[str, dict[str, Settings]] = {
    "objective": {
        **{
            name: {"policy_loss": name}
            for name in ("ppo", "gspo", "cispo", "reinforce", "sft", "dis", "vespo", "gmpo")
        },
        "sapo": {"policy_loss": "sapo", "sapo_tau_pos": 1.3, "sapo_tau_neg": 2.9},
        **{name: {"policy_loss": name, **DELTAS} for name in ("dppo_tv", "dppo_kl")},
    },
    "anchor": {"old": {}, "rollout": {"ratio_anchor": "rollout"}},
    "clip": {
        "off": {},
        "both": {"eps_clip": 0.06, "eps_clip_high": 0.11},
        "dual": {"eps_clip_c": 1.07},
        "cispo_low": {"cispo_lower_bound": True},
    },
    "aggregation": {
        **{name: {"loss_aggregation": name} for name in ("sample_mean", "prompt_mean")},
        "token_mean": {"loss_aggregation": "token_mean"},
        "constant": {"loss_aggregation": "constant", "loss_aggregation_divisor": 3.3},
    },
    "tis": {
        "off": {},
        "token": tis(0.91, 1.12),
        "sequence": tis(0.7, 1.4, tis_level="sequence"),
        "geometric": tis(0.97, 1.03, tis_level="geometric"),
        "mask": tis(0.81, 1.22, tis_mode="mask"),
        "mask_sequence": tis(0.6, 1.7, tis_mode="mask", tis_level="sequence"),
        "mask_geometric": tis(0.94, 1.07, tis_mode="mask", tis_level="geometric"),
        "mask_accepted": tis(0.81, 1.22, tis_mode="mask", **ACCEPTED),
        "custom": {
            "use_tis": True,
            "custom_tis_function_path": f"{__name__}:half_of_likely_tokens",
        },
    },
    "rejection": {
        "off": {},
        "geometric": rejection("geometric", 0.93, 1.06),
        "sequence": rejection("sequence", 0.6, float("inf")),
        "geometric_accepted": {**rejection("geometric", 0.93, 1.06), **ACCEPTED},
    },
    "opsm": {"off": {}, "on": {"use_opsm": True, "opsm_delta": 0.04}},
    "kl": {
        "off": {},
        **{name: {**KL, "kl_loss_type": name} for name in ("k1", "k2", "k3", "low_var_kl")},
        "unbiased": {**KL, "kl_loss_type": "k2", "use_unbiased_kl": True},
        "gradient_of_k2": {**KL, "kl_loss_type": "k3", "kl_loss_gradient": "k2"},
        "by_the_loss": {**KL, **BY_THE_LOSS},
    },
    "entropy": {"off": {}, "on": ENTROPY, "by_the_loss": {**ENTROPY, **BY_THE_LOSS}},
    "divisor": {
        "off": {},
        "given": {"grad_divisor": 11.9},
        "twice": {"divide_gradient_twice": True},
    },
    "unit": {"sequence": {}, "turn": {"sequence_unit": "turn"}},
    "weights": {"mask": {}, "weights": {"loss_weight_denominator": "weights"}},
    "temperature": {"1": {}, "0.7": {"rollout_temperature": 0.7}},
    "sets": {"off": {}, "on": {"replay_sampling_set": True, "kept_set_mass": True}},
    "metrics": {
        "basic": {},
        "none": {"pg_metrics": "none"},
        "with_entropy": {"pg_metrics": "with_entropy"},
    },
}
"""The first choice of each factor is what the config has by itself, or as good as it."""
WITHOUT_CLIP = ("reinforce", "sft", "sapo", "dppo_tv", "dppo_kl", "vespo")
"""Objectives for which --eps-clip has a default and is passed over."""

Row = dict[str, str]
"""A choice by factor."""
Choice = tuple[str, str]
CHOICES = [(factor, choice) for factor, by_name in FACTORS.items() for choice in by_name]
DEFAULTS = {factor: next(iter(by_name)) for factor, by_name in FACTORS.items()}


@functools.cache
def _config(choices: tuple[Choice, ...]) -> PolicyLossConfig | None:
    row, settings = dict(choices), Settings()
    if row.get("clip", "off") != "off" and row.get("objective") in WITHOUT_CLIP:
        return None
    for factor, choice in choices:
        settings |= FACTORS[factor][choice]
    try:
        return PolicyLossConfig(**settings)
    except ValueError:
        return None


def config_of(row: Row) -> PolicyLossConfig:
    config = _config(tuple(row.items()))
    if config is None:  # no AssertionError, for which a mutant would count as rejected
        raise ValueError(f"the config refuses {row}")
    return config


def is_legal(row: Row) -> bool:
    """Whether the config takes the choices together; factors without a choice stay at their
    defaults.
    """
    return _config(tuple(row.items())) is not None


def random_row(rng: random.Random, **given: str) -> Row:
    """A choice for every factor, off half of the time; those that are given come first."""
    row = dict(given)
    for factor in rng.sample(list(FACTORS), len(FACTORS)):
        if factor not in row:
            others = [DEFAULTS[factor]] * len(FACTORS[factor]) + list(FACTORS[factor])
            drawn = {**row, factor: rng.choice(others)}
            row = drawn if is_legal(drawn) else row
    return {factor: row.get(factor, DEFAULTS[factor]) for factor in FACTORS}


def choice_of_row(table: str, name: str) -> Row:
    """A choice under which the row of a table is on."""
    factor = {"policy_loss": "objective", "loss_aggregation": "aggregation", "kl_loss_type": "kl"}
    if name in FACTORS.get(factor.get(table, ""), {}):
        return {factor[table]: name}
    for factor_of_row, choice in CHOICES if table == "corrections" else []:
        if is_legal(row := {factor_of_row: choice}):
            if name in [each.name for each in rows_on(TABLES[table], config_of(row))]:
                return row
    raise AssertionError(f"{name} of {table} is under no choice here: add one, and its plain loops")


@functools.cache
def legal_pairs() -> frozenset[frozenset[Choice]]:
    """Some choices need a third: the clip of another objective, a sum over sequences."""
    found = set()
    for pair in itertools.combinations(CHOICES, 2):
        row = dict(pair)
        others = [{"objective": name} for name in FACTORS["objective"] if "objective" not in row]
        others.append({"opsm": "on"} if "opsm" not in row else {})
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
        if not is_legal(row):  # which needs a third
            thirds = [("opsm", "on"), *(("objective", name) for name in FACTORS["objective"])]
            factor, choice = next(
                (f, c) for f, c in thirds if f not in row and is_legal({**row, f: c})
            )
            row[factor] = choice
        for factor in FACTORS:
            if factor not in row:
                legal = [{**row, factor: choice} for choice in FACTORS[factor]]
                legal = [each for each in legal if is_legal(each)]
                row = max(legal, key=lambda each: len(pairs_of(each) & missing))
        found.append({factor: row[factor] for factor in FACTORS})
        missing -= pairs_of(row)
    return tuple(found)
