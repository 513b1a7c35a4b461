"""Generalized advantage estimation (Schulman et al., arXiv:1506.02438) over whole responses, on the
host, in float64.

Over the active tokens of a response, in order, with V the critic's values and r the rewards:

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}
    R_t     = A_t + V_t                       the critic's target (the lambda-return)

Decoupled GAE uses a different lambda for the A in R. Length-adaptive GAE uses lambda = max(0, 1 -
1 / (alpha l)) for the advantages of a response with l active tokens (both VAPO, arXiv:2504.05118).
A token that the loss mask drops (a tool's) is not a step of the policy: the active tokens around it
follow each other. After the last active token V is 0, or the next token's value if generation was
truncated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_pg.critic.settings import CriticConfig
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sample import Values
from megatron_pg.step.values import check_mask, host_tensor, refuse_values

WHITEN_EPSILON = 1e-8  # added to the variance as in TRL and verl: equal advantages become zeros


@dataclass(frozen=True, eq=False)
class Estimates:
    """Advantages and returns of responses, 0 at tokens that the loss mask drops."""

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
    value_lam: float | None = None,
    lam_alpha: float | None = None,
    bootstrap_values: Sequence[float] | Tensor | None = None,
) -> Estimates:
    """Estimate advantages and returns of whole responses on the host, without communication.

    Args:
        rewards: per response `[response_length]`. A reward for the whole response belongs on its
            last active token.
        values: per response `[response_length]`, the critic's values before each token
            (`compute_values`).
        loss_mask: per response `[response_length]`, 0 or 1.
        gamma: the discount per token, in [0, 1].
        lam: lambda, in [0, 1].
        value_lam: lambda for the returns, in [0, 1]. None: `lam`.
        lam_alpha: alpha of the length-adaptive lambda, above 0, which replaces `lam` in the
            advantages. None: `lam`.
        bootstrap_values: `[responses]` the value after each response's last token if generation was
            truncated, 0 if it ended. None: all ended.

    Raises:
        ValueError: gamma, a lambda or alpha is out of range, lengths differ, a mask is not 0 or 1,
            a reward or value at an active token or a bootstrap value is not finite, or a token that
            the mask drops has a reward, which no active token would get. The message names the
            response and the position.
    """
    CriticConfig(gamma=gamma, lam=lam, value_lam=value_lam, lam_alpha=lam_alpha)
    masks = _vectors("loss_mask", loss_mask)
    lengths = [mask.numel() for mask in masks]
    response_rewards = _vectors("rewards", rewards, lengths)
    response_values = _vectors("values", values, lengths)
    active = [mask.bool() for mask in masks]
    for index, is_active in enumerate(active):
        reward, value = response_rewards[index], response_values[index]
        check_mask(f"loss_mask[{index}]", masks[index])
        problem = " at an active token, expected a finite number"
        refuse_values(f"rewards[{index}]", reward, is_active & ~torch.isfinite(reward), problem)
        refuse_values(f"values[{index}]", value, is_active & ~torch.isfinite(value), problem)
        is_lost = ~is_active & (reward != 0) & is_active.any()
        problem = " at a token that the loss mask drops: move it to an active token"
        refuse_values(f"rewards[{index}]", reward, is_lost, problem)
    bootstrap = torch.zeros(len(masks), dtype=torch.float64, device="cpu")
    if bootstrap_values is not None:
        (bootstrap,) = _vectors("bootstrap_values", [bootstrap_values], [len(masks)])
        problem = ", expected a finite number, 0 for a response that ended"
        refuse_values("bootstrap_values", bootstrap, ~torch.isfinite(bootstrap), problem)
    if not masks:
        return Estimates([], [])
    # Only active tokens, [responses, longest], last token first, so that columns go back in time.
    reward, value = (
        pad_sequence([x[m].flip(0) for x, m in zip(rows, active, strict=True)], batch_first=True)
        for rows in (response_rewards, response_values)
    )
    following = torch.cat([bootstrap[:, None], value], dim=1)[:, :-1]
    deltas = reward + gamma * following - value

    def discounted(lam: float | Tensor) -> Tensor:
        sums = deltas.clone()
        for column in range(1, sums.shape[1]):
            sums[:, column] += gamma * lam * sums[:, column - 1]
        return sums

    lams: float | Tensor = lam
    if lam_alpha is not None:
        num_active = torch.stack([mask.double().sum() for mask in active])
        lams = 1.0 - 1.0 / (lam_alpha * num_active).clamp(min=1.0)
    advantages = discounted(lams)
    is_coupled = value_lam is None and lam_alpha is None
    targets = advantages if is_coupled else discounted(lam if value_lam is None else value_lam)

    def forwards(rows: Tensor) -> list[Tensor]:
        values = [row[: int(m.sum())].flip(0) for row, m in zip(rows, active, strict=True)]
        return _at_active_tokens(active, values)

    return Estimates(advantages=forwards(advantages), returns=forwards(targets + value))


def whiten(
    advantages: Sequence[Tensor],
    loss_mask: Sequence[Values],
    *,
    data_parallel_group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Subtract the step's mean from advantages and divide by its standard deviation (n - 1). Tokens
    that the mask drops get 0.

    Every data-parallel rank must call it once per step, with all its samples of the step. Ranks
    exchange three numbers. The statistics cover the whole step, so that the objective does not
    depend on micro-batches.

    Args:
        advantages: per response `[response_length]`.
        loss_mask: per response `[response_length]`, 0 or 1.
        data_parallel_group: the data-parallel group *without* context parallelism. None at size 1.

    Raises:
        ValueError: lengths differ, or an advantage at an active token is not finite. An error on
            one rank is raised on all.
    """

    def active_advantages() -> tuple[list[Tensor], Tensor]:
        masks = [mask.bool() for mask in _vectors("loss_mask", loss_mask)]
        rows = _vectors("advantages", advantages, list(map(len, masks)))
        for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            problem = " at an active token, expected a finite number"
            refuse_values(f"advantages[{index}]", row, mask & ~torch.isfinite(row), problem)
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        return masks, torch.cat([nothing, *(x[m] for x, m in zip(rows, masks, strict=True))])

    def sums(local: tuple[list[Tensor], Tensor]) -> tuple[int, float, float]:
        values = local[1]
        return values.numel(), float(values.sum()), float(values.square().sum())

    (masks, values), rank_sums = compute_and_gather(active_advantages, sums, data_parallel_group)
    count, total, total_of_squares = map(sum, zip(*rank_sums, strict=True))
    mean = total / max(count, 1)
    variance = max(total_of_squares - count * mean**2, 0.0) / max(count - 1, 1)
    scaled = (values - mean) / math.sqrt(variance + WHITEN_EPSILON)
    counts = [int(mask.sum()) for mask in masks]
    return _at_active_tokens(masks, torch.split(scaled, counts))


def _vectors(
    name: str, rows: Sequence[Values], lengths: Sequence[int] | None = None
) -> list[Tensor]:
    """Convert one row per response to float64 on the host, with lengths checked by `lengths`."""
    vectors = [host_tensor(row).to("cpu", torch.float64) for row in rows]
    if lengths is not None and len(vectors) != len(lengths):
        raise ValueError(
            f"{name} has {len(vectors)} rows and loss_mask {len(lengths)}: pass one of each per "
            "response"
        )
    for index, vector in enumerate(vectors):
        expected = vector.numel() if lengths is None else lengths[index]
        if vector.shape != (expected,):
            raise ValueError(
                f"{name}[{index}] has shape {list(vector.shape)}, expected [{expected}], one "
                f"number per response token"
            )
    return vectors


def _at_active_tokens(masks: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Scatter each response's values to its active tokens, in float32, with 0 elsewhere."""
    return [
        mask.new_zeros(len(mask), dtype=torch.float32).masked_scatter_(mask, active.float())
        for mask, active in zip(masks, values, strict=True)
    ]
