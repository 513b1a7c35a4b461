"""The autograd functions of the fused head: which products run when, over chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.log_probs.autograd import row_passes
from megatron_pg.log_probs.output_layer import WeightGradient, chunk_slices, multiply
from megatron_pg.log_probs.vocabulary_shard import RowStatistics, VocabularyShard


@dataclass(frozen=True)
class ChunkedHead:
    """The output layer's settings, worked out for one call."""

    shard: VocabularyShard
    temperature: Tensor
    fp32_logits: bool
    chunk_tokens: int

    def new_logits(self, rows: int, hidden: Tensor, weight: Tensor) -> Tensor:
        """Uninitialised logits [rows, v/tp] in the dtype they are computed in."""
        dtype = hidden.dtype
        if self.fp32_logits:
            dtype = torch.promote_types(dtype, torch.float32)
        return torch.empty((rows, weight.shape[0]), dtype=dtype, device=hidden.device)

    def score(self, hidden: Tensor, weight: Tensor, targets: Tensor, out: Tensor) -> RowStatistics:
        """Writes the logits to `out` and returns their statistics."""
        multiply(hidden, weight.t(), out)
        statistics: RowStatistics = row_passes(out).row_statistics(
            out, targets, self.shard, self.temperature
        )
        return statistics

    def multiply_out(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        logits: Tensor,
        statistics: RowStatistics,
        coefficients: tuple[Tensor | None, ...],
        hidden_gradient: Tensor | None,
        weight_gradient: WeightGradient | None,
    ) -> None:
        """Overwrites the logits of a chunk with their gradient, and multiplies that by both factors.

        Args:
            inputs: hidden [rows, hidden], weight and targets [rows] of the chunk.
            logits: [rows, v/tp]. Where they are wider than the hidden states, their gradient takes the front
                of each row, in the dtype of the hidden states.
            statistics, coefficients: of the chunk; the gradients to log-probabilities and entropy.
            hidden_gradient: [rows, hidden] to write, or None.
            weight_gradient: to add to, or None.
        """
        hidden, weight, targets = inputs
        gradient = logits
        if logits.dtype != hidden.dtype:
            gradient = logits.view(hidden.dtype)[:, : logits.shape[1]]
        row_passes(logits).write_gradient(
            logits, targets, self.shard, self.temperature, statistics, *coefficients, gradient
        )
        if hidden_gradient is not None:
            multiply(gradient, weight, hidden_gradient)
        if weight_gradient is not None:
            weight_gradient.add(gradient, hidden)


class LinearLogProbs(torch.autograd.Function):
    """Log-probabilities and entropy from hidden states; gradients wait for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: ChunkedHead,
        keep_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        tokens = hidden.shape[0]
        held = tokens if keep_logits else min(head.chunk_tokens, tokens)
        logits = head.new_logits(held, hidden, weight)
        parts = [
            head.score(hidden[rows], weight, targets[rows], logits[: rows.stop - rows.start])
            for rows in chunk_slices(0, tokens, max(held, 1))
        ]
        statistics = RowStatistics.concatenate(parts, like=head.temperature)
        ctx.head, ctx.kept, ctx.overwritten = head, logits if keep_logits else None, False
        ctx.save_for_backward(
            hidden, weight, targets, statistics.maximum, statistics.log_sum, statistics.entropy
        )
        return statistics.log_probs, statistics.entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, maximum, log_sum, entropy = ctx.saved_tensors
        head, tokens = ctx.head, hidden.shape[0]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if all(gradient is None for gradient in gradients):
            return (None,) * 5
        if ctx.overwritten:
            raise RuntimeError("backward through kept logits a second time: they are overwritten")
        buffer, recompute = ctx.kept, ctx.kept is None
        size = min(head.chunk_tokens, tokens) if recompute else tokens
        if recompute:
            buffer = head.new_logits(size, hidden, weight)
        ctx.kept, ctx.overwritten = None, not recompute
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        weight_gradient = WeightGradient(weight, final=True) if needs_weight else None
        whole = RowStatistics(maximum, log_sum, log_probs=maximum, entropy=entropy)
        for rows in chunk_slices(0, tokens, max(size, 1)):
            held = slice(0, rows.stop - rows.start)
            if recompute:
                multiply(hidden[rows], weight.t(), buffer[held])
            coefficients = tuple(None if part is None else part[rows] for part in gradients)
            head.multiply_out(
                (hidden[rows], weight, targets[rows]),
                buffer[held],
                whole.rows(rows),
                coefficients,
                None if hidden_gradient is None else hidden_gradient[rows],
                weight_gradient,
            )
        del buffer  # before the weight's gradient asks for memory
        to_weight = None if weight_gradient is None else weight_gradient.finish()
        return hidden_gradient, to_weight, None, None, None


class LinearTokenLoss(torch.autograd.Function):
    """Loss of a sum over tokens; gradients are computed in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: ChunkedHead,
        token_loss: Callable[[Tensor, Tensor, slice], Tensor],
        gradient_rows: int,
        loss_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        tokens, size = hidden.shape[0], head.chunk_tokens
        work = _ForwardGradients(hidden, weight, needs_hidden, needs_weight, loss_scale)
        buffer = head.new_logits(min(size, tokens), hidden, weight)
        loss = torch.zeros_like(head.temperature)
        parts = []
        scored = chunk_slices(0, gradient_rows, size) + chunk_slices(gradient_rows, tokens, size)
        for rows in scored:
            logits = buffer[: rows.stop - rows.start]
            statistics = head.score(hidden[rows], weight, targets[rows], logits)
            parts.append(statistics)
            value, coefficients = _coefficients(token_loss, statistics, rows)
            loss += value
            if rows.start < gradient_rows:
                work.add(head, logits, targets[rows], statistics, coefficients, rows)
        whole = RowStatistics.concatenate(parts, like=head.temperature)
        ctx.work, ctx.loss_scale = work, loss_scale
        ctx.mark_non_differentiable(whole.log_probs, whole.entropy)
        return loss, whole.log_probs, whole.entropy

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.work is None:
            raise RuntimeError(
                "backward through linear_token_loss a second time: its gradients are given away"
            )
        gradients = ctx.work.finish(grad_loss)
        ctx.work = None
        return (*gradients, None, None, None, None, None)


class _ForwardGradients:
    """Gradients of hidden states and weight that grow chunk by chunk during forward."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        needs_hidden: bool,
        needs_weight: bool,
        loss_scale: Tensor | None,
    ) -> None:
        self._detached, self._weight_values = hidden.detach(), weight.detach()
        self._hidden = torch.zeros_like(self._detached) if needs_hidden else None
        final = loss_scale is not None
        self._weight = WeightGradient(weight, final=final) if needs_weight else None
        self._loss_scale = loss_scale

    def add(
        self,
        head: ChunkedHead,
        logits: Tensor,
        targets: Tensor,
        statistics: RowStatistics,
        coefficients: tuple[Tensor | None, ...],
        rows: slice,
    ) -> None:
        """Turns the chunk's logits into their gradient and multiplies it out."""
        if self._hidden is None and self._weight is None:
            return
        if self._loss_scale is not None:
            scale = self._loss_scale
            coefficients = tuple(None if part is None else part * scale for part in coefficients)
        head.multiply_out(
            (self._detached[rows], self._weight_values, targets),
            logits,
            statistics,
            coefficients,
            None if self._hidden is None else self._hidden[rows],
            self._weight,
        )

    def finish(self, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden states and weight, scaled on the device."""
        if self._loss_scale is not None:
            promised = (grad_loss == self._loss_scale).all()
            if self._hidden is not None:
                self._hidden *= torch.where(promised, 1.0, float("nan"))
            return self._hidden, None if self._weight is None else self._weight.finish()
        hidden_gradient = None
        if self._hidden is not None:
            # In float32: a 0-d factor would be rounded to the dtype of the tensor it multiplies.
            wide = self._hidden.to(grad_loss.dtype).mul_(grad_loss)
            hidden_gradient = wide.to(self._hidden.dtype)
            del wide
        return hidden_gradient, None if self._weight is None else self._weight.finish(grad_loss)


def _coefficients(
    token_loss: Callable[[Tensor, Tensor, slice], Tensor], statistics: RowStatistics, rows: slice
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Value of the loss of a chunk, and its gradients to log-probabilities and entropy."""
    with torch.enable_grad():
        log_probs = statistics.log_probs.detach().requires_grad_()
        entropy = statistics.entropy.detach().requires_grad_()
        loss = token_loss(log_probs, entropy, rows)
    if not loss.requires_grad:
        return loss, (torch.zeros_like(log_probs), None)
    to_log_probs, to_entropy = torch.autograd.grad(loss, (log_probs, entropy), allow_unused=True)
    return loss.detach(), (to_log_probs, to_entropy)
