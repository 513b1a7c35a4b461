"""The weights and refusals of verl's plugin without verl: tests/trainers runs its code."""

import functools
import runpy
import sys
import types

import numpy as np
import pytest
import torch

from megatron_pg.integrations import DIVISOR_VARIABLE, verify, verl
from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.loss.aggregation import AGGREGATIONS
from tests import oracle
from tests.fast.refusals import assert_refused
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
    tokens = PADDED.sum(dim=-1, keepdim=True).clamp(min=1)
    factors = verl.sample_factors(aggregation, PADDED.bool(), TOTALS, divisor)
    weights = factors.double() / (len(MASKS) * tokens)
    if aggregation == "prompt_mean":
        factors, num_groups = verl.group_factors(PADDED, np.array(GROUPS, dtype=object))
        assert num_groups == 2
        weights = weights * factors[:, None]
    found = (losses * PADDED * weights).sum()
    rows = [row[: len(mask)] for row, mask in zip(losses, MASKS, strict=True)]
    expected = oracle.aggregate(STEP, rows, aggregation, divisor)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def install_verl(patch: pytest.MonkeyPatch, **core_algos: object) -> None:
    package = types.SimpleNamespace(__version__="0.9.1", __file__="verl/__init__.py")
    package.core_algos = types.SimpleNamespace(**core_algos)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        patch.setitem(sys.modules, name, package)


def test_the_plugin_registers_the_hooks_alone(monkeypatch):
    """Twice is once. Of an aggregation that a user adds, it has no weights."""

    def into(registry):
        return lambda name: functools.partial(registry.__setitem__, name)

    losses, theirs = {}, ("grpo", "rloo", "gae")
    estimators = dict.fromkeys(theirs)
    registers = {"register_adv_est": into(estimators), "register_policy_loss": into(losses)}
    install_verl(monkeypatch, ADV_ESTIMATOR_REGISTRY=estimators, **registers)
    monkeypatch.setitem(AGGREGATIONS, "fifth", AGGREGATIONS["token_mean"])
    for _ in range(2):
        runpy.run_module("megatron_pg.integrations.verl_plugin")
        assert losses.keys() == {
            f"megatron_pg_{name}{end}" for name in HOOKS for end in ("", "_gspo")
        }
        ours = {f"megatron_pg_prompt_mean_{name}" for name in ("grpo", "rloo")}
        assert estimators.keys() == {*theirs, *ours}


def test_importance_weights_multiply_the_loss_of_their_tokens(monkeypatch):
    """In the place of verl's `vanilla` its token sum alone: the weights come with the response's
    shape.
    """
    generator = torch.Generator().manual_seed(0)
    losses, importance = (torch.rand(PADDED.shape, generator=generator) for _ in range(2))

    def vanilla(advantages, response_mask, loss_agg_mode, rollout_is_weights, **_):
        assert loss_agg_mode == "seq-mean-token-mean"
        sums = (-advantages * response_mask * rollout_is_weights).sum(dim=-1)
        return (sums / response_mask.sum(dim=-1).clamp(min=1)).sum() / len(MASKS), {}

    install_verl(monkeypatch, get_policy_loss_fn={"vanilla": vanilla}.__getitem__)
    monkeypatch.setattr(verify, "verified", {("verl", "sample_mean", "vanilla", None)})
    config = types.SimpleNamespace(engine=None, global_batch_info=TOTALS)
    given = (torch.zeros(PADDED.shape), torch.zeros(PADDED.shape), -losses, PADDED.bool())
    for weights in (importance, torch.zeros_like(importance), None):
        options = {"config": config, "rollout_is_weights": weights}
        found, _ = verl.policy_loss("sample_mean", *given, **options)
        weighted = losses if weights is None else losses * weights
        rows = [row[: len(mask)].double() for row, mask in zip(weighted, MASKS, strict=True)]
        expected = oracle.aggregate(STEP, rows, "sample_mean", None)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}


def plain_verl(scale=1.0, honours_weights=True):
    """As much of verl's two losses as the verification meets, in this test's own words."""

    def loss(
        is_gspo, old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, config, **_
    ):
        change = log_prob - old_log_prob
        if is_gspo:
            means = (change * response_mask).sum(-1, keepdim=True) / response_mask.sum(
                -1, keepdim=True
            )
            change = log_prob - log_prob.detach() + means.detach()
        ratio = change.exp()
        clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
        losses = torch.maximum(-advantages * ratio, -advantages * clipped)
        if not is_gspo:
            held = torch.minimum(losses, -advantages * config.clip_ratio_c)
            losses = torch.where(advantages < 0, held, losses)
        losses = losses * rollout_is_weights if honours_weights else losses
        sums = (losses * response_mask).sum(-1) / response_mask.sum(-1)
        totals = config.global_batch_info
        return sums.sum() / totals["global_batch_size"] * totals["dp_size"] * scale, {}

    return {name: functools.partial(loss, name == "gspo") for name in ("vanilla", "gspo")}


@pytest.mark.parametrize("objective", verl.OBJECTIVES.values())
@pytest.mark.parametrize("aggregation", HOOKS)
def test_a_verl_is_verified_or_refused(aggregation, objective, monkeypatch):
    config = types.SimpleNamespace(global_batch_info={}, **CLIPS)
    loss = aggregation, objective, 5.0 if aggregation == "constant" else None

    def check(losses):
        monkeypatch.setattr(verify, "verified", set())
        install_verl(monkeypatch, get_policy_loss_fn=losses.__getitem__)
        verl.verify_loss(*loss, config)

    check(plain_verl())
    assert config.global_batch_info == {} and verify.verified == {("verl", *loss)}
    words = (
        f"{aggregation} with verl's {objective} | 0.9.1 | a gradient of log-probs is | expected | "
        f"migrating.md"
    )
    assert_refused(words, check, plain_verl(scale=1.0005))
    if aggregation in ("token_mean", "constant"):
        assert_refused(words, check, plain_verl(honours_weights=False))
    assert_refused("fails on tiny samples: KeyError", check, {})


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
        assert verl.sample_factors(aggregation, mask, totals, None).isfinite().all()
    assert verl.group_factors(mask, np.array(["a", "b"], dtype=object))[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
def test_a_missing_total_is_refused(aggregation):
    assert_refused("global_batch_info", verl.sample_factors, aggregation, PADDED.bool(), {}, None)


def test_the_tag_changes_less_than_a_rounding_or_two_and_is_seen(monkeypatch):
    monkeypatch.setattr(verl, "_seen_tagged", False)
    advantages = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    advantages[3] = 0.0
    mask = torch.ones_like(advantages, dtype=torch.bool)
    tagged = verl._tagged(advantages)
    assert tagged[3].tolist() == [0.0] * 8
    assert ((tagged - advantages).abs() <= 2.4e-7 * advantages.abs()).all()
    untagged = (verl._refuse_untagged, advantages, mask)
    assert_refused("adv_estimator=megatron_pg_prompt_mean_grpo", *untagged)
    verl._refuse_untagged(torch.zeros(2, 2), mask[:2, :2])  # shows nothing
    assert_refused("lack their prompt groups", *untagged)
    verl._refuse_untagged(tagged, mask)


def test_verls_divisor(monkeypatch):
    assert verl._divisor(8) == 8.0
    assert_refused("loss_scale_factor to a number", verl._divisor, None)
    monkeypatch.setenv(DIVISOR_VARIABLE, "16")
    assert verl._divisor(None) == verl._divisor(16) == 16.0
    assert_refused("two divisors | loss_scale_factor=8", verl._divisor, 8)
    for value in ("", "0", "-1", "nan", "inf", "many"):
        monkeypatch.setenv(DIVISOR_VARIABLE, value)
        assert_refused(DIVISOR_VARIABLE, verl._divisor, None)


def test_estimator_settings(monkeypatch):
    refuse = functools.partial(verl.refuse_estimator_settings, "grpo")
    assert_refused("no configuration with actor_rollout_ref", refuse, {"gamma": 1.0}, 6, GROUPS)
    loss = types.SimpleNamespace(loss_mode="megatron_pg_prompt_mean")
    actor = types.SimpleNamespace(policy_loss=loss, ppo_mini_batch_size=2)
    parts = {"actor": actor, "rollout": types.SimpleNamespace(n=3)}
    monkeypatch.setattr(verl, "_select", lambda config, key: parts[key.split(".")[-1]])
    refuse(None, 6, GROUPS)
    assert_refused("no uid", refuse, None, 6, None)
    words = "ppo_mini_batch_size to data.train_batch_size"
    assert_refused(words, refuse, None, 12, GROUPS * 2)
    loss.loss_mode = "vanilla"
    assert_refused("policy_loss.loss_mode=vanilla", refuse, None, 6, GROUPS)
