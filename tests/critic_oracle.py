"""The executable specification of a critic: value loss, its metrics and GAE, in float64 and plain
loops.

It shares no code with `megatron_pg`; aggregation and means over documents are `tests.oracle`'s.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import oracle
from .oracle import PerToken, PlainSample, Step
from .random_steps import float32


def with_values(samples: Step, seed: int = 3) -> list[PlainSample]:
    """The samples with returns above most values, and old values of which a good part clips."""
    rng = random.Random(seed)
    changed = []
    for sample in samples:
        returns = [float32(rng.uniform(1.0, 3.0)) for _ in sample.loss_mask]
        old_values = [float32(rng.uniform(-1.5, 1.5)) for _ in sample.loss_mask]
        changed.append(replace(sample, returns=returns, old_values=old_values))
    return changed


def token_value_loss(
    value: Tensor, old_value: float, return_: float, clip: float
) -> tuple[Tensor, bool]:
    """1/2 max((v - R)^2, (v_clip - R)^2) of one token, and whether the clip decides."""
    change, clipped = value - old_value, value
    if abs(change) > clip:
        bound = old_value + (clip if change > 0 else -clip)
        clipped = torch.tensor(bound, dtype=torch.float64)
    plain, other = (value - return_) ** 2 / 2, (clipped - return_) ** 2 / 2
    return (other, True) if other > plain else (plain, False)


def value_loss(
    samples: Step, values: PerToken, aggregation: str, divisor: float | None, clip: float
) -> tuple[Tensor, dict[str, float]]:
    """The value loss of a step and its metrics; values [response_length] of each sample, with
    gradient.
    """
    zero = torch.zeros((), dtype=torch.float64)
    losses, clipped = [], []
    active_returns, active_errors = [], []
    for sample, of_sample in zip(samples, values, strict=True):
        assert sample.old_values is not None and sample.returns is not None
        token_losses, is_clipped = [], []
        rows = zip(sample.loss_mask, of_sample, sample.old_values, sample.returns, strict=True)
        for keep, value, old_value, return_ in rows:
            loss, clips = zero, False
            if keep:
                loss, clips = token_value_loss(value, old_value, return_, clip)
                active_returns.append(return_)
                active_errors.append(return_ - value.item())
            token_losses.append(loss)
            is_clipped.append(float(clips))
        losses.append(oracle.stack(token_losses))
        clipped.append(torch.tensor(is_clipped, dtype=torch.float64))
    total = oracle.aggregate(samples, losses, aggregation, divisor)
    if not active_returns:
        return total, {}
    of_returns = variance(active_returns)
    explained = 1 - variance(active_errors) / of_returns if of_returns else math.nan
    returns = [torch.tensor(sample.returns, dtype=torch.float64) for sample in samples]
    detached = [each.detach() for each in values]
    return total, {
        "value_loss": total.item(),
        "value": oracle.document_mean(samples, detached),
        "return": oracle.document_mean(samples, returns),
        "value_clipfrac": oracle.document_mean(samples, clipped),
        "explained_variance": explained,
        "value_aggregation_checksum": 1.0,
    }


def variance(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((number - mean) ** 2 for number in numbers) / len(numbers)


def gae(
    rewards: Sequence[float],
    values: Sequence[float],
    mask: Sequence[int],
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Advantages and returns of one response, by the sum that defines them: sum_k (gamma lam)^k
    delta_{t+k}.
    """
    active = [token for token, keep in enumerate(mask) if keep]
    deltas = []
    for place, token in enumerate(active):
        is_last = place + 1 == len(active)
        following = bootstrap if is_last else values[active[place + 1]]
        deltas.append(rewards[token] + gamma * following - values[token])
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for place, token in enumerate(active):
        for later in range(place, len(active)):
            advantages[token] += (gamma * lam) ** (later - place) * deltas[later]
        returns[token] = advantages[token] + values[token]
    return advantages, returns
