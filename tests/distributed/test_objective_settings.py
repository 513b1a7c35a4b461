"""Two steps of training under every objective, divergence and correction: CP=2 against one process.

That each equals its formula is tested where it is defined; here it goes through real Megatron-Core.
"""

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss import METRICS
from megatron_pg.loss.checksum import CHECKSUMS
from megatron_pg.loss.metrics import metric_names
from tests.oracle import PlainSample
from tests.random_steps import float32

from .compare import assert_equal
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Head, Outcome, build, fused_head, train_step
from .steps import SHAPES, Run

LEARNING_RATE = 0.05
NOT_REPORTED = {r.name for r in METRICS if not r.is_reported or "policy_version" in r.reads}

PROMPT_MEAN, TOKEN_MEAN = ({"loss_aggregation": f"{unit}_mean"} for unit in ("prompt", "token"))
KL, ENTROPY = {"kl_loss_coef": 0.1}, {"entropy_coef": 0.05}
BY_THE_LOSS = {"regularizer_aggregation": "loss"}
TIS, OPSM = {"use_tis": True}, {"use_opsm": True, "opsm_delta": 0.05}
ICEPOP = {**TIS, "tis_mode": "mask", "tis_clip_low": 0.8, "tis_clip": 1.25}
GEOMETRIC = {**TIS, "tis_level": "geometric"}
ACCEPTED = {"rejection_denominator": "accepted"}
ROLLOUT, TURN = {"ratio_anchor": "rollout"}, {"sequence_unit": "turn"}


def rejection(name: str, low: float, high: float | None = None) -> dict[str, Any]:
    bounds = {"low": low} if high is None else {"low": low, "high": high}
    fields = {f"{name}_rejection_{end}": bound for end, bound in bounds.items()}
    return {f"use_{name}_rejection": True, **fields}


SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo_dual_clip": {"eps_clip_c": 3.0},
    "gspo": {"policy_loss": "gspo", **PROMPT_MEAN},
    "cispo": {"policy_loss": "cispo", "cispo_lower_bound": True, **TOKEN_MEAN},
    "dis": {"policy_loss": "dis", "eps_clip": 0.3, "eps_clip_high": 0.4, **PROMPT_MEAN},
    "vespo": {"policy_loss": "vespo", **TOKEN_MEAN},
    "luspo": {
        **{"policy_loss": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03},
        **{"loss_aggregation": "constant", "loss_aggregation_divisor": 1.0},
    },
    "reinforce": {"policy_loss": "reinforce"},
    "sft": {"policy_loss": "sft", **TOKEN_MEAN},
    **{
        kind: {**KL, "kl_loss_type": kind, "use_unbiased_kl": kind == "k3"}
        for kind in ("k1", "k2", "k3", "low_var_kl")
    },
    "low_var_kl_unbiased": {**KL, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
    "kl_gradient_of_k2": {**KL, "kl_loss_gradient": "k2"},
    "entropy": {**ENTROPY, "pg_metrics": "with_entropy"},
    "tis": TIS,
    "tis_sequence": {**TIS, "tis_level": "sequence"},
    "icepop": ICEPOP,
    "geometric_rejection": rejection("geometric", 0.95, 1.05),
    "geometric_mask": {**GEOMETRIC, "tis_mode": "mask", "tis_clip_low": 0.95, "tis_clip": 1.05},
    "tis_geometric": {**GEOMETRIC, "tis_clip": 1.02},
    "sequence_rejection": rejection("sequence", 0.8, float("inf")),
    "opsm": OPSM,
    "everything": {
        **{"policy_loss": "gspo", "use_opsm": True, "pg_metrics": "with_entropy"},
        **{**KL, **ENTROPY, **TIS, **rejection("geometric", 0.9)},
    },
    "divided_twice": {"divide_gradient_twice": True, **PROMPT_MEAN},
    "loss_weights": {**PROMPT_MEAN, **KL, **ENTROPY},
    "loss_weights_in_denominators": {**TOKEN_MEAN, "loss_weight_denominator": "weights"},
    "terms_by_the_loss": {**TOKEN_MEAN, **BY_THE_LOSS, **KL, **ENTROPY},
    "reducer_of_what_is_left": {
        "custom_pg_loss_reducer_function_path": "tests.fast.test_reduction:mean_of_what_is_left",
        **{**ICEPOP, **OPSM, **ENTROPY, **BY_THE_LOSS},
    },
    "icepop_accepted": {**ICEPOP, **ACCEPTED, **KL, **ENTROPY},
    "rejection_accepted": {
        **{**rejection("geometric", 0.95, 1.05), **ACCEPTED, **TOKEN_MEAN},
        **{**BY_THE_LOSS, **KL, **ENTROPY},
    },
    "no_metrics": {"pg_metrics": "none"},
    "sapo": {"policy_loss": "sapo", "sapo_tau_neg": 3.0, **PROMPT_MEAN},
    "dppo_tv": {
        **{"policy_loss": "dppo_tv", "dppo_delta": 0.004, **ROLLOUT},
        **{"loss_aggregation": "constant", "loss_aggregation_divisor": 8.0},
    },
    "dppo_kl": {"policy_loss": "dppo_kl", "dppo_delta": 0.001, "dppo_delta_high": 0.0005},
    "gmpo": {"policy_loss": "gmpo", "eps_clip": 0.1, **TOKEN_MEAN},
    "ppo_against_rollout": {**ROLLOUT, **OPSM, **KL, "use_unbiased_kl": True},
    "gspo_by_turn": {"policy_loss": "gspo", **TURN, **PROMPT_MEAN},
}
CLIPPING = ("luspo", "dppo_tv", "dppo_kl", "gmpo", "ppo_against_rollout")
IN_BOTH_MODES = (
    *("sapo", "dis", "vespo", *CLIPPING, "gspo_by_turn"),
    *("terms_by_the_loss", "reducer_of_what_is_left", "icepop_accepted", "rejection_accepted"),
)
"""The settings that are also run in per-token mode, and through the fused head."""
REJECTING = (
    *("icepop", "geometric_mask", "geometric_rejection", "sequence_rejection", "opsm"),
    *("everything", "reducer_of_what_is_left", "icepop_accepted", "rejection_accepted"),
)


@functools.cache
def samples_with_mismatch() -> list[PlainSample]:
    """The ragged step near the policy, with rollout log-probs that differ from the old ones."""
    rng = random.Random(0)

    def near(values: list[float], width: float) -> list[float]:
        return [float32(value + rng.uniform(-width, width)) for value in values]

    samples = []
    for sample in SHAPES["ragged"]:
        old = near([-2.8] * sample.response_length, 0.3)
        others: dict[str, Any] = {
            f"{name}_log_probs": near(old, 0.3) for name in ("ref", "rollout")
        }
        others["turn_ids"] = [t // 3 for t in range(len(old))]
        samples.append(dataclasses.replace(sample, old_log_probs=old, **others))
    return samples


@dataclass(frozen=True)
class SettingsRun(Run):
    name: str = "ppo"

    @property
    def samples(self) -> list[PlainSample]:
        samples, rng = samples_with_mismatch(), random.Random(1)
        if not self.name.startswith("loss_weights"):
            return samples
        return [
            dataclasses.replace(
                sample,
                loss_weights=[float32(rng.choice([0.0, 1.0, 2.5])) for _ in sample.loss_mask],
            )
            for sample in samples
        ]

    @property
    def config(self) -> PolicyLossConfig:
        return PolicyLossConfig(**SETTINGS[self.name])


def two_steps_each(
    sharding: Sharding, options: ModelOptions, runs: Sequence[Run], head: Head | None = None
) -> list[tuple[Outcome | None, ...]]:
    """The outcomes of two steps of each run; `head` takes the place of the step's own."""
    chunks = build(sharding, options)
    parameters = list(chunks[0].parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    results = []
    for run in runs:
        first = train_step(chunks, sharding, run, head=head)
        for parameter in parameters:
            parameter.data.sub_(LEARNING_RATE * parameter.main_grad)
        results.append((first, train_step(chunks, sharding, run, head=head)))
        for parameter, value in zip(parameters, start, strict=True):
            parameter.data.copy_(value)
    return results


Outcomes = dict[str, tuple[tuple[Outcome, Outcome], tuple[Outcome, Outcome]]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    runs = [SettingsRun(name=name) for name in SETTINGS]
    found = run_ranks(two_steps_each, 2, Sharding(context=2), ModelOptions(), runs)[0]
    expected = run_ranks(two_steps_each, 1, Sharding(), ModelOptions(), runs)[0]
    return dict(zip(SETTINGS, zip(found, expected, strict=True), strict=True))


def test_per_token_mode_and_the_fused_head_change_nothing(outcomes: Outcomes) -> None:
    """With the output layer fused: what a row promises of its gradient holds or not."""
    options = ModelOptions(calculate_per_token_loss=True)
    runs = [SettingsRun(name=name) for name in IN_BOTH_MODES]
    found = run_ranks(two_steps_each, 2, Sharding(context=2), options, runs, fused_head)[0]
    for name, steps in zip(IN_BOTH_MODES, found, strict=True):
        assert_equal(
            steps, outcomes[name][1], [f"{name}, {step} step" for step in ("first", "second")]
        )


@pytest.mark.parametrize("name", ["dis", *CLIPPING])
def test_the_steps_do_clip_tokens(name, outcomes: Outcomes) -> None:
    first, _ = outcomes[name][0]
    fraction, outside = (first.metrics[x] for x in ("pg_clipfrac", "clipped_ratio_fraction"))
    assert 0.05 < fraction < 0.8
    # Of dis whatever the sign of A.
    assert fraction == outside if name == "dis" else fraction < outside


@pytest.mark.parametrize("name", REJECTING)
def test_the_steps_do_reject_tokens(name, outcomes: Outcomes) -> None:
    first, _ = outcomes[name][0]
    assert 0 < first.metrics["rejected_fraction"] < 1


@pytest.mark.parametrize("name", SETTINGS)
def test_two_steps_equal_those_of_one_process(name, outcomes: Outcomes) -> None:
    assert_equal(*outcomes[name])
    config = SettingsRun(name=name).config
    for found in outcomes[name][0]:
        # A step reports one of the two sums of the checksum, and nothing of versions that no sample
        # carries.
        names = set(metric_names(config)) - set(CHECKSUMS[1:]) - NOT_REPORTED
        assert names <= set(found.metrics)
        assert any(gradient.abs().max() > 0 for gradient in found.gradients.values())
    first, second = outcomes[name][0]
    assert first.metrics["loss"] != second.metrics["loss"]
