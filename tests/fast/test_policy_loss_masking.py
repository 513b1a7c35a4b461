"""Masked positions, empty ranks and NaN: what must not reach the policy loss, and what must.

Losses and gradients are checked: a masked position may hold anything, an active one hides nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_pg import pack, policy_loss_function
from megatron_pg.loss.metric_table import METRICS
from tests import oracle
from tests.cut_policy_loss import (
    OBJECTIVES,
    aggregated,
    local_logits,
    package_config,
    rank_losses,
    summed_loss,
    summed_metrics,
)
from tests.cut_steps import gradients, whole
from tests.oracle import Objective, PlainSample
from tests.random_steps import (
    package_samples,
    plain_sample,
    random_logits,
    random_step,
    uneven_totals,
)

ABSENT = {row.name for row in METRICS if {"rollout_log_probs", "policy_version"} & {*row.reads}}
"""Metrics of fields that these samples do not carry: 0 over 0."""


def with_garbage(step: list[PlainSample], garbage: float) -> list[PlainSample]:
    """Every per-token field holds garbage where the mask is 0: tool tokens have no log-probs."""
    spoiled = []
    for sample in step:
        masked = [token for token, keep in enumerate(sample.loss_mask) if not keep]
        fields = {}
        for name in ("advantages", "old_log_probs", "ref_log_probs"):
            fields[name] = list(getattr(sample, name))
            for token in masked:
                fields[name][token] = garbage
        spoiled.append(replace(sample, **fields))
    return spoiled


def with_garbage_logits(step, logits, garbage: float) -> list[Tensor]:
    """The logits of rows that score no active token are garbage, and leaves again."""
    spoiled = []
    for sample, part in zip(step, logits, strict=True):
        scored = torch.zeros(len(sample.tokens), 1, dtype=torch.bool)
        for token, keep in enumerate(sample.loss_mask):
            scored[sample.prompt_length + token - 1] = bool(keep)
        spoiled.append(torch.where(scored, part.detach(), garbage).requires_grad_())
    return spoiled


@pytest.mark.parametrize("garbage", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("cp_size", (1, 2))
@pytest.mark.parametrize("name", ("everything", "kl_unbiased", "ppo"))
def test_garbage_at_masked_positions_reaches_neither_loss_nor_gradient(name, cp_size, garbage):
    """-inf or NaN old_log_probs, under exp, give a NaN gradient if only the result is masked."""
    clean = random_step(seed=26)
    assert any(0 in sample.loss_mask for sample in clean)
    clean_logits = random_logits(clean)
    expected = oracle.policy_loss(clean, clean_logits, OBJECTIVES[name]).loss

    step = with_garbage(clean, garbage)
    logits = with_garbage_logits(clean, clean_logits, garbage)
    results = rank_losses(package_config(OBJECTIVES[name]), step, logits, whole(len(step), cp_size))
    found = summed_loss(results)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    wanted = gradients(expected, clean_logits)
    torch.testing.assert_close(gradients(found, logits), wanted, rtol=0, atol=1e-12)
    metrics = summed_metrics(results)
    assert {name for name, value in metrics.items() if not math.isfinite(value)} <= ABSENT


def test_masking_only_the_result_would_give_nan_gradients() -> None:
    """The mutant of the test above: `where` after `exp` is not enough."""
    log_prob = torch.zeros(2, requires_grad=True)
    ratio = (log_prob - torch.tensor([-1.0, -math.inf])).exp()
    torch.where(torch.tensor([True, False]), ratio, 0.0).sum().backward()
    assert log_prob.grad is not None and log_prob.grad[1].isnan()


@pytest.mark.parametrize("field", ("old_log_probs", "ref_log_probs"))
def test_nan_at_an_active_position_stays_visible(field: str) -> None:
    step = random_step(seed=27)
    index = next(index for index, sample in enumerate(step) if 1 in sample.loss_mask)
    values = list(getattr(step[index], field))
    values[step[index].loss_mask.index(1)] = math.nan
    step[index] = replace(step[index], **{field: values})
    logits, config = random_logits(step), package_config(Objective(kl_loss_coef=0.1))
    loss = summed_loss(rank_losses(config, step, logits, whole(len(step))))
    assert loss.isnan() and gradients(loss, logits)[index].isnan().any()


@pytest.mark.parametrize("garbage", (math.nan, math.inf))
def test_garbage_logits_at_an_active_position_stay_visible(garbage: float) -> None:
    sample = plain_sample([1, 1])
    (logits,) = random_logits([sample])
    with torch.no_grad():
        logits[sample.prompt_length, 3] = garbage
    loss = summed_loss(rank_losses(package_config(Objective()), [sample], [logits], whole(1)))
    assert not loss.isfinite()


@pytest.mark.parametrize("name", ("ppo", "everything"))
def test_ranks_without_an_active_token_stay_connected_to_the_graph(name: str) -> None:
    """An empty micro-batch, a rank without response tokens and a fully masked sample."""
    masked = replace(plain_sample([0, 0]), ref_log_probs=[0.0, 0.0])
    outer_chunks = replace(plain_sample([1] * 4, prompt_length=3), ref_log_probs=[0.0] * 4)
    config = package_config(OBJECTIVES[name])
    totals = uneven_totals(package_samples([masked, outer_chunks]))
    for micro_batch in ([], [masked], [outer_chunks]):
        batch = pack(package_samples(micro_batch), cp_rank=0, cp_size=2)
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        rows = local_logits(micro_batch, random_logits(micro_batch), 0, 2).detach().nan_to_num()
        loss, _ = policy_loss_function(config, batch, rows * weight, totals=totals)
        loss.backward()
        assert loss.item() == 0.0 and weight.grad.item() == 0.0


def test_step_without_an_active_token_is_zero_and_finite() -> None:
    step = [plain_sample([0, 0]), plain_sample([0])]
    logits = random_logits(step)
    for aggregation in oracle.AGGREGATIONS:
        config = package_config(aggregated(Objective(), aggregation))
        loss = summed_loss(rank_losses(config, step, logits, whole(2, cp_size=2)))
        assert loss.item() == 0.0 and not any(
            gradient.any() for gradient in gradients(loss, logits)
        )
