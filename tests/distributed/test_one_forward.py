"""`--old-log-probs current` and `interpolated`: one forward pass gives the step that two give, at
any cut.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron_pg import PackedBatch, PolicyLossConfig, Sample, pack
from megatron_pg.megatron import compute_log_probs

from .compare import assert_equal, compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .steps import Run

DENSE = ModelOptions(dtype=torch.float64)
CASES = {"CP2": DENSE, "TP2+SP CP2": DENSE, "PP2": DENSE, "DP2": DENSE}
CASES["CP2, per token"] = replace(DENSE, calculate_per_token_loss=True)


@dataclass(frozen=True)
class PolicyRun(Run):
    """A step with weights against the engine's mismatch."""

    old: str = "given"
    objective_name: str = "ppo"
    is_stale: bool = False
    """Old log-probs are interpolated by the tokens' versions."""

    @property
    def config(self) -> PolicyLossConfig:
        return replace(
            super().config, policy_loss=self.objective_name, use_tis=True, old_log_probs=self.old
        )


RUNS = [
    PolicyRun("prompt_mean", regularized=True),
    PolicyRun("token_mean", "short", "empty", objective_name="gspo"),
    PolicyRun("sample_mean", cut="empty", fused_lm_head=True),
    PolicyRun("token_mean", "short", "empty", is_stale=True),
    PolicyRun("sample_mean", cut="empty", fused_lm_head=True, is_stale=True),
]
CURRENT_VERSION = 4


def steps(sharding: Sharding, options: ModelOptions, is_mutant: bool) -> list[Any]:
    chunks = build(sharding, options)
    pairs = []
    for run in RUNS:

        def with_engine(sample: Sample, **fields: Any) -> Sample:
            length = sample.response_length
            engine = -2.8 - 0.1 * torch.arange(length, dtype=torch.float32).remainder(5)
            return replace(sample, rollout_log_probs=engine, **fields)

        def version_of_tokens(sample: Sample) -> torch.Tensor:
            return CURRENT_VERSION - torch.arange(sample.response_length).remainder(4)

        def pack_alone(samples: list[Sample], **layout: Any) -> PackedBatch:
            return pack(
                [
                    with_engine(s, old_log_probs=None, policy_version=version_of_tokens(s))
                    for s in samples
                ],
                **layout,
            )

        def interpolated(sample: Sample, current: torch.Tensor) -> torch.Tensor:
            ages = (CURRENT_VERSION - version_of_tokens(sample)).tolist()
            share = torch.tensor([1 / age if age else 0.0 for age in ages], dtype=torch.float64)
            engine = with_engine(sample).rollout_log_probs
            return share * engine + (1 - share) * current

        def pack_with_old(samples: list[Sample], **layout: Any) -> PackedBatch:
            scored = compute_log_probs(chunks, samples, run.config, max_tokens_per_microbatch=400)  # noqa: B023
            old = [x.roll(1) for x in scored.log_probs] if is_mutant else scored.log_probs
            if run.is_stale:  # noqa: B023
                old = [interpolated(*pair) for pair in zip(samples, old, strict=True)]  # noqa: B023
            pairs = zip(samples, old, strict=True)
            return pack([with_engine(s, old_log_probs=x) for s, x in pairs], **layout)

        current = replace(run, old="interpolated" if run.is_stale else "current")
        pairs.append(
            [
                train_step(
                    chunks, sharding, current, pack_batch=pack_alone, policy_version=CURRENT_VERSION
                ),
                train_step(chunks, sharding, run, pack_batch=pack_with_old),
            ]
        )
    return pairs


@pytest.mark.parametrize("case", CASES)
def test_one_forward_is_two(case: str) -> None:
    sharding = Sharding.named(case)
    pairs: list[list[Outcome]] = run_ranks(
        steps, sharding.world_size, sharding, CASES[case], False
    )[0]
    for run, (one, two) in zip(RUNS, pairs, strict=True):
        # Given log-probs are float32.
        assert_equal([one], [two], [run], 1e-6)


def test_a_mutant_of_another_old_policy_is_seen() -> None:
    pairs = run_ranks(steps, 2, Sharding(context=2), DENSE, True)[0]
    for one, two in pairs:
        assert not compare(one, two, 1e-4).passed
