"""The fused head for a loss that is a sum over tokens: all three products in forward, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.autograd import refuse_second_derivative
from megatron_pg.head.forward_gradients import ForwardGradients
from megatron_pg.head.linear_autograd import ChunkedHead
from megatron_pg.head.output_layer import chunk_slices
from megatron_pg.head.vocabulary_shard import RowStatistics

TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""`token_loss(log_probs, entropy, rows)` -> 0-d loss of these rows, both arguments [rows] float32."""


class LinearTokenLoss(torch.autograd.Function):
    """Loss of a sum over tokens; gradients are computed in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: ChunkedHead,
        token_loss: TokenLoss,
        gradient_rows: int,
        loss_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        tokens, size = hidden.shape[0], head.chunk_tokens
        work = ForwardGradients(
            hidden,
            weight,
            needs_hidden=needs_hidden,
            needs_weight=needs_weight,
            gradient_rows=gradient_rows,
            loss_scale=loss_scale,
        )
        buffer = head.new_logits(min(size, tokens), hidden, weight)
        values, parts = [], []
        scored = chunk_slices(0, gradient_rows, size) + chunk_slices(gradient_rows, tokens, size)
        with work.filled():
            for rows in scored:
                logits = buffer[: rows.stop - rows.start]
                statistics = head.score(hidden[rows], weight, targets[rows], logits)
                parts.append(statistics)
                value, coefficients = _coefficients(token_loss, statistics, rows, loss_scale)
                values.append(value)
                if rows.start < gradient_rows:
                    work.add(head, logits, targets[rows], statistics, coefficients, rows)
        whole = RowStatistics.concatenate(parts, like=head.temperature)
        ctx.work = work
        ctx.mark_non_differentiable(whole.log_probs, whole.entropy)
        loss = values[0] if len(values) == 1 else sum(values, torch.zeros_like(head.temperature))
        return loss, whole.log_probs, whole.entropy

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_token_loss")
        if ctx.work is None:
            raise RuntimeError(
                "backward through linear_token_loss a second time: its gradients are given away"
            )
        gradients = ctx.work.finish(grad_loss)
        ctx.work = None
        return (*gradients, None, None, None, None, None)


def _coefficients(
    token_loss: TokenLoss, statistics: RowStatistics, rows: slice, scale: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Value of the loss of a chunk, and `scale` times its gradients to log-probabilities and entropy."""
    with torch.enable_grad():
        log_probs = statistics.log_probs.detach().requires_grad_()
        entropy = statistics.entropy.detach().requires_grad_()
        loss = token_loss(log_probs, entropy, rows)
    if not loss.requires_grad:
        return loss, (torch.zeros_like(log_probs), None)
    incoming = None if scale is None else scale.to(loss.dtype).reshape(loss.shape)
    to_log_probs, to_entropy = torch.autograd.grad(
        loss, (log_probs, entropy), incoming, allow_unused=True
    )
    return loss.detach(), (to_log_probs, to_entropy)
