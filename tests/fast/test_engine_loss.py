"""The loss protocol of engines: shares of calls against plain loops, and what the adapters refuse before a step."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import PolicyLossConfig, Sample
from megatron_pg.integrations import nemo_rl
from megatron_pg.integrations.engine_loss import StepLoss, of_response, refuse_settings
from tests import oracle
from tests.fast.refusals import assert_refused
from tests.random_steps import package_samples, random_logits, random_step, uneven_totals

DIVISOR = 5.0
TERMS: dict[str, Any] = {"entropy_coef": 0.03, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}


@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
@pytest.mark.parametrize("calls", [1, 3])
def test_shares_of_calls_are_the_objective(aggregation: str, calls: int) -> None:
    step = random_step(3)
    divisor = DIVISOR if aggregation == "constant" else None
    aggregated = {"loss_aggregation": aggregation, "loss_aggregation_divisor": divisor}
    samples = package_samples(step)
    totals = uneven_totals(samples, allow_different_prompts=True)
    loss = StepLoss(PolicyLossConfig(**aggregated, **TERMS), totals)
    logits = [leaf.float().detach().requires_grad_() for leaf in random_logits(step)]
    shares, rows = [], list(zip(logits, samples, strict=True))
    for part in (rows[call::calls] for call in range(calls)):
        outputs = (map(of_response, column, samples_of(part)) for column in scores_of(part))
        log_probs, entropy = map(list, outputs)
        shares.append(loss(log_probs, samples_of(part), entropy))
    value = sum(shares, torch.zeros(()))
    found = torch.autograd.grad(value, logits, allow_unused=True, materialize_grads=True)

    check(aggregated, step, logits, value, found)
    if calls > 1:  # a mutant: one call is left out
        assert abs(shares[0].item()) > 1e-3


Row = tuple[Tensor, Sample]


def samples_of(rows: Sequence[Row]) -> list[Sample]:
    return [sample for _, sample in rows]


def scores_of(rows: Sequence[Row]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs of the next tokens, and entropies, [total_length] each, as a model gives them."""
    log_probs, entropies = [], []
    for leaf, sample in rows:
        scores = torch.log_softmax(leaf, 1)
        log_probs.append(scores.gather(1, sample.tokens.roll(-1)[:, None])[:, 0])
        entropies.append(-(scores.exp() * scores).sum(1))
    return log_probs, entropies


def check(
    aggregated: dict[str, Any],
    step: list[oracle.PlainSample],
    logits: list[Tensor],
    value: Tensor,
    found: Sequence[Tensor],
) -> None:
    """Compare the loss and every logit's gradient with the float64 loops."""
    plain = [leaf.detach().double().requires_grad_() for leaf in logits]
    expected = oracle.policy_loss(step, plain, oracle.Objective(**aggregated, **TERMS)).loss
    gradients = torch.autograd.grad(expected, plain, allow_unused=True, materialize_grads=True)
    largest = max(gradient.abs().max() for gradient in gradients)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(found, gradients, strict=True):
        assert (one.double() - other).abs().max() < 1e-6 * largest


def test_refusals() -> None:
    samples = package_samples(random_step(3))[:2]
    totals = uneven_totals(samples, allow_different_prompts=True)
    loss = StepLoss(PolicyLossConfig(), totals)
    lengths = [sample.response_length for sample in samples]
    wrong = [torch.zeros(lengths[0] + 1), torch.zeros(lengths[1])]
    words = f"the engine gives {[lengths[0] + 1, lengths[1]]} log-probs or entropies for"
    assert_refused(words, loss, wrong, samples)

    config = PolicyLossConfig(eps_clip=0.1, entropy_coef=0.02)
    assert_refused(
        "entropy_coef is 0.02, and X hands its loss no entropy",
        refuse_settings,
        "X",
        None,
        {},
        config,
    )
    policy = SimpleNamespace(train=None, cfg={})
    nemo_rl.train_with(policy, PolicyLossConfig(), 2)
    for theirs, words in (
        ("logit", "NeMo-RL's loss_fn reads logit"),
        ("logprob", "has force_on_policy_ratio True"),
    ):
        loss_fn = SimpleNamespace(
            input_type=SimpleNamespace(value=theirs), force_on_policy_ratio=True
        )
        assert_refused(words, policy.train, {}, loss_fn)
