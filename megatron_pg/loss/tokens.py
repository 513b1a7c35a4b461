"""The tensors that the policy loss of a micro-batch depends on, one value per response token of
this rank's window.
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
    """The response tokens of one micro-batch on one rank, [window] each.

    Log-probs, advantages, entropy, divergence and centering are 0 and without gradient at masked
    positions, whatever the samples hold there. None stands for what no sample of the step carries,
    or what no setting asks for.
    """

    log_probs: Tensor  # under the policy in training, float32 or float64, with gradient
    entropy: Tensor | None  # in nats, with gradient
    divergence: Tensor | None  # from the teacher in nats, with gradient
    centering: Tensor | None  # [5, window], the values of `head.Centering`, the first with gradient
    sample_ids: Tensor  # int64
    unit_ids: Tensor  # int64, of the sequence, or of the turn under `--sequence-unit turn`
    kept_set_mass: Tensor | None  # probability of the set that the token was sampled from
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
    """Side channels of the samples, for functions of the user's own; the compiled loss has none."""

    @classmethod
    def masked(
        cls, tensors: Mapping[str, Any], side_channels: Mapping[str, object] | None = None
    ) -> Self:
        """Build the tokens from raw tensors by field name, with the inputs masked before anything
        is computed from them.
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
        """Return the tensor of that name, or refuse a micro-batch without it."""
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise ValueError(f"the loss reads {name}, which this micro-batch does not have")
        return values

    def anchor(self, config: PolicyLossConfig) -> Tensor:
        return self.given(config.anchor)

    def mismatch(self) -> Tensor:
        """Subtract the rollout engine's log-probs from the old ones, [window] float64."""
        return self.given("old_log_probs").double() - self.given("rollout_log_probs")


NAMES = tuple(field.name for field in dataclasses.fields(Tokens))
DIFFERENTIATED = ("log_probs", "entropy", "divergence", "centering")
"""The fields to which the loss has a gradient."""


def masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the values [window] in float32 (float64 stays), exactly 0 and without gradient where
    masked.

    A product with the mask would not do: 0 * NaN is NaN, in the value and in the gradient.
    """
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.where(loss_mask, values, 0.0).to(dtype)


def clamped_log_ratio(log_ratio: Tensor, limit: float = MAX_LOG_RATIO) -> Tensor:
    """Hold a log-ratio within +-20, or within another limit, with zero gradient outside. NaN stays
    NaN.
    """
    return torch.where(log_ratio.abs() > limit, log_ratio.detach().clamp(-limit, limit), log_ratio)


def straight_through(log_probs: Tensor) -> Tensor:
    """Return 0 [window] with the gradient of the log-probs; without one where they are infinite,
    whose difference is NaN.
    """
    finite = torch.where(log_probs.isinf(), 0.0, log_probs)
    return finite - finite.detach()


def weighted_log_probs(weights: Tensor, log_probs: Tensor) -> Tensor:
    """Multiply weight * log_prob, [window]; 0 for a weight of 0 and a log-prob of -inf. NaN
    stays NaN.
    """
    return weights * torch.where((weights == 0) & log_probs.isinf(), 0.0, log_probs)


def clip_range(config: PolicyLossConfig) -> tuple[float, float]:
    """Return the bounds of the ratio, (1 - eps_clip, 1 + eps_clip_high)."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return 1.0 - config.eps_clip, 1.0 + high


def clip_range_of_logs(config: PolicyLossConfig) -> tuple[float, float]:
    """Return the logarithms of the bounds of the ratio; minus infinity where eps_clip is 1."""
    lowest, highest = clip_range(config)
    return math.log(lowest) if lowest > 0 else -math.inf, math.log(highest)


def clipped_by_sign(
    values: Tensor, bounds: tuple[float, float], advantages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Hold values from above where A > 0 and from below where A < 0: the minimum of value A and
    clipped value A, over A.

    A value on a bound keeps its gradient, and one beyond it has none. Returns the values; where
    they are outside the bounds; and where they are outside on the side that the sign of A makes
    active.
    """
    # Of two numbers torch.where would make float32, and round the bound of a float64 ratio.
    lowest, highest = (torch.zeros_like(values) + bound for bound in bounds)
    is_above, is_below = values > highest, values < lowest
    is_positive, is_negative = advantages > 0, advantages < 0
    is_effectively_clipped = (is_above & is_positive) | (is_below & is_negative)
    held = torch.where(is_effectively_clipped, torch.where(is_positive, highest, lowest), values)
    return held, is_above | is_below, is_effectively_clipped
