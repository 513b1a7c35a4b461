"""Two steps of training under every objective, divergence and correction: CP=2 against one process.

That each equals its formula is tested where it is defined; here it goes through real Megatron-Core.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss import METRICS
from megatron_pg.loss.checksum import CHECKSUMS
from megatron_pg.loss.metrics import metric_names
from tests.lanes import in_one_lane
from tests.oracle import PlainSample
from tests.random_steps import float32

from .compare import assert_equal
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Head, Outcome, build, fused_head, train_step
from .steps import AGGREGATIONS, SHAPES, Run, ValueRun

pytestmark = in_one_lane

LEARNING_RATE = 0.05
NOT_REPORTED = {r.name for r in METRICS if not r.is_reported or "policy_version" in r.reads}

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo_dual_clip": {"eps_clip_c": 3.0},
    "gspo": {"policy_loss": "gspo", "loss_aggregation": "prompt_mean"},
    "cispo": {"policy_loss": "cispo", "cispo_lower_bound": True, "loss_aggregation": "token_mean"},
    "reinforce": {"policy_loss": "reinforce"},
    "sft": {"policy_loss": "sft", "loss_aggregation": "token_mean"},
    **{
        kind: {"kl_loss_coef": 0.1, "kl_loss_type": kind, "use_unbiased_kl": kind == "k3"}
        for kind in ("k1", "k2", "k3", "low_var_kl")
    },
    "low_var_kl_unbiased": {
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
        "use_unbiased_kl": True,
    },
    "kl_gradient_of_k2": {"kl_loss_coef": 0.1, "kl_loss_gradient": "k2"},
    "entropy": {"entropy_coef": 0.05, "pg_metrics": "with_entropy"},
    "tis": {"use_tis": True},
    "tis_sequence": {"use_tis": True, "tis_level": "sequence"},
    "icepop": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.8, "tis_clip": 1.25},
    "geometric_rejection": {
        "use_geometric_rejection": True,
        "geometric_rejection_low": 0.95,
        "geometric_rejection_high": 1.05,
    },
    "geometric_mask": {
        "use_tis": True,
        "tis_level": "geometric",
        "tis_mode": "mask",
        "tis_clip_low": 0.95,
        "tis_clip": 1.05,
    },
    "tis_geometric": {"use_tis": True, "tis_level": "geometric", "tis_clip": 1.02},
    "sequence_rejection": {
        "use_sequence_rejection": True,
        "sequence_rejection_low": 0.8,
        "sequence_rejection_high": float("inf"),
    },
    "opsm": {"use_opsm": True, "opsm_delta": 0.05},
    "everything": {
        "policy_loss": "gspo",
        "kl_loss_coef": 0.1,
        "entropy_coef": 0.05,
        "use_tis": True,
        "use_geometric_rejection": True,
        "geometric_rejection_low": 0.9,
        "use_opsm": True,
        "pg_metrics": "with_entropy",
    },
    "divided_twice": {"divide_gradient_twice": True, "loss_aggregation": "prompt_mean"},
    "loss_weights": {"loss_aggregation": "prompt_mean", "kl_loss_coef": 0.1, "entropy_coef": 0.05},
    "loss_weights_in_denominators": {
        "loss_aggregation": "token_mean",
        "loss_weight_denominator": "weights",
    },
    "terms_by_the_loss": {
        **{"loss_aggregation": "token_mean", "regularizer_aggregation": "loss"},
        **{"kl_loss_coef": 0.1, "entropy_coef": 0.05},
    },
    "reducer_of_what_is_left": {
        "custom_pg_loss_reducer_function_path": "tests.distributed.test_sequence_level:reducer_of_place",
        **{"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.8, "tis_clip": 1.25},
        **{"use_opsm": True, "opsm_delta": 0.05, "entropy_coef": 0.05},
        "regularizer_aggregation": "loss",
    },
    "no_metrics": {"pg_metrics": "none"},
    "sapo": {"policy_loss": "sapo", "sapo_tau_neg": 3.0, "loss_aggregation": "prompt_mean"},
    "dppo_tv": {
        "policy_loss": "dppo_tv",
        "dppo_delta": 0.004,
        "ratio_anchor": "rollout",
        **{"loss_aggregation": "constant", "loss_aggregation_divisor": 8.0},
    },
    "dppo_kl": {"policy_loss": "dppo_kl", "dppo_delta": 0.001, "dppo_delta_high": 0.0005},
    "gmpo": {"policy_loss": "gmpo", "eps_clip": 0.1, "loss_aggregation": "token_mean"},
    "ppo_against_rollout": {
        "ratio_anchor": "rollout",
        "use_opsm": True,
        "opsm_delta": 0.05,
        "kl_loss_coef": 0.1,
        "use_unbiased_kl": True,
    },
}
IN_BOTH_MODES = (
    *("sapo", "dppo_tv", "dppo_kl", "gmpo", "ppo_against_rollout"),
    *("terms_by_the_loss", "reducer_of_what_is_left"),
)
"""The settings that are also run in per-token mode, and through the fused head."""


@functools.cache
def samples_with_mismatch() -> list[PlainSample]:
    """The ragged step near the policy, with rollout log-probs that differ from the old ones."""
    rng = random.Random(0)

    def near(values: list[float], width: float) -> list[float]:
        return [float32(value + rng.uniform(-width, width)) for value in values]

    samples = []
    for sample in SHAPES["ragged"]:
        old_log_probs = near([-2.8] * sample.response_length, 0.3)
        samples.append(
            dataclasses.replace(
                sample,
                old_log_probs=old_log_probs,
                ref_log_probs=near(old_log_probs, 0.3),
                rollout_log_probs=near(old_log_probs, 0.3),
            )
        )
    return samples


@dataclass(frozen=True)
class SettingsRun(Run):
    """A step under one of `SETTINGS`."""

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
    sharding: Sharding,
    options: ModelOptions,
    runs: Sequence[Run] = tuple(SettingsRun(name=name) for name in SETTINGS),
    head: Callable[[], Head] | None = None,
) -> list[tuple[Outcome | None, Outcome | None]]:
    """The outcomes of two steps of each run; `head` makes what takes the place of the step's own."""
    chunks = build(sharding, options)
    heads = None if head is None else head()
    start = [parameter.detach().clone() for parameter in chunks[0].parameters()]
    results = []
    for run in runs:
        with torch.no_grad():
            for parameter, value in zip(chunks[0].parameters(), start, strict=True):
                parameter.copy_(value)
        first = train_step(chunks, sharding, run, head=heads)
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.sub_(LEARNING_RATE * parameter.main_grad)
        second = train_step(chunks, sharding, run, head=heads)
        results.append((first, second))
    return results


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[tuple[Outcome, Outcome], tuple[Outcome, Outcome]]]:
    found = run_ranks(two_steps_each, 2, Sharding(context=2), ModelOptions())[0]
    expected = run_ranks(two_steps_each, 1, Sharding(), ModelOptions())[0]
    return dict(zip(SETTINGS, zip(found, expected, strict=True), strict=True))


@pytest.fixture(scope="module")
def in_per_token_mode() -> dict[str, tuple[Outcome, Outcome]]:
    """With the output layer fused: what a row promises of its gradient holds or not."""
    options = ModelOptions(calculate_per_token_loss=True)
    runs = [SettingsRun(name=name) for name in IN_BOTH_MODES]
    found = run_ranks(two_steps_each, 2, Sharding(context=2), options, runs, fused_head)[0]
    return dict(zip(IN_BOTH_MODES, found, strict=True))


@pytest.mark.parametrize("name", IN_BOTH_MODES)
def test_per_token_mode_and_the_fused_head_change_nothing(
    name: str, in_per_token_mode: dict, outcomes: dict
) -> None:
    assert_equal(in_per_token_mode[name], outcomes[name][1])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "gmpo", "ppo_against_rollout"])
def test_the_steps_do_clip_tokens(name: str, outcomes: dict) -> None:
    first, _ = outcomes[name][0]
    assert 0.05 < first.metrics["pg_clipfrac"] < 0.7
    assert first.metrics["pg_clipfrac"] < first.metrics["clipped_ratio_fraction"]


@pytest.mark.parametrize("name", SETTINGS)
def test_two_steps_equal_those_of_one_process(name: str, outcomes: dict) -> None:
    assert_equal(*outcomes[name])
    config = SettingsRun(name=name).config
    for found in outcomes[name][0]:
        # A step reports one of the three sums of the checksum, and nothing of versions that no sample carries.
        names = set(metric_names(config)) - set(CHECKSUMS[1:]) - NOT_REPORTED
        assert names <= set(found.metrics)
        assert any(gradient.abs().max() > 0 for gradient in found.gradients.values())
    first, second = outcomes[name][0]
    assert first.metrics["loss"] != second.metrics["loss"]


@pytest.mark.parametrize("per_token", [False, True], ids=["per_microbatch", "per_token"])
def test_two_steps_of_a_critic_equal_those_of_one_process(per_token: bool) -> None:
    critic = ModelOptions(value_head=True, dtype=torch.float64)
    options = dataclasses.replace(critic, calculate_per_token_loss=per_token)
    runs = [ValueRun(aggregation) for aggregation in AGGREGATIONS]
    found = run_ranks(two_steps_each, 2, Sharding(context=2), options, runs)[0]
    expected = run_ranks(two_steps_each, 1, Sharding(), critic, runs)[0]
    for steps, steps_of_one in zip(found, expected, strict=True):
        assert_equal(steps, steps_of_one, ("first", "second"), 1e-12)
        first, second = steps
        assert first.metrics["value_loss"] != second.metrics["value_loss"]


@pytest.mark.parametrize(
    "name",
    [
        *("icepop", "geometric_mask", "geometric_rejection"),
        *("sequence_rejection", "opsm", "everything", "reducer_of_what_is_left"),
    ],
)
def test_the_steps_do_reject_tokens(name: str, outcomes: dict) -> None:
    first, _ = outcomes[name][0]
    assert 0 < first.metrics["rejected_fraction"] < 1
