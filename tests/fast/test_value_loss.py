"""What the value loss reports and refuses. Its numbers are in `test_cut_invariance`."""

import functools
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_pg import CriticConfig, PolicyLossConfig, Sample, pack
from megatron_pg.critic.value_loss import MicroBatchValueLoss, value_metric_table, value_report
from megatron_pg.critic.value_loss import value_loss as token_loss
from megatron_pg.critic.value_step import values_of_output
from tests import critic_oracle, oracle
from tests.cut_policy_loss import aggregated, package_config
from tests.fast.refusals import assert_refused
from tests.random_steps import uneven_totals

NAN = math.nan


def config_of(aggregation: str, **settings: object) -> PolicyLossConfig:
    return package_config(aggregated(oracle.Objective(), aggregation), **settings)


def reported(config: PolicyLossConfig, samples: list[Sample], values: Tensor, seen=None) -> tuple:
    """The loss and the metrics of a step of one micro-batch, which may hold others than were
    counted.
    """
    batch = pack(samples if seen is None else seen)
    of_batch = MicroBatchValueLoss(config, CriticConfig(), batch, uneven_totals(samples))
    loss, metrics = of_batch(values)
    report = value_report(config, [metrics], "cpu")
    return loss, report.metrics(report.sums)


def answer(tokens: int = 2, **fields: object) -> Sample:
    """A sample after a prompt of one token, of old values 0 and returns 1 where none are given."""
    given = {"old_values": [0.0] * tokens, "returns": [1.0] * tokens, "mask": [1] * tokens} | fields
    return Sample([1] * (tokens + 1), tokens, given.pop("mask"), **given)  # type: ignore[arg-type]


sample = functools.partial(Sample, [1, 2, 3], 2, [1, 1], name="turn 7")


def test_inside_the_clip_range_nothing_is_clipped() -> None:
    """A value a rounding away from the old one must not count as clipped."""
    values = torch.rand(10_000, requires_grad=True)
    old, returns = values.detach() + 0.3 * (torch.rand(10_000) - 0.5), torch.rand(10_000)
    found = token_loss(values, old, returns, 0.2)
    assert torch.equal(found, 0.5 * (values - returns).square())
    found.sum().backward()
    torch.testing.assert_close(values.grad, (values - returns).detach())


def test_a_nan_at_an_active_token_is_named(caplog: pytest.LogCaptureFixture) -> None:
    values, samples = torch.tensor([0.0, NAN]), [answer(name="the one")]
    assert math.isnan(reported(config_of("sample_mean"), samples, values)[1]["value_loss"])
    assert "response token 1 of sample 0 (the one)" in caplog.text


@pytest.mark.parametrize("pg_metrics", ["none", "basic"])
def test_a_step_of_no_active_token(pg_metrics: str) -> None:
    config = config_of("token_mean", pg_metrics=pg_metrics)
    values = torch.zeros(2, requires_grad=True)
    loss, found = reported(config, [answer(mask=[0, 0])], values)
    loss.backward()
    assert found["value_loss"] == 0.0
    assert found["value_aggregation_checksum"] == pytest.approx(1, abs=1e-12)
    assert ("explained_variance" in found) == (pg_metrics == "basic")


@pytest.mark.parametrize(
    ("tokens", "value", "rounding"), [(2, 0.1, 0), (1000, 2.8, -1), (333, 2.8, 1)]
)
def test_equal_returns_explain_nothing(tokens: int, value: float, rounding: int) -> None:
    """Of many equal returns rounding makes a variance, -9e-16 of a thousand times 2.8: it is none
    either.
    """
    config, batch = config_of("sample_mean"), pack([answer(tokens, returns=[value] * tokens)])
    loss = MicroBatchValueLoss(config, CriticConfig(), batch, uneven_totals(batch.samples))
    _, metrics = loss(torch.linspace(0.0, 1.0, tokens))
    report = value_report(config, [metrics], "cpu")
    sums = dict(zip(value_metric_table(config).names, report.sums[:, 0].tolist(), strict=True))
    rounded = sums["return_squared_sum"] / tokens - (sums["return_sum"] / tokens) ** 2
    assert (rounded > 0) - (rounded < 0) == rounding
    assert math.isnan(report.metrics(report.sums)["explained_variance"])


def test_a_small_variance_of_large_returns_is_explained() -> None:
    """Returns 100 +- 0.01: a variance of 1e-8 of the mean square is a variance."""
    returns = [100.0, 100.01, 99.99, 100.01]
    returned = torch.tensor(returns)
    values = returned + torch.tensor([0.005, -0.005, 0.005, -0.005])
    _, found = reported(config_of("sample_mean"), [answer(4, returns=returns)], values)
    pair = (returned - values, returned)
    unexplained, variance = (critic_oracle.variance(each.double().tolist()) for each in pair)
    expected = 1 - unexplained / variance
    assert found["explained_variance"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("seen", "said"), [((0, 1, 2), None), ((0, 1), "answer 2"), ((0, 1, 0, 1), "answer 1")]
)
def test_a_sample_that_the_critic_did_not_see_is_an_error_under_check_aggregation(seen, said):
    one = answer(returns=[1.0, 2.0])
    samples = [replace(one, tokens=[1, 2, 3 + i], name=f"answer {i}") for i in range(3)]
    config, values = config_of("sample_mean", check_aggregation=True), torch.zeros(2 * len(seen))
    with pytest.raises(RuntimeError, match=said) if said else nullcontext():
        _, found = reported(config, samples, values, [samples[index] for index in seen])
        assert found["value_aggregation_checksum"] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("missing", ["old_values", "returns"])
def test_missing_values_are_refused_by_sample_and_field(missing: str) -> None:
    samples, words = [answer(name="turn 7", **{missing: None})], f"turn 7 has no {missing}"
    given = (config_of("sample_mean"), samples, torch.zeros(2))
    assert_refused(f"{words} | Sample({missing}=...)", reported, *given)
    assert_refused(f"turn 7 | has no {missing}", pack, [answer(), *samples])


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (sample, {"returns": [0.0]}, "turn 7: returns has 1 values, expected one per response"),
        (sample, {"old_values": "no"}, "turn 7: old_values is not a sequence of numbers"),
        (CriticConfig, {"value_clip": 0.0}, "--value-clip must be a finite number > 0, not 0.0"),
        (CriticConfig, {"value_clip": -1.0, "gamma": 1.5}, "--value-clip | --gamma | not 1.5"),
        (CriticConfig, {"lam": -0.1}, "--lam must be a finite number >= 0 and <= 1, not -0.1"),
        (CriticConfig, {"gamma": NAN}, "--gamma"),
    ],
)
def test_values_and_settings_out_of_range_are_refused(make, settings: dict, words: str) -> None:
    assert_refused(words, make, **settings)


def test_logits_are_no_values() -> None:
    batch, words = pack([sample()]), "[1, 3, 16] | 3 tokens | add_value_head"
    assert_refused(words, values_of_output, batch, torch.zeros(1, 3, 16))
