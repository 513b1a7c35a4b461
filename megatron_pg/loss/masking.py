"""Reading the per-token inputs of the loss: masked before anything is computed from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import LOG_PROB_FIELDS, MAX_LOG_RATIO
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import Sample


def masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """The values [window] in float32 (float64 stays), exactly 0 and without gradient where masked.

    A product with the mask would not do: 0 * NaN is NaN, in the value and in the gradient.
    """
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.where(loss_mask, values, 0.0).to(dtype)


def clamped_log_ratio(log_ratio: Tensor, limit: float = MAX_LOG_RATIO) -> Tensor:
    """The log-ratio within +-20, or values within another limit, with zero gradient outside. NaN stays NaN, with a NaN
    gradient."""
    return torch.where(log_ratio.abs() > limit, log_ratio.detach().clamp(-limit, limit), log_ratio)


def straight_through(log_probs: Tensor) -> Tensor:
    """0 [window] with the gradient of the log-probs; without one where they are infinite, whose difference is NaN."""
    finite = torch.where(log_probs.isinf(), 0.0, log_probs)
    return finite - finite.detach()


def weighted_log_probs(weights: Tensor, log_probs: Tensor) -> Tensor:
    """The products weight * log_prob, [window]; 0 of a weight of 0 and a log-prob of -inf. NaN stays NaN."""
    return weights * torch.where((weights == 0) & log_probs.isinf(), 0.0, log_probs)


def given_log_probs(carrier: PackedBatch | Sample, field: str, needed_by: str) -> Tensor:
    """The masked log-probs of that name, [window] or [response_length]. No gradient.

    Raises:
        ValueError: there are none; it says what needs them.
    """
    log_probs: Tensor | None = getattr(carrier, field)
    if log_probs is None:
        raise ValueError(
            f"{needed_by} needs {field}: give Sample({field}=...) to every sample of the step"
        )
    return masked(log_probs.detach(), carrier.loss_mask)


def with_masked_inputs(batch: PackedBatch) -> PackedBatch:
    """The micro-batch as a custom function gets it: advantages and log-probs are 0 where masked."""
    changes: dict[str, Any] = {
        name: masked(values, batch.loss_mask)
        for name in ("advantages", *LOG_PROB_FIELDS)
        if (values := getattr(batch, name)) is not None
    }
    return dataclasses.replace(batch, **changes)
