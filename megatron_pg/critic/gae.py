"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438) over whole responses, on the host, in float64.

Over the active tokens of a response, in order, with V the critic's values and r the rewards:

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}
    R_t     = A_t + V_t                       what the critic is trained to (the lambda-return)

A token that the loss mask drops (a tool's) is no step of the policy: the tokens around it follow each other. After the last
active token V is 0, or where generation was cut the value of what would have come: a response that was cut off has not ended.
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
    """What GAE makes of each response; 0 at tokens that the loss mask drops."""

    advantages: list[Tensor]
    """Of each response [response_length] float32: `Sample(advantages=...)`."""
    returns: list[Tensor]
    """Of each response [response_length] float32: `Sample(returns=...)`."""


def gae(
    rewards: Sequence[Values],
    values: Sequence[Values],
    loss_mask: Sequence[Values],
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    bootstrap_values: Sequence[float] | Tensor | None = None,
) -> Estimates:
    """Advantages and returns of responses, each whole and on the host. Needs no other rank.

    Args:
        rewards: of each response `[response_length]`; a reward for the whole response stands on its last active token.
        values: of each response `[response_length]`, the critic's values before each token (`compute_values`).
        loss_mask: of each response `[response_length]`, 0 and 1.
        gamma: the discount of a token, in [0, 1].
        lam: lambda, in [0, 1].
        bootstrap_values: `[responses]` the value after each response's last token where generation was cut off, 0 where it
            ended; None: all ended.

    Raises:
        ValueError: gamma or lambda outside [0, 1]; lengths that differ; a mask other than 0 and 1; a reward, a value or a
            bootstrap value that is not finite at an active token; a reward at a token that the mask drops, which no token
            would be credited with. The response and the position are named.
    """
    CriticConfig(gamma=gamma, lam=lam)
    masks = _vectors("loss_mask", loss_mask)
    lengths = [mask.numel() for mask in masks]
    reward, value = (_vectors(n, x, lengths) for n, x in (("rewards", rewards), ("values", values)))
    for index, (mask, r, v) in enumerate(zip(masks, reward, value, strict=True)):
        check_mask(f"loss_mask[{index}]", mask)
        is_active, problem = mask.bool(), " at an active token, expected a finite number"
        refuse_values(f"rewards[{index}]", r, is_active & ~torch.isfinite(r), problem)
        refuse_values(f"values[{index}]", v, is_active & ~torch.isfinite(v), problem)
        is_lost = ~is_active & (r != 0) & is_active.any()
        problem = " at a token that the loss mask drops: give it to an active token, or 0"
        refuse_values(f"rewards[{index}]", r, is_lost, problem)
    bootstrap = torch.zeros(len(masks), dtype=torch.float64)
    if bootstrap_values is not None:
        (bootstrap,) = _vectors("bootstrap_values", [bootstrap_values], [len(masks)])
        problem = ", expected a finite number, 0 for a response that ended"
        refuse_values("bootstrap_values", bootstrap, ~torch.isfinite(bootstrap), problem)
    flat_mask, flat_reward, flat_value = (_joined(each) for each in (masks, reward, value))
    active = flat_mask.nonzero().squeeze(1)
    flat_value = flat_value[active]
    advantages = _recurrence(masks, flat_reward[active], flat_value, gamma, gamma * lam, bootstrap)
    return Estimates(
        advantages=_split(flat_mask, active, advantages, lengths),
        returns=_split(flat_mask, active, advantages + flat_value, lengths),
    )


def whiten(
    advantages: Sequence[Tensor],
    loss_mask: Sequence[Values],
    *,
    data_parallel_group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Advantages less their mean over the step, over their standard deviation (n - 1); 0 at tokens that the mask drops.

    Every data-parallel rank must call it once a step, with all samples that it trains on in that step: one exchange of
    three numbers. Statistics of the step and not of a micro-batch: the objective stays free of how the step is cut.

    Args:
        advantages: of each response `[response_length]`.
        loss_mask: of each response `[response_length]`, 0 and 1.
        data_parallel_group: the data-parallel group *without* context parallelism; None at size 1.

    Raises:
        ValueError: lengths that differ, on all ranks where they do on one.
    """

    def of_rank() -> tuple[Tensor, Tensor, Tensor, list[int]]:
        masks = _vectors("loss_mask", loss_mask)
        lengths = [mask.numel() for mask in masks]
        flat_mask, values = _joined(masks), _joined(_vectors("advantages", advantages, lengths))
        active = flat_mask.nonzero().squeeze(1)
        return flat_mask, active, values[active], lengths

    def sums(found: tuple[Tensor, Tensor, Tensor, list[int]]) -> tuple[int, float, float]:
        values = found[2]
        return values.numel(), float(values.sum()), float(values.square().sum())

    (flat_mask, active, mine, lengths), everyone = compute_and_gather(
        of_rank, sums, data_parallel_group
    )
    count, total, of_squares = map(sum, zip(*everyone, strict=True))
    mean = total / max(count, 1)
    variance = max(of_squares - count * mean**2, 0.0) / max(count - 1, 1)
    scaled = (mine - mean) / math.sqrt(variance + WHITEN_EPSILON)
    return _split(flat_mask, active, scaled, lengths)


def _recurrence(
    masks: Sequence[Tensor],
    rewards: Tensor,
    values: Tensor,
    gamma: float,
    decay: float,
    bootstrap: Tensor,
) -> Tensor:
    """The advantages [active tokens] float64 of rewards and values [active tokens]; all responses go back in step."""
    counts = torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.int64)
    longest = int(counts.max()) if len(masks) else 0
    response = torch.arange(len(masks)).repeat_interleave(counts)
    # From the end, as they are aligned at their last token, behind which the bootstrap value stands.
    column = torch.arange(values.numel()) - counts.cumsum(0)[response]
    reward, value = (torch.zeros(len(masks), longest, dtype=torch.float64) for _ in range(2))
    reward[response, column], value[response, column] = rewards, values
    delta = reward + gamma * torch.cat([value[:, 1:], bootstrap[:, None]], dim=1)
    delta -= value
    for place in range(longest - 2, -1, -1):
        delta[:, place] += decay * delta[:, place + 1]
    return delta[response, column]


def _vectors(
    name: str, given: Sequence[Values], lengths: Sequence[int] | None = None
) -> list[Tensor]:
    """Host vectors in float64, one a response, of these lengths."""
    vectors = [torch.as_tensor(each, dtype=torch.float64, device="cpu") for each in given]
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


def _split(
    flat_mask: Tensor, active: Tensor, values: Tensor, lengths: Sequence[int]
) -> list[Tensor]:
    """Values of active tokens [active tokens] in their places, by response, float32."""
    whole = torch.zeros_like(flat_mask).index_copy_(0, active, values).float()
    return [part.clone() for part in torch.split(whole, list(lengths))]
