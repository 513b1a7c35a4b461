"""Multi-token prediction beside the policy loss: a mean over the step's active tokens, whatever the cut.

Megatron computes it inside the model from labels that it makes of the input, as a mean over the tokens of one micro-batch
on one context-parallel rank, prompts and padding included (`process_mtp_loss` in transformer/multi_token_prediction.py of
0.19.2), and averages these means: another loss at every cut. It takes a loss mask, by whose sum it divides where that is
above 1. A mask of m / T, with T the active tokens of the step, adds up to 1 at most and so is a weight; the schedule
divides by the M micro-batches and data parallelism by its DP * CP ranks, which `mtp_grad_scale_func` makes up for. What is
left is `scaling factor / layers * 1/T sum m x`, x the cross-entropy of a token two or more positions ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config.versions import derives_multi_token_labels
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.totals import StepTotals


@dataclass
class MultiTokenScale:
    """The `mtp_grad_scale_func` of a model's config: what the schedule and data parallelism divide by, undone."""

    config: Any
    factor: float
    """DP * CP * M of the step that runs."""
    of_trainer: Any
    """The function that was there before, or None."""
    device: torch.device
    """That of the model, where an optimizer has its loss scale; a number of the host's would be waited for."""

    def __call__(self) -> Tensor:
        if self.of_trainer is not None:
            return torch.as_tensor(self.of_trainer()) * self.factor
        scale, one = self.config.grad_scale_func, torch.ones(1, device=self.device)
        return torch.as_tensor(one if scale is None else scale(one)) * self.factor


def scale_multi_token_loss(chunk: Any, factor: float) -> bool:
    """Sets the scale of a step's multi-token prediction on the config of a model's chunk; whether it has any that is trained."""
    model_config: Any = getattr(chunk, "config", None)
    if not getattr(model_config, "mtp_num_layers", None) or not derives_multi_token_labels():
        return False
    device = next(chunk.parameters()).device
    before = model_config.mtp_grad_scale_func
    if isinstance(before, MultiTokenScale):
        before = before.of_trainer
    model_config.mtp_grad_scale_func = MultiTokenScale(model_config, factor, before, device)
    return True


def multi_token_mask(batch: PackedBatch, totals: StepTotals) -> Tensor:
    """The `loss_mask=` [1, local_tokens] float32 of the model: 1 / T for the input's active response tokens, else 0."""
    masks = [torch.zeros(0)]
    for sample in batch.samples:
        masks += [torch.zeros(sample.prompt_length), sample.loss_mask.float()]
    weights = torch.cat([*masks, torch.zeros(1)]) / max(totals.num_active_tokens, 1)
    return to_device(weights[batch.window.token_indices], batch.tokens.device)[None]
