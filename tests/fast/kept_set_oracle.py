"""The reference of the kept-set tests: float64, one row, one kept id and one element of a product at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def over_kept(
    logit_of: Sequence[Tensor], kept: Sequence[int], target: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of the target and entropy of softmax(logits / temperature) renormalised to the kept ids."""
    ids = list(kept) if kept else list(range(len(logit_of)))
    largest = max(float(logit_of[k].detach()) for k in ids)
    total = torch.zeros((), dtype=torch.float64)
    for k in ids:
        total = total + torch.exp((logit_of[k] - largest) / temperature)
    entropy = torch.zeros((), dtype=torch.float64)
    for k in ids:
        log_p = (logit_of[k] - largest) / temperature - torch.log(total)
        entropy = entropy - torch.exp(log_p) * log_p
    return (logit_of[target] - largest) / temperature - torch.log(total), entropy


@dataclass
class Wanted:
    """What a head must give for a loss: values and gradients, float64."""

    log_probs: Tensor
    entropy: Tensor
    hidden: Tensor
    weight: Tensor


def head(
    hidden: Tensor,
    weight: Tensor,
    kept: Sequence[Sequence[int]],
    targets: Sequence[int],
    to_log_probs: Tensor,
    to_entropy: Tensor,
    temperature: float,
) -> Wanted:
    """The output layer on the kept ids alone, every product written out; `weight` has the vocabulary's own columns."""
    h = hidden.double().clone().requires_grad_()
    w = weight.double().clone().requires_grad_()
    log_probs, entropies, loss = [], [], torch.zeros((), dtype=torch.float64)
    for t, ids in enumerate(kept):
        logit_of = []
        for k in range(len(weight)):
            logit = torch.zeros((), dtype=torch.float64)
            if not ids or k in ids:
                for j in range(hidden.shape[1]):
                    logit = logit + h[t, j] * w[k, j]
            logit_of.append(logit)
        log_prob, entropy = over_kept(logit_of, ids, targets[t], temperature)
        loss = loss + float(to_log_probs[t]) * log_prob + float(to_entropy[t]) * entropy
        log_probs.append(log_prob.detach())
        entropies.append(entropy.detach())
    loss.backward()
    return Wanted(torch.stack(log_probs), torch.stack(entropies), h.grad, w.grad)


def from_logits(
    logits: Tensor,
    kept: Sequence[Sequence[int]],
    targets: Sequence[int],
    to_log_probs: Tensor,
    to_entropy: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropy and the gradient of the logits [tokens, vocabulary]."""
    leaf = logits.double().clone().requires_grad_()
    log_probs, entropies, loss = [], [], torch.zeros((), dtype=torch.float64)
    for t, ids in enumerate(kept):
        row = [leaf[t, k] for k in range(logits.shape[1])]
        log_prob, entropy = over_kept(row, ids, targets[t], temperature)
        loss = loss + float(to_log_probs[t]) * log_prob + float(to_entropy[t]) * entropy
        log_probs.append(log_prob.detach())
        entropies.append(entropy.detach())
    loss.backward()
    return torch.stack(log_probs), torch.stack(entropies), leaf.grad


def random_sets(
    seed: int, tokens: int, vocab_size: int, sizes: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Distinct ids in no order, of sizes that go round, and a target of each set (0: no set, any target)."""
    rng = random.Random(seed)
    kept = [rng.sample(range(vocab_size), sizes[t % len(sizes)]) for t in range(tokens)]
    return kept, [rng.choice(ids) if ids else rng.randrange(vocab_size) for ids in kept]
