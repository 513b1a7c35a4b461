"""One ragged rollout of two optimizer steps, and its gradients in float64, in plain loops."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests import oracle
from tests.oracle import PlainSample
from tests.random_steps import VOCAB_SIZE, float32, random_sample

NUM_GROUPS, ROLLOUTS_PER_GROUP = 4, 4
ROLLOUTS_PER_STEP = 8
DIVISOR = 7.0
KL_COEF, ENTROPY_COEF = 0.05, 0.02
EPS_CLIP, EPS_CLIP_HIGH = 0.2, 0.28
SAMPLES_OF_ROLLOUT = {5: 3, 10: 2}
"""Rollouts that are several samples; the others are one each."""
MASKED = (3, 9)
"""Rollouts without an active token."""


@dataclass(frozen=True)
class Case:
    """One run: an aggregation, how the ranks are laid out, and what was broken on purpose."""

    aggregation: str
    context: int = 1
    data: int = 1
    mutant: str = ""

    def __str__(self) -> str:
        return f"{self.aggregation}, CP {self.context}, DP {self.data}{self.mutant and ', ' + self.mutant}"


def is_kept(token: int) -> bool:
    """The rejection of this test: which response tokens stay."""
    return token % 4 != 2


def samples() -> list[PlainSample]:
    """The samples of the rollout in order; `rollout_id` and `group_index` are set on all."""
    rng = random.Random(11)
    made = []
    for rollout in range(NUM_GROUPS * ROLLOUTS_PER_GROUP):
        group = rollout // ROLLOUTS_PER_GROUP
        prompt = [(group + position) % VOCAB_SIZE for position in range(1 + group)]
        for _ in range(SAMPLES_OF_ROLLOUT.get(rollout, 1)):
            sample = random_sample(
                rng,
                prompt_length=len(prompt),
                response_length=1 if rollout == 6 else rng.randint(2, 14),
                active_rate=0.0 if rollout in MASKED else 0.75,
                group_index=group,
                rollout_id=100 + rollout,
            )
            near = [float32(old + rng.uniform(-0.4, 0.4)) for old in sample.old_log_probs]
            tokens = prompt + sample.tokens[len(prompt) :]
            made.append(replace(sample, tokens=tokens, rollout_log_probs=near))
    return made


def logits(of: Sequence[PlainSample]) -> list[Tensor]:
    """A float32 leaf [total_length, vocabulary] for each sample."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(len(sample.tokens), VOCAB_SIZE, generator=generator).requires_grad_()
        for sample in of
    ]


def token_loss(sample: PlainSample, token: int, row: Tensor) -> Tensor:
    """PPO with truncated importance sampling and rejection, plus KL (k3), minus entropy."""
    position = sample.prompt_length + token
    log_prob, entropy = oracle.log_prob_and_entropy(row, sample.tokens[position])
    old = sample.old_log_probs[token]
    assert sample.rollout_log_probs is not None and sample.ref_log_probs is not None
    settings = oracle.Objective(eps_clip=EPS_CLIP, eps_clip_high=EPS_CLIP_HIGH)
    pg_loss = oracle.ppo_token_loss((log_prob - old).exp(), sample.advantages[token], settings)
    weight = torch.tensor(old - sample.rollout_log_probs[token], dtype=torch.float64).exp()
    kl = oracle.kl_token_loss(log_prob, sample.ref_log_probs[token], "k3")
    loss = pg_loss * weight.clamp(0.0, 2.0) + KL_COEF * kl - ENTROPY_COEF * entropy
    return loss * float(is_kept(token))


def reference(aggregation: str) -> list[tuple[float, dict[int, Tensor]]]:
    """Of each optimizer step the objective, and the gradient of the logits of each sample by its number."""
    everything = samples()
    leaves = [leaf.detach().double().requires_grad_() for leaf in logits(everything)]
    steps = []
    for first in range(0, NUM_GROUPS * ROLLOUTS_PER_GROUP, ROLLOUTS_PER_STEP):
        ids = range(100 + first, 100 + first + ROLLOUTS_PER_STEP)
        members = [number for number, s in enumerate(everything) if s.rollout_id in ids]
        step = [everything[number] for number in members]
        used = [leaves[number] for number in members]
        losses = []
        for sample, leaf in zip(step, used, strict=True):
            rows = leaf[sample.prompt_length - 1 :]
            tokens = range(sample.response_length)
            losses.append(oracle.stack([token_loss(sample, t, rows[t]) for t in tokens]))
        value = oracle.aggregate(step, losses, aggregation, DIVISOR)
        gradients = torch.autograd.grad(value, used, allow_unused=True, materialize_grads=True)
        steps.append((value.item(), dict(zip(members, gradients, strict=True))))
    return steps


def largest_error(found: list[tuple[float, dict[int, Tensor]]], aggregation: str) -> float:
    """max |found - reference| / max |reference| over the logits of every step, and of the reported losses."""
    worst = 0.0
    pairs = zip(found, reference(aggregation), strict=True)
    for (value, gradients), (expected_value, expected) in pairs:
        assert gradients.keys() == expected.keys()
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        for number, gradient in expected.items():
            worst = max(worst, (gradients[number] - gradient).abs().max().item() / largest)
        worst = max(worst, abs(value - expected_value) / abs(expected_value))
    return worst
