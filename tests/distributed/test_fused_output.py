"""One step of GPTModel, DDP and schedule through the fused head, against the unsharded model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pg.arguments.config import PolicyLossConfig
from megatron_pg.batch import pack
from megatron_pg.megatron.fused_output import FusedOutput, active_rows, is_sum_over_tokens
from megatron_pg.megatron.output_head import OutputHead
from megatron_pg.megatron.versions import supports_output_processor
from megatron_pg.samples import Sample

from .compare import compare, gradient_tolerance
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .reference import reference_steps
from .steps import AGGREGATIONS, Run

pytestmark = pytest.mark.skipif(
    not supports_output_processor(), reason="needs megatron-core 0.18 or later"
)

RUNS = [
    Run(aggregation, cut="empty" if place < 2 else "uniform", regularized=bool(place % 2))
    for place, aggregation in enumerate(AGGREGATIONS)
]
# In float64: what float32 rounds away could hide a wrong coefficient of a small term.
DENSE = ModelOptions(dtype=torch.float64)
TIED = replace(DENSE, tied_embeddings=True)
MODES = {"one pass": None, "recomputed": False, "kept": True}
CASES = {
    "CP2, per token": (Sharding(context=2), replace(DENSE, calculate_per_token_loss=True)),
    "TP2": (Sharding(tensor=2), DENSE),
    "TP2+SP CP2": (Sharding(tensor=2, sequence_parallel=True, context=2), DENSE),
    "PP2 tied": (Sharding(pipeline=2), TIED),
    "DP2 tied": (Sharding(data=2), TIED),
}


def fused_step(chunks: list, sharding: Sharding, run: Run, mode: str) -> Outcome | None:
    def head(*arguments: Any, **keywords: Any) -> OutputHead:
        fused = FusedOutput(*arguments, keep_logits=MODES[mode], chunk_tokens=5, **keywords)
        return OutputHead(fused.loss_func, {"output_processor": fused.output_processor})

    return train_step(chunks, sharding, run, head=head)


def steps(sharding: Sharding, options: ModelOptions, mode: str) -> list[Outcome | None]:
    if mode != "one pass":
        # The losses of this file are sums over tokens: have them treated as if they were not.
        from megatron_pg.megatron import fused_output

        fused_output.is_sum_over_tokens = lambda config: False
    chunks = build(sharding, options)
    return [fused_step(chunks, sharding, run, mode) for run in RUNS]


@pytest.fixture(scope="module")
def references() -> dict[bool, list[Outcome]]:
    return {
        tied: run_ranks(reference_steps, 1, ModelOptions(tied_embeddings=tied), RUNS)[0]
        for tied in (False, True)
    }


@pytest.mark.parametrize(
    ("case", "mode"),
    [(case, "one pass") for case in CASES] + [("TP2", "recomputed"), ("DP2 tied", "kept")],
)
def test_gradients_and_metrics_equal_the_unsharded_reference(
    case: str, mode: str, references: dict[bool, list[Outcome]]
) -> None:
    sharding, options = CASES[case]
    found = run_ranks(steps, sharding.world_size, sharding, options, mode)[0]
    for run, outcome, expected in zip(
        RUNS, found, references[options.tied_embeddings], strict=True
    ):
        comparison = compare(outcome, expected, gradient_tolerance(options))
        assert comparison.passed, f"{run}: {comparison}"


def unscaled(sharding: Sharding) -> list[Outcome | None]:
    """Mutant: coefficients are those of the loss before its entropy and KL terms."""
    from megatron_pg.megatron import fused_output

    whole = fused_output.policy_loss_from_log_probs

    def without_regularizers(config: PolicyLossConfig, *arguments: Any, **options: Any) -> Any:
        if config.pg_metrics == "none":
            config = replace(config, kl_loss_coef=0.0, entropy_coef=0.0)
        return whole(config, *arguments, **options)

    fused_output.policy_loss_from_log_probs = without_regularizers
    return steps(sharding, DENSE, "one pass")


def test_coefficients_of_another_loss_would_be_seen(references: dict[bool, list[Outcome]]) -> None:
    found = run_ranks(unscaled, 2, Sharding(context=2))[0]
    for run, outcome, expected in zip(RUNS, found, references[False], strict=True):
        assert compare(outcome, expected).passed == (not run.regularized)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, True),
        ({"policy_loss": "cispo"}, True),
        ({"entropy_coef": 0.1}, True),
        ({"use_tis": True}, True),
        ({"policy_loss": "gspo"}, False),
        ({"use_opsm": True}, False),
        ({"use_geometric_rejection": True}, False),
        ({"use_tis": True, "tis_level": "sequence"}, False),
        ({"custom_policy_loss_path": "module.loss"}, False),
    ],
)
def test_which_losses_are_sums_over_tokens(setting: dict[str, Any], expected: bool) -> None:
    assert is_sum_over_tokens(PolicyLossConfig(**setting)) == expected


def test_tokens_without_advantage_come_last() -> None:
    def sample(advantages: list[float], loss_mask: list[int]) -> Sample:
        length = len(advantages)
        return Sample(
            tokens=torch.arange(length + 2),
            response_length=length,
            loss_mask=torch.tensor(loss_mask),
            advantages=torch.tensor(advantages),
            old_log_probs=torch.zeros(length),
        )

    batch = pack([sample([0.0, 1.0, 2.0], [1, 0, 1]), sample([-1.0, 0.0], [1, 1])])
    rows, count = active_rows(PolicyLossConfig(), batch)
    assert (rows.tolist(), count) == ([2, 3, 0, 4], 2)
    for setting in ({"entropy_coef": 0.1}, {"kl_loss_coef": 0.1}, {"policy_loss": "sft"}):
        rows, count = active_rows(PolicyLossConfig(**setting), batch)
        assert (rows.tolist(), count) == ([0, 2, 3, 4], 4)
    rows, count = active_rows(PolicyLossConfig(), pack([]))
    assert (rows.tolist(), count) == ([], 0)
