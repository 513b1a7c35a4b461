"""The loss that a step should have, in float64 plain loops over whole, unpacked samples.

It shares no code with the reducers, the token window or the scale contract that it judges.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_pg.check.steps import DIVISOR, ENTROPY_COEFFICIENT, KL_COEFFICIENT
from megatron_pg.step.sample import Sample


def response_log_probs(sample: Sample, logits: Tensor) -> tuple[Tensor, Tensor]:
    """([response] log-probs, [response] entropy), float64, from the ``[total_length, vocab]`` logits of one sample."""
    log_softmax = torch.log_softmax(logits.double(), dim=-1)
    log_probs, entropies = [], []
    for position in range(sample.prompt_length, sample.total_length):
        row = log_softmax[position - 1]
        log_probs.append(row[int(sample.tokens[position])])
        entropies.append(-(row.exp() * row).sum())
    if not log_probs:
        return log_softmax.new_zeros(0), log_softmax.new_zeros(0)
    return torch.stack(log_probs), torch.stack(entropies)


def reference_loss(aggregation: str, samples: Sequence[Sample], logits: Sequence[Tensor]) -> Tensor:
    """0-d float64: the whole step's loss, differentiable through the logits of every sample."""
    rollout_tokens: dict[object, int] = {}
    group_tokens: dict[object, int] = {}
    for sample in samples:
        active = int(sample.loss_mask.sum())
        rollout_tokens[sample.rollout_id] = rollout_tokens.get(sample.rollout_id, 0) + active
        group_tokens[sample.group_index] = group_tokens.get(sample.group_index, 0) + active
    all_tokens = sum(rollout_tokens.values())
    pg_loss = penalty = torch.zeros((), dtype=torch.float64, device=logits[0].device)
    for sample, sample_logits in zip(samples, logits, strict=True):
        log_probs, entropies = response_log_probs(sample, sample_logits)
        own = rollout_tokens[sample.rollout_id]
        weight = {
            "sample_mean": 1 / (len(rollout_tokens) * max(own, 1)),
            "prompt_mean": 1 / (len(group_tokens) * max(group_tokens[sample.group_index], 1)),
            "token_mean": 1 / max(all_tokens, 1),
            "constant": 1 / (len(rollout_tokens) * DIVISOR),
        }[aggregation]
        for token in range(sample.response_length):
            if not sample.loss_mask[token]:
                continue
            pg_loss = pg_loss + weight * _ppo(sample, token, log_probs[token])
            kl = _k3(log_probs[token] - _number(sample.ref_log_probs, token))
            term = KL_COEFFICIENT * kl - ENTROPY_COEFFICIENT * entropies[token]
            penalty = penalty + term / (len(rollout_tokens) * max(own, 1))
    return pg_loss + penalty


def _ppo(sample: Sample, token: int, log_prob: Tensor) -> Tensor:
    advantage = _number(sample.advantages, token)
    ratio = torch.exp(log_prob - _number(sample.old_log_probs, token))
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def _k3(difference: Tensor) -> Tensor:
    return torch.exp(-difference) - 1 + difference


def _number(values: Tensor | float | None, token: int) -> float:
    return float(torch.as_tensor(values)[token])
