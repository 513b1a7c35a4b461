"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438) over whole responses, on the host, in float64.

Over the active tokens of a response, in order, with V the critic's values and r the rewards:

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}
    R_t     = A_t + V_t                       the critic's target (the lambda-return)

A token that the loss mask drops (a tool's) is no step of the policy: the active tokens around it follow each other. After
the last active token V is 0; where generation was cut off, V is the value of the token that would have come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.critic.settings import CriticConfig
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sample import Values
from megatron_pg.step.values import check_mask, refuse_values

WHITEN_EPSILON = 1e-8
"""Added to the variance, as TRL and verl do; a step of equal advantages becomes one of zeros."""


@dataclass(frozen=True, eq=False)
class Estimates:
    """Advantages and returns of responses; 0 at tokens that the loss mask drops."""

    advantages: list[Tensor]
    """Per response [response_length] float32: `Sample(advantages=...)`."""
    returns: list[Tensor]
    """Per response [response_length] float32: `Sample(returns=...)`."""


def gae(
    rewards: Sequence[Values],
    values: Sequence[Values],
    loss_mask: Sequence[Values],
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    bootstrap_values: Sequence[float] | Tensor | None = None,
) -> Estimates:
    """Estimate advantages and returns of whole responses on the host. Needs no other rank.

    Args:
        rewards: per response `[response_length]`; a reward for the whole response stands on its last active token.
        values: per response `[response_length]`, the critic's values before each token (`compute_values`).
        loss_mask: per response `[response_length]`, 0 and 1.
        gamma: the discount of a token, in [0, 1].
        lam: lambda, in [0, 1].
        bootstrap_values: `[responses]` the value after each response's last token where generation was cut off, 0 where it
            ended; None: all ended.

    Raises:
        ValueError: gamma or lambda is outside [0, 1]; lengths differ; a mask has other numbers than 0 and 1; a reward or
            value at an active token, or a bootstrap value, is not finite; a token that the mask drops has a reward, which
            no active token would get. The response and the position are named.
    """
    CriticConfig(gamma=gamma, lam=lam)
    masks = _vectors("loss_mask", loss_mask)
    lengths = [mask.numel() for mask in masks]
    response_rewards = _vectors("rewards", rewards, lengths)
    response_values = _vectors("values", values, lengths)
    for index, mask in enumerate(masks):
        reward, value = response_rewards[index], response_values[index]
        check_mask(f"loss_mask[{index}]", mask)
        is_active, problem = mask.bool(), " at an active token, expected a finite number"
        refuse_values(f"rewards[{index}]", reward, is_active & ~torch.isfinite(reward), problem)
        refuse_values(f"values[{index}]", value, is_active & ~torch.isfinite(value), problem)
        is_lost = ~is_active & (reward != 0) & is_active.any()
        problem = " at a token that the loss mask drops: give it to an active token, or 0"
        refuse_values(f"rewards[{index}]", reward, is_lost, problem)
    bootstrap = torch.zeros(len(masks), dtype=torch.float64)
    if bootstrap_values is not None:
        (bootstrap,) = _vectors("bootstrap_values", [bootstrap_values], [len(masks)])
        problem = ", expected a finite number, 0 for a response that ended"
        refuse_values("bootstrap_values", bootstrap, ~torch.isfinite(bootstrap), problem)
    is_active = _joined(masks).bool()
    active_values = _joined(response_values)[is_active]
    advantages = _recurrence(
        masks, _joined(response_rewards)[is_active], active_values, gamma, gamma * lam, bootstrap
    )
    return Estimates(
        advantages=_split(is_active, advantages, lengths),
        returns=_split(is_active, advantages + active_values, lengths),
    )


def whiten(
    advantages: Sequence[Tensor],
    loss_mask: Sequence[Values],
    *,
    data_parallel_group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Subtract the step's mean from advantages and divide by its standard deviation (n - 1); 0 at tokens that the mask drops.

    Every data-parallel rank must call it once a step, with all samples that it trains on in that step: one exchange of
    three numbers. The statistics are of the whole step, so that the objective does not depend on micro-batches.

    Args:
        advantages: per response `[response_length]`.
        loss_mask: per response `[response_length]`, 0 and 1.
        data_parallel_group: the data-parallel group *without* context parallelism; None at size 1.

    Raises:
        ValueError: lengths differ; raised on all ranks if they differ on one.
    """

    def active_advantages() -> tuple[Tensor, Tensor, list[int]]:
        masks = _vectors("loss_mask", loss_mask)
        lengths = [mask.numel() for mask in masks]
        is_active = _joined(masks).bool()
        return is_active, _joined(_vectors("advantages", advantages, lengths))[is_active], lengths

    def sums(local: tuple[Tensor, Tensor, list[int]]) -> tuple[int, float, float]:
        values = local[1]
        return values.numel(), float(values.sum()), float(values.square().sum())

    (is_active, values, lengths), rank_sums = compute_and_gather(
        active_advantages, sums, data_parallel_group
    )
    count, total, total_of_squares = map(sum, zip(*rank_sums, strict=True))
    mean = total / max(count, 1)
    variance = max(total_of_squares - count * mean**2, 0.0) / max(count - 1, 1)
    scaled = (values - mean) / math.sqrt(variance + WHITEN_EPSILON)
    return _split(is_active, scaled, lengths)


def _recurrence(
    masks: Sequence[Tensor],
    rewards: Tensor,
    values: Tensor,
    gamma: float,
    decay: float,
    bootstrap: Tensor,
) -> Tensor:
    """Compute the advantages [active tokens] of rewards and values [active tokens], float64, for all responses at once."""
    counts = torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.int64)
    longest = int(counts.max()) if len(masks) else 0
    response = torch.arange(len(masks)).repeat_interleave(counts)
    # Negative columns: responses are aligned at their last token, and the bootstrap value stands behind it.
    column = torch.arange(values.numel()) - counts.cumsum(0)[response]
    reward, value = (torch.zeros(len(masks), longest, dtype=torch.float64) for _ in range(2))
    reward[response, column], value[response, column] = rewards, values
    delta = reward + gamma * torch.cat([value[:, 1:], bootstrap[:, None]], dim=1)
    delta -= value
    for place in range(longest - 2, -1, -1):
        delta[:, place] += decay * delta[:, place + 1]
    return delta[response, column]


def _vectors(
    name: str, rows: Sequence[Values], lengths: Sequence[int] | None = None
) -> list[Tensor]:
    """Convert one row a response to host vectors in float64; refuse other lengths than `lengths`."""
    vectors = [torch.as_tensor(row, dtype=torch.float64, device="cpu") for row in rows]
    if lengths is not None and len(vectors) != len(lengths):
        raise ValueError(
            f"{name} has {len(vectors)} responses and loss_mask {len(lengths)}: give one of each per response"
        )
    for index, vector in enumerate(vectors):
        expected = vector.numel() if lengths is None else lengths[index]
        if vector.shape != (expected,):
            raise ValueError(
                f"{name}[{index}] has shape {list(vector.shape)}, expected [{expected}], one number per response token"
            )
    return vectors


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *vectors])


def _split(is_active: Tensor, values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Put values [active tokens] in their places, 0 elsewhere; return them per response, float32."""
    whole = torch.zeros(len(is_active)).masked_scatter_(is_active, values.float())
    return [part.clone() for part in torch.split(whole, list(lengths))]
