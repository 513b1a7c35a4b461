"""The weights and refusals of verl's plugin and ROLL's worker, without the two: tests/trainers has the proof on their code."""

import sys
import types

import numpy as np
import pytest
import torch

from megatron_pg.integrations import DIVISOR_VARIABLE, roll_weights, verl
from megatron_pg.integrations.reducers import HOOKS
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


@pytest.mark.parametrize("aggregation", HOOKS)
def test_verls_weights_times_losses_are_the_objective(aggregation):
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
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(core_algos=core_algos))
    config = types.SimpleNamespace(engine=None, global_batch_info=TOTALS)
    given = (torch.zeros(PADDED.shape), torch.zeros(PADDED.shape), -losses, PADDED.bool())
    for weights in (importance, torch.zeros_like(importance), None):
        options = {"config": config, "rollout_is_weights": weights}
        found, _ = verl.policy_loss("sample_mean", *given, **options)
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


def test_verls_divisor(monkeypatch):
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
    loss = types.SimpleNamespace(**{"loss_mode": "megatron_pg_prompt_mean", **changes})
    actor = types.SimpleNamespace(policy_loss=loss, ppo_mini_batch_size=2)
    parts = {"actor": actor, "rollout": types.SimpleNamespace(n=3)}
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


def of_roll(aggregation: str, *, prompts: list[int] = GROUPS, divisor: float | None = None):
    names = [str(prompt).encode() for prompt in prompts]
    tokens, options = [sum(mask) for mask in MASKS[: len(prompts)]], {"divisor": divisor}
    return roll_weights.step_weights(
        aggregation, tokens, names, None, rollouts_per_prompt=3, **options
    )


@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_rolls_weights_times_losses_are_the_objective(aggregation):
    generator = torch.Generator().manual_seed(0)
    losses = [torch.rand(len(mask), generator=generator, dtype=torch.float64) for mask in MASKS]
    divisor = 5.0 if aggregation == "constant" else None
    rows = zip(of_roll(aggregation, divisor=divisor), losses, MASKS, strict=True)
    found = sum(weight * (loss * torch.tensor(mask)).sum() for weight, loss, mask in rows)
    expected = oracle.aggregate(STEP, losses, aggregation, divisor)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_group_that_is_split_over_steps_is_refused():
    with pytest.raises(ValueError, match="1 of the 2 prompts.*gradient_accumulation_steps"):
        of_roll("prompt_mean", prompts=GROUPS[:5])
    assert len(of_roll("sample_mean", prompts=GROUPS[:5])) == 5


def test_a_prompt_that_is_in_a_step_twice_is_refused():
    with pytest.raises(ValueError, match="1 of the 1 prompts.*have 6 samples.*not 3.*drawn twice"):
        of_roll("prompt_mean", prompts=[7] * 6)


def test_factors_undo_the_mean_over_the_kept_tokens():
    kept = torch.tensor([[1, 0, 1], [0, 0, 0]])
    factors = roll_weights.sample_factors([0.25, 0.5], kept, torch.tensor(7))
    assert factors.tolist() == [3.5, 0.0] and factors.dtype == torch.float32


def roll_config(**changes: object) -> types.SimpleNamespace:
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
        roll_weights.refuse_settings("prompt_mean", roll_config(**changes), {})


def test_rolls_divisor():
    assert roll_weights.refuse_settings("sample_mean", roll_config(), {}) is None
    assert roll_weights.refuse_settings("constant", roll_config(), {DIVISOR_VARIABLE: "8"}) == 8.0
    for text in ("", "0", "-1", "nan", "inf", "many"):
        with pytest.raises(ValueError, match=DIVISOR_VARIABLE):
            roll_weights.refuse_settings("constant", roll_config(), {DIVISOR_VARIABLE: text})
    with pytest.raises(ValueError, match="system_envs"):
        roll_weights.refuse_settings("constant", roll_config(), {})
