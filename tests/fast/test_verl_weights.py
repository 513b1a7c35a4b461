"""The weights and refusals of the verl plugin, without verl: its proof on verl's own code is in tests/trainers."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from megatron_pg.integrations import DIVISOR_VARIABLE, verl
from tests import oracle
from tests.random_steps import plain_sample

MASKS = [[1, 1, 0, 1], [1, 1, 1], [0, 0], [1], [1, 0, 1, 1, 1], [1, 1]]
GROUPS = [7, 7, 7, 9, 9, 9]
STEP = [plain_sample(mask, group=group) for mask, group in zip(MASKS, GROUPS, strict=True)]
PADDED = torch.nn.utils.rnn.pad_sequence([torch.tensor(mask) for mask in MASKS], batch_first=True)
TOTALS = {"global_batch_size": len(MASKS), "batch_num_tokens": int(PADDED.sum())}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIVISOR_VARIABLE, raising=False)


@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_weights_times_losses_are_the_objective(aggregation):
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(PADDED.shape, generator=generator, dtype=torch.float64)
    divisor = 5.0 if aggregation == "constant" else None
    weights = verl.token_weights(aggregation, PADDED.bool(), TOTALS, divisor).double()
    if aggregation == "prompt_mean":
        factors, num_groups = verl.group_factors(PADDED, np.array(GROUPS, dtype=object))
        assert num_groups == 2
        weights = weights * factors[:, None]
    found = (losses * PADDED * weights).sum()
    rows = [row[: len(mask)] for row, mask in zip(losses, MASKS, strict=True)]
    expected = oracle.aggregate(STEP, rows, aggregation, divisor)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_importance_weights_multiply_the_loss_of_their_tokens(monkeypatch):
    """In the place of verl's `vanilla` its token sum alone: the weights come with the response's shape."""
    generator = torch.Generator().manual_seed(0)
    losses, importance = (torch.rand(PADDED.shape, generator=generator) for _ in range(2))

    def vanilla(advantages, response_mask, loss_agg_mode, rollout_is_weights, **_):
        assert loss_agg_mode == "token-sum"
        return (-advantages * response_mask * rollout_is_weights).sum(), {}

    core_algos = types.SimpleNamespace(get_policy_loss_fn={"vanilla": vanilla}.__getitem__)
    for name, module in (
        ("verl", types.ModuleType("verl")),
        ("verl.trainer", types.ModuleType("verl.trainer")),
        ("verl.trainer.ppo", types.SimpleNamespace(core_algos=core_algos)),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    config = types.SimpleNamespace(engine=None, global_batch_info=TOTALS)
    given = (torch.zeros(PADDED.shape), torch.zeros(PADDED.shape), -losses, PADDED.bool())
    for weights in (importance, torch.zeros_like(importance), None):
        found, _ = verl.policy_loss(
            "sample_mean", *given, config=config, rollout_is_weights=weights
        )
        weighted = losses if weights is None else losses * weights
        rows = [row[: len(mask)].double() for row, mask in zip(weighted, MASKS, strict=True)]
        expected = oracle.aggregate(STEP, rows, "sample_mean", None)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_verls_padding_samples_are_in_no_prompt_group():
    masks = torch.cat([PADDED, torch.zeros(2, PADDED.shape[1], dtype=torch.int64)])
    uids = np.array([*GROUPS, "pad" + "0f" * 16, "pad" + "0f" * 16], dtype=object)
    assert verl.group_factors(masks, uids)[1] == 2
    emptied = np.array([*GROUPS, "a prompt", "a prompt"], dtype=object)
    assert verl.group_factors(masks, emptied)[1] == 3


def test_a_step_without_tokens_has_finite_weights():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    totals = {"global_batch_size": 2, "batch_num_tokens": 0}
    for aggregation in ("sample_mean", "token_mean"):
        assert verl.token_weights(aggregation, mask, totals, None).isfinite().all()
    assert verl.group_factors(mask, np.array(["a", "b"], dtype=object))[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
def test_a_missing_total_is_refused(aggregation):
    with pytest.raises(ValueError, match="global_batch_info"):
        verl.token_weights(aggregation, PADDED.bool(), {}, None)


def test_the_tag_changes_less_than_a_rounding_or_two_and_is_seen(monkeypatch):
    monkeypatch.setattr(verl, "_seen_tagged", False)
    advantages = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    advantages[3] = 0.0
    mask = torch.ones_like(advantages, dtype=torch.bool)
    tagged = verl._tagged(advantages)
    assert tagged[3].tolist() == [0.0] * 8
    assert ((tagged - advantages).abs() <= 2.4e-7 * advantages.abs()).all()
    with pytest.raises(ValueError, match="adv_estimator=megatron_pg_prompt_mean_grpo"):
        verl._refuse_untagged(advantages, mask)
    verl._refuse_untagged(torch.zeros(2, 2), mask[:2, :2])  # shows nothing
    with pytest.raises(ValueError, match="do not carry"):
        verl._refuse_untagged(advantages, mask)
    verl._refuse_untagged(tagged, mask)


def test_the_divisor(monkeypatch):
    assert verl._divisor(8) == 8.0
    with pytest.raises(ValueError, match="loss_scale_factor to a number"):
        verl._divisor(None)
    monkeypatch.setenv(DIVISOR_VARIABLE, "16")
    assert verl._divisor(None) == verl._divisor(16) == 16.0
    with pytest.raises(ValueError, match="two divisors.*loss_scale_factor=8"):
        verl._divisor(8)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many", ""])
def test_a_divisor_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv(DIVISOR_VARIABLE, value)
    with pytest.raises(ValueError, match=DIVISOR_VARIABLE):
        verl._divisor(None)


def configuration(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """What `_select` finds above the section `algorithm`."""
    settings = {"loss_mode": "megatron_pg_prompt_mean", "ppo_mini_batch_size": 2, "n": 3, **changes}
    actor = types.SimpleNamespace(
        policy_loss=types.SimpleNamespace(loss_mode=settings["loss_mode"]),
        ppo_mini_batch_size=settings["ppo_mini_batch_size"],
    )
    parts = {"actor": actor, "rollout": types.SimpleNamespace(n=settings["n"])}
    monkeypatch.setattr(verl, "_select", lambda config, key: parts[key.split(".")[-1]])


def test_estimator_settings(monkeypatch):
    configuration(monkeypatch)
    verl.refuse_estimator_settings("grpo", None, 6, GROUPS)
    with pytest.raises(ValueError, match="no uid"):
        verl.refuse_estimator_settings("grpo", None, 6, None)
    with pytest.raises(ValueError, match="ppo_mini_batch_size to data.train_batch_size"):
        verl.refuse_estimator_settings("grpo", None, 12, GROUPS * 2)
    configuration(monkeypatch, loss_mode="vanilla")
    with pytest.raises(ValueError, match="policy_loss.loss_mode=vanilla"):
        verl.refuse_estimator_settings("grpo", None, 6, GROUPS)


def test_an_estimator_that_sees_no_configuration_refuses():
    with pytest.raises(ValueError, match="actor_rollout_ref can be found"):
        verl.refuse_estimator_settings("grpo", {"gamma": 1.0}, 6, GROUPS)
