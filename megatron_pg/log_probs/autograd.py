"""Log-probabilities and entropy as one differentiable operation over a pair of row passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pg.log_probs import torch_op
from megatron_pg.log_probs.vocabulary_shard import (
    RowStatistics,
    VocabularyShard,
    combine_statistics,
)


class LogProbsAndEntropy(torch.autograd.Function):
    """The op behind `log_probs_and_entropy`; keeps the logits and three numbers a row for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: Tensor,
        row_mask: Tensor | None,
        shard: VocabularyShard,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        local = torch_op.local_statistics(
            logits, targets, shard, temperature, row_mask, with_entropy
        )
        statistics = combine_statistics(local, temperature, row_mask, shard.group)
        ctx.shard = shard
        ctx.save_for_backward(
            logits,
            targets,
            temperature,
            row_mask,
            statistics.maximum,
            statistics.log_sum,
            statistics.entropy,
        )
        return statistics.log_probs, statistics.entropy.clone() if with_entropy else None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = gradients
        logits, targets, temperature, row_mask, maximum, log_sum, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        if row_mask is not None:
            grad_log_probs, grad_entropy = (
                None if gradient is None else torch.where(row_mask, gradient, 0.0)
                for gradient in (grad_log_probs, grad_entropy)
            )
        statistics = RowStatistics(maximum, log_sum, maximum, entropy)
        out = torch.empty_like(logits)
        torch_op.write_gradient(
            logits,
            targets,
            ctx.shard,
            temperature,
            statistics,
            grad_log_probs,
            grad_entropy,
            out,
        )
        return (out,) + (None,) * 5
