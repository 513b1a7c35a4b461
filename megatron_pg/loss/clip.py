"""The clip of a ratio: its bounds, and on which side the sign of the advantage makes them active."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig


class Clipped(NamedTuple):
    """Values after the clip, and where it holds them; [window] each."""

    values: Tensor
    """The values, at a bound without gradient where the clip is effective."""
    is_clipped: Tensor
    """Values outside the bounds, bool."""
    is_effectively_clipped: Tensor
    """Values outside on the side that the sign of A makes active, bool."""


def clip_range(config: PolicyLossConfig) -> tuple[float, float]:
    """Return the bounds of the ratio, (1 - eps_clip, 1 + eps_clip_high)."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return 1.0 - config.eps_clip, 1.0 + high


def clip_range_of_logs(config: PolicyLossConfig) -> tuple[float, float]:
    """Return the logarithms of the bounds of the ratio; minus infinity where eps_clip is 1."""
    lowest, highest = clip_range(config)
    return math.log(lowest) if lowest > 0 else -math.inf, math.log(highest)


def clipped_by_sign(values: Tensor, bounds: tuple[float, float], advantages: Tensor) -> Clipped:
    """Hold values from above where A > 0 and from below where A < 0: the minimum of value A and clipped value A, over A.

    Written so, a value on a bound keeps its gradient, and one beyond it has none.
    """
    lowest, highest = bounds
    is_above, is_below = values > highest, values < lowest
    is_positive, is_negative = advantages > 0, advantages < 0
    is_effectively_clipped = (is_above & is_positive) | (is_below & is_negative)
    # Of two numbers torch.where would make float32, and round the bound of a float64 ratio.
    bound = torch.where(is_positive, torch.full_like(values, highest), lowest)
    held = torch.where(is_effectively_clipped, bound, values)
    return Clipped(held, is_above | is_below, is_effectively_clipped)
