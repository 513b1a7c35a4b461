"""The loss protocol of engines: shares of calls against plain loops, and what is refused before a
step.
"""

import math
from dataclasses import replace
from itertools import starmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import PolicyLossConfig, Sample, step_totals
from megatron_pg.integrations import nemo_rl
from megatron_pg.integrations.engine_loss import StepLoss
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
        log_probs, entropy = zip(*starmap(scores_of, part), strict=True)
        shares.append(loss(log_probs, [sample for _, sample in part], entropy))
    value = sum(shares, torch.zeros(()))
    found = torch.autograd.grad(value, logits, allow_unused=True, materialize_grads=True)

    plain = [leaf.detach().double().requires_grad_() for leaf in logits]
    expected = oracle.policy_loss(step, plain, oracle.Objective(**aggregated, **TERMS)).loss
    gradients = torch.autograd.grad(expected, plain, allow_unused=True, materialize_grads=True)
    largest = max(gradient.abs().max() for gradient in gradients)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(found, gradients, strict=True):
        assert (one.double() - other).abs().max() < 1e-6 * largest
    if calls > 1:  # a mutant: one call is left out
        assert abs(shares[0].item()) > 1e-3


def scores_of(logits: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, [response_length], from logits [total_length, vocabulary]."""
    scores = torch.log_softmax(logits[sample.prompt_length - 1 : -1], 1)
    log_probs = scores.gather(1, sample.tokens[sample.prompt_length :, None])[:, 0]
    return log_probs, -(scores.exp() * scores).sum(1)


def test_refusals() -> None:
    samples = package_samples(random_step(3))[:2]
    totals = uneven_totals(samples, allow_different_prompts=True)
    loss = StepLoss(PolicyLossConfig(), totals)
    lengths = [sample.response_length for sample in samples]
    wrong = [torch.zeros(lengths[0] + 1), torch.zeros(lengths[1])]
    words = f"the engine gives {[lengths[0] + 1, lengths[1]]} log-probs or entropies for"
    assert_refused(words, loss, wrong, samples)
    split = [replace(sample, rollout_id=0, group_index=0) for sample in samples]
    accepted = PolicyLossConfig(
        old_log_probs="current", use_sequence_rejection=True, rejection_denominator="accepted"
    )
    totals = uneven_totals(split, allow_different_prompts=True)
    assert_refused("the step has 2 samples of 1 rollouts", StepLoss, accepted, totals)


def test_interpolated_old_log_probs_have_the_version_of_the_step() -> None:
    config = PolicyLossConfig(policy_loss="ppo", old_log_probs="interpolated")
    one = Sample([0, 1, 2], 2, [1, 1], 1.0, rollout_log_probs=[-1.2, -1.2], policy_version=3)
    log_probs = torch.tensor([-1.0, -1.0])
    losses = [StepLoss(config, step_totals([one]), v)([log_probs], [one]) for v in (3, 5)]
    # alpha is 0, then 1 / 2.
    assert [float(loss) for loss in losses] == pytest.approx([-1.0, -math.exp(0.1)])


@pytest.mark.parametrize(
    ("reads", "entropy_coef", "words"),
    [
        ("logit", 0.0, "NeMo-RL's loss_fn reads logit"),
        ("logprob", 0.0, "has force_on_policy_ratio True"),
        ("logprob", 0.02, "entropy_coef is 0.02, but NeMo-RL gives its loss no entropy"),
    ],
)
def test_refusals_of_nemo_rl(reads: str, entropy_coef: float, words: str) -> None:
    policy = SimpleNamespace(train=None, cfg={})
    nemo_rl.train_with(policy, PolicyLossConfig(entropy_coef=entropy_coef), 2)
    input_type = SimpleNamespace(value=reads)
    loss_fn = SimpleNamespace(input_type=input_type, force_on_policy_ratio=True)
    assert_refused(words, policy.train, {}, loss_fn)
