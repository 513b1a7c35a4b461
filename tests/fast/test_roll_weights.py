"""The weights and refusals of ROLL's worker, without ROLL: its proof on ROLL's own code is in tests/trainers."""

from __future__ import annotations

import types

import pytest
import torch

from megatron_pg.integrations.roll_weights import (
    DIVISOR_VARIABLE,
    refuse_settings,
    sample_factors,
    step_weights,
)
from tests import oracle
from tests.random_steps import plain_sample

MASKS = [[1, 1, 0, 1], [1, 1, 1], [0, 0], [1], [1, 0, 1, 1, 1], [1, 1]]
GROUPS = [7, 7, 7, 9, 9, 9]
STEP = [plain_sample(mask, group=group) for mask, group in zip(MASKS, GROUPS, strict=True)]
TOKENS = [sum(mask) for mask in MASKS]


def weights(aggregation: str, *, prompts: list[int] = GROUPS, divisor: float | None = None):
    names, tokens = [str(prompt).encode() for prompt in prompts], TOKENS[: len(prompts)]
    return step_weights(aggregation, tokens, names, None, rollouts_per_prompt=3, divisor=divisor)


@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_weights_times_losses_are_the_objective(aggregation):
    generator = torch.Generator().manual_seed(0)
    losses = [torch.rand(len(mask), generator=generator, dtype=torch.float64) for mask in MASKS]
    divisor = 5.0 if aggregation == "constant" else None
    rows = zip(weights(aggregation, divisor=divisor), losses, MASKS, strict=True)
    found = sum(weight * (loss * torch.tensor(mask)).sum() for weight, loss, mask in rows)
    expected = oracle.aggregate(STEP, losses, aggregation, divisor)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_group_that_is_split_over_steps_is_refused():
    with pytest.raises(ValueError, match="1 of the 2 prompts.*gradient_accumulation_steps"):
        weights("prompt_mean", prompts=GROUPS[:5])
    assert len(weights("sample_mean", prompts=GROUPS[:5])) == 5


def test_a_prompt_that_is_in_a_step_twice_is_refused():
    with pytest.raises(ValueError, match="1 of the 1 prompts.*have 6 samples.*not 3.*drawn twice"):
        weights("prompt_mean", prompts=[7] * 6)


def test_factors_undo_the_mean_over_the_kept_tokens():
    kept = torch.tensor([[1, 0, 1], [0, 0, 0]])
    factors = sample_factors([0.25, 0.5], kept, torch.tensor(7))
    assert factors.tolist() == [3.5, 0.0] and factors.dtype == torch.float32


def config(**changes: object) -> types.SimpleNamespace:
    settings = {"difficulty_loss_weight": False, "length_loss_weight": False}
    settings |= {"actor_train": types.SimpleNamespace(apply_loss_scale=True)}
    return types.SimpleNamespace(**{"loss_agg_mode": "seq-mean-token-mean", **settings, **changes})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"loss_agg_mode": "token-mean"}, "loss_agg_mode"),
        ({"difficulty_loss_weight": True}, "difficulty_loss_weight"),
        ({"length_loss_weight": True}, "length_loss_weight"),
        ({"actor_train": types.SimpleNamespace(apply_loss_scale=False)}, "apply_loss_scale"),
    ],
)
def test_settings_are_refused_by_key(changes, key):
    with pytest.raises(ValueError, match=key):
        refuse_settings("prompt_mean", config(**changes), {})


def test_the_divisor():
    assert refuse_settings("sample_mean", config(), {}) is None
    assert refuse_settings("constant", config(), {DIVISOR_VARIABLE: "8"}) == 8.0
    for text in ("", "0", "-1", "nan", "inf", "many"):
        with pytest.raises(ValueError, match=DIVISOR_VARIABLE):
            refuse_settings("constant", config(), {DIVISOR_VARIABLE: text})
    with pytest.raises(ValueError, match="system_envs"):
        refuse_settings("constant", config(), {})
