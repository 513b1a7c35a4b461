"""Input tensors of a micro-batch's policy loss, one value per response token in this rank's
window.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from megatron_pg.config.objective import MAX_LOG_RATIO
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.tables import LOG_PROB_FIELDS


@dataclass(frozen=True, eq=False)
class Tokens:
    """Response tokens of one micro-batch on one rank, [window] each.

    Log-probs, advantages, entropy, divergence and centering are 0 without gradient at masked
    positions, for any values in the samples. Fields that no sample has or no setting needs are
    None.
    """

    log_probs: Tensor  # under the policy in training, float32 or float64, with gradient
    entropy: Tensor | None  # in nats, with gradient
    divergence: Tensor | None  # from the teacher in nats, with gradient
    centering: Tensor | None  # [5, window], values of `head.Centering`, the first with gradient
    sample_ids: Tensor  # int64
    unit_ids: Tensor  # int64, the sequence, or the turn with `--sequence-unit turn`
    kept_set_mass: Tensor | None  # probability of the token's sampling set
    # As in `PackedBatch`:
    loss_mask: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    loss_weights: Tensor | None
    policy_version: Tensor | None
    kept_set_size: Tensor | None
    side_channels: Mapping[str, object] = field(default_factory=dict)
    """Side channels of the samples, for custom functions. Empty in the compiled loss."""

    @classmethod
    def masked(
        cls, tensors: Mapping[str, Any], side_channels: Mapping[str, object] | None = None
    ) -> Self:
        """Build the tokens from raw tensors by field name, and mask the inputs before any
        computation.
        """
        fields: dict[str, Any] = {name: tensors.get(name) for name in NAMES}
        fields["side_channels"] = side_channels or {}
        if fields["unit_ids"] is None:
            fields["unit_ids"] = fields["sample_ids"]
        for name in (*DIFFERENTIATED, "advantages", *LOG_PROB_FIELDS):
            if (values := fields[name]) is not None:
                values = values if name in DIFFERENTIATED else values.detach()
                fields[name] = masked(values, fields["loss_mask"])
        return cls(**fields)

    def given(self, name: str) -> Tensor:
        """Return the tensor of this name, or raise a ValueError if it is None."""
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise ValueError(f"the loss reads {name}, which this micro-batch lacks")
        return values

    def anchor(self, config: PolicyLossConfig) -> Tensor:
        return self.given(config.anchor)

    def mismatch(self) -> Tensor:
        """Subtract the rollout engine's log-probs from the old ones, [window] float64."""
        return self.given("old_log_probs").double() - self.given("rollout_log_probs")


NAMES = tuple(field.name for field in dataclasses.fields(Tokens))
DIFFERENTIATED = ("log_probs", "entropy", "divergence", "centering")
"""Fields with a gradient of the loss."""


def masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the values [window] in float32 (float64 stays), exactly 0 without gradient if masked.

    Not a product with the mask, because 0 * NaN is NaN in the value and in the gradient.
    """
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.where(loss_mask, values, 0.0).to(dtype)


def clamped_log_ratio(log_ratio: Tensor, limit: float = MAX_LOG_RATIO) -> Tensor:
    """Clamp a log-ratio to +-20, or to `limit`, with zero gradient outside. NaN stays NaN."""
    return torch.where(log_ratio.abs() > limit, log_ratio.detach().clamp(-limit, limit), log_ratio)


def straight_through(log_probs: Tensor) -> Tensor:
    """Return 0 [window] with the gradient of the log-probs. Infinite ones have no gradient, because
    their difference is NaN.
    """
    finite = torch.where(log_probs.isinf(), 0.0, log_probs)
    return finite - finite.detach()


def weighted_log_probs(weights: Tensor, log_probs: Tensor) -> Tensor:
    """Multiply weight * log_prob, [window], with 0 * -inf = 0. NaN stays NaN."""
    return weights * torch.where((weights == 0) & log_probs.isinf(), 0.0, log_probs)


def clip_range(config: PolicyLossConfig) -> tuple[float, float]:
    """Return the ratio's bounds (1 - eps_clip, 1 + eps_clip_high)."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return 1.0 - config.eps_clip, 1.0 + high


def clip_range_of_logs(config: PolicyLossConfig) -> tuple[float, float]:
    """Return the logarithms of the ratio's bounds, with minus infinity if eps_clip is 1."""
    lowest, highest = clip_range(config)
    return math.log(lowest) if lowest > 0 else -math.inf, math.log(highest)


def clipped_by_sign(
    values: Tensor, bounds: tuple[float, float], advantages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip values from above if A > 0 and from below if A < 0: min(value A, clipped value A) / A.

    A value on a bound keeps its gradient, and one beyond it has none. Returns the values, a mask of
    values outside the bounds, and a mask of values outside on the side that the sign of A
    activates.
    """
    # From two numbers torch.where would make float32 and round the bounds of a float64 ratio.
    lowest, highest = (torch.zeros_like(values) + bound for bound in bounds)
    is_above, is_below = values > highest, values < lowest
    is_positive, is_negative = advantages > 0, advantages < 0
    is_effectively_clipped = (is_above & is_positive) | (is_below & is_negative)
    held = torch.where(is_effectively_clipped, torch.where(is_positive, highest, lowest), values)
    return held, is_above | is_below, is_effectively_clipped
