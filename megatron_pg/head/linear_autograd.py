"""The fused head for any loss: which products run when, over chunks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.autograd import refuse_second_derivative, row_passes
from megatron_pg.head.output_layer import WeightGradient, chunk_slices, multiply
from megatron_pg.head.vocabulary_shard import RowStatistics, VocabularyShard


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
        refuse_second_derivative("linear_log_probs_and_entropy")
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
