"""Two steps of training under every objective, divergence and correction: CP=2 against one process.

That each equals its formula is tested where it is defined; here it goes through real Megatron-Core.
"""

from __future__ import annotations

import dataclasses
import functools
import random
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

from .compare import compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .steps import SHAPES, Run

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
    "no_metrics": {"pg_metrics": "none"},
}


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


def two_steps_each(sharding: Sharding) -> list[tuple[Outcome | None, Outcome | None]]:
    chunks = build(sharding, ModelOptions())
    start = [parameter.detach().clone() for parameter in chunks[0].parameters()]
    results = []
    for name in SETTINGS:
        with torch.no_grad():
            for parameter, value in zip(chunks[0].parameters(), start, strict=True):
                parameter.copy_(value)
        first = train_step(chunks, sharding, SettingsRun(name=name))
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.sub_(LEARNING_RATE * parameter.main_grad)
        results.append((first, train_step(chunks, sharding, SettingsRun(name=name))))
    return results


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[tuple[Outcome, Outcome], tuple[Outcome, Outcome]]]:
    found = run_ranks(two_steps_each, 2, Sharding(context=2))[0]
    expected = run_ranks(two_steps_each, 1, Sharding())[0]
    return dict(zip(SETTINGS, zip(found, expected, strict=True), strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_two_steps_equal_those_of_one_process(name: str, outcomes: dict) -> None:
    for found, expected in zip(*outcomes[name], strict=True):
        comparison = compare(found, expected)
        assert comparison.passed, str(comparison)
        config = SettingsRun(name=name).config
        # A step reports one of the three sums of the checksum, and nothing of versions that no sample carries.
        names = set(metric_names(config)) - set(CHECKSUMS[1:]) - NOT_REPORTED
        assert names <= set(found.metrics)
        assert any(gradient.abs().max() > 0 for gradient in found.gradients.values())
    first, second = outcomes[name][0]
    assert first.metrics["loss"] != second.metrics["loss"]


@pytest.mark.parametrize(
    "name",
    [
        *("icepop", "geometric_mask", "geometric_rejection"),
        *("sequence_rejection", "opsm", "everything"),
    ],
)
def test_the_steps_do_reject_tokens(name: str, outcomes: dict) -> None:
    first, _ = outcomes[name][0]
    assert 0 < first.metrics["rejected_fraction"] < 1
