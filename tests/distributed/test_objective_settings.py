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
import torch

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss import METRICS
from megatron_pg.loss.checksum import CHECKSUMS
from megatron_pg.loss.metrics import metric_names
from tests.oracle import PlainSample
from tests.random_steps import float32
from tests.settings import CHOICES, Row, config_of, is_legal, rows

from .compare import assert_equal, gradient_tolerance
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Head, Outcome, build, fused_head, train_step
from .steps import SHAPES, Run

LEARNING_RATE = 0.05
NOT_REPORTED = {r.name for r in METRICS if not r.is_reported or "policy_version" in r.reads}

DENSE = ModelOptions(dtype=torch.float64)
"""In float64: settings that reject much leave gradients that cancel."""
REDUCER = {"custom_pg_loss_reducer_function_path": "tests.fast.test_reduction:mean_of_what_is_left"}


def covering_rows() -> list[Row]:
    """Rows of settings that hold every choice between them."""
    missing, found = set(CHOICES) - {("sets", "on")}, []
    while missing:
        drawn = ({**row, "sets": "off", "metrics": "with_entropy"} for row in rows())
        best = max(filter(is_legal, drawn), key=lambda row: len(missing & row.items()))
        if not missing & best.items():
            return found
        found.append(best)
        missing -= best.items()
    return found


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
    choices: tuple[tuple[str, str], ...] = ()
    has_own_reducer: bool = False

    @property
    def samples(self) -> list[PlainSample]:
        samples, rng = samples_with_mismatch(), random.Random(1)
        if self.config.loss_weight_denominator == "mask":
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
        config = config_of(dict(self.choices))
        return dataclasses.replace(config, **REDUCER) if self.has_own_reducer else config


RUNS = [SettingsRun(choices=tuple(row.items())) for row in covering_rows()]
RUNS.append(SettingsRun(choices=(("tis", "mask"), ("opsm", "on")), has_own_reducer=True))


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


Outcomes = list[tuple[Outcome, Outcome]]


@pytest.fixture(scope="module")
def expected() -> Outcomes:
    return run_ranks(two_steps_each, 1, Sharding(), DENSE, RUNS)[0]


@pytest.mark.parametrize(("per_token", "head"), [(False, None), (True, fused_head)])
def test_two_steps_equal_those_of_one_process(per_token, head, expected: Outcomes) -> None:
    """From logits, and in per-token mode through the fused head."""
    options = dataclasses.replace(DENSE, calculate_per_token_loss=per_token)
    found = run_ranks(two_steps_each, 2, Sharding(context=2), options, RUNS, head)[0]
    for run, of_run, wanted in zip(RUNS, found, expected, strict=True):
        names_of_steps = [f"{run.choices}, {step} step" for step in ("first", "second")]
        assert_equal(of_run, wanted, names_of_steps, gradient_tolerance(DENSE))
        for outcome in of_run:
            # A step reports one of the two sums of the checksum, and nothing of versions that no
            # sample carries.
            names = set(metric_names(run.config)) - set(CHECKSUMS[1:]) - NOT_REPORTED
            assert names <= set(outcome.metrics)
            assert any(gradient.abs().max() > 0 for gradient in outcome.gradients.values())
        assert of_run[0].metrics["loss"] != of_run[1].metrics["loss"]


def test_the_steps_do_clip_and_reject_tokens(expected: Outcomes) -> None:
    for name in ("pg_clipfrac", "rejected_fraction"):
        fractions = [step.metrics[name] for step, _ in expected if name in step.metrics]
        assert sum(0 < fraction < 1 for fraction in fractions) > 3, fractions
