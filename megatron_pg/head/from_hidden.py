"""The output layer together with the log-prob op, without the logits of all tokens in memory.

Three matrix products are needed: logits, gradient of the hidden states, gradient of the weight. Which
order of work reaches them depends on when the gradient of the loss to the log-probabilities is known:

* as soon as the log-probabilities are, where the loss is a sum over tokens whose weights were fixed before
  the step: `linear_token_loss` takes the loss as a function and does everything in one pass, in forward or,
  deferred, in backward, one chunk of logits at a time;
* only in backward, for any other loss: `linear_log_probs_and_entropy` either keeps the logits, or drops
  them and multiplies again in backward, a fourth product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.from_logits import FLOAT_DTYPES, check_vector, refuse_second_derivative
from megatron_pg.head.output_layer import (
    ChunkedHead,
    FactorGradients,
    default_chunk_tokens,
    multiply,
    score,
)
from megatron_pg.head.rows_torch import chunk_slices, temperature_tensor
from megatron_pg.head.vocabulary_shard import RowStatistics, VocabularyShard

TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""`token_loss(log_probs, entropy, rows)` -> 0-d loss of these rows, both arguments [rows] float32."""


@dataclass(frozen=True)
class HeadOptions:
    """How the output layer is split and computed; every field has the value of a plain layer."""

    tensor_parallel_group: dist.ProcessGroup | None = None
    """The group over which the vocabulary is split; every one of its ranks must call."""
    temperature: float | Tensor = 1.0
    """Log-probabilities and entropy are those of `softmax(logits / temperature)`."""
    vocab_size: int | None = None
    """True size of the vocabulary; columns from it on are padding."""
    fp32_logits: bool = False
    """Float32 logits out of bfloat16 operands, not upcast. The gradient of the logits is rounded to the
    dtype of the hidden states, the one rounding before the two other products."""
    chunk_tokens: int | None = None
    """Rows of logits in memory at once; None: about 1.25 GiB of bfloat16 logits."""


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions | None = None,
    *,
    keep_logits: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy, for any loss downstream.

    Backward recomputes the logits chunk by chunk unless they were kept.

    Args:
        hidden: [tokens, hidden] bfloat16, float16 or float32, the same on every tensor-parallel rank.
            Its gradient, in its own dtype, is the part of this rank's columns: the caller sums it over the
            group (Megatron's copy to, or gather from, the tensor-parallel region does).
        weight: [v/tp, hidden], the same dtype. Its gradient is accumulated in float32, into
            `weight.main_grad` where Megatron's DistributedDataParallel made one.
        targets: [tokens] int64 global token ids.
        options: see `HeadOptions`.
        keep_logits: hold the logits of all tokens until backward, which overwrites them: three matrix
            products instead of four. None: only where they fit one chunk.

    Returns:
        log_probs [tokens] and entropy [tokens] in nats, float32, both differentiable.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    options = options or HeadOptions()
    head = _chunked_head(hidden, weight, targets, options)
    if keep_logits is None:
        keep_logits = len(hidden) <= head.chunk_tokens
    if keep_logits:
        head = replace(head, chunk_tokens=max(len(hidden), 1))
    return LinearLogProbs.apply(hidden, weight, targets, head, keep_logits)  # type: ignore


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLoss,
    options: HeadOptions | None = None,
    *,
    gradient_rows: int | None = None,
    defer: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of `token_loss` over chunks, its gradient computed on the way: three products, one chunk of memory.

    Each chunk's log-probabilities go through `token_loss`, autograd gives its coefficients, and the
    gradient of the chunk's logits takes their place. Backward only multiplies by the incoming gradient.

    Deferred, forward keeps its arguments and all of this happens in backward, with the gradient that arrives: the
    weight's goes to `weight.main_grad` at once, without a buffer of its own. What is returned is NaN until backward
    has filled it in, in place; where nothing needs a gradient it is computed at once.

    Args:
        hidden, weight, targets, options: as for `linear_log_probs_and_entropy`; float16 with `defer` only: its
            range would lose a gradient that does not carry a loss scale yet.
        token_loss: must be a sum over tokens of terms that depend on that token's log-probability and
            entropy alone, and the same on every tensor-parallel rank. A parameter that it reads besides gets no gradient.
        gradient_rows: rows from this one on have coefficient 0 (zero advantage, and no other term): they are
            scored, and left out of the two gradient products. None: no such rows.
        defer: leave everything to backward.

    Returns:
        loss 0-d (differentiable), log_probs [tokens] and entropy [tokens] (detached).

    Raises:
        ValueError: shapes or dtypes that do not fit each other, or `gradient_rows` outside [0, tokens].
        NotImplementedError: float16 with gradients and no `defer`.
    """
    head = _chunked_head(hidden, weight, targets, options or HeadOptions())
    tokens = hidden.shape[0]
    if hidden.dtype == torch.float16 and not defer and torch.is_grad_enabled():
        raise NotImplementedError(
            "linear_token_loss takes float16 hidden states with defer=True alone: gradients that are computed before "
            "the loss scale arrives would underflow; defer, use linear_log_probs_and_entropy, or bfloat16"
        )
    rows = tokens if gradient_rows is None else gradient_rows
    if not 0 <= rows <= tokens:
        raise ValueError(f"gradient_rows must be between 0 and {tokens} tokens, found {rows}")
    has_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    work = TokenLossWork(head, token_loss, rows if has_backward else 0)
    return LinearTokenLoss.apply(hidden, weight, targets, work, defer and has_backward)  # type: ignore


def _chunked_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions
) -> ChunkedHead:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [tokens, hidden] and weight [v/tp, hidden], found "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"hidden and weight must share one float dtype, found {hidden.dtype} and {weight.dtype}"
        )
    check_vector("targets", targets, torch.int64, "hidden", hidden)
    dtype = (
        torch.promote_types(hidden.dtype, torch.float32) if options.fp32_logits else hidden.dtype
    )
    columns, chunk = weight.shape[0], options.chunk_tokens
    if chunk is None:
        chunk = default_chunk_tokens(len(hidden), columns, hidden.device)
    elif chunk < 1:
        raise ValueError(f"chunk_tokens must be at least 1, found {chunk}")
    return ChunkedHead(
        shard=VocabularyShard.build(columns, options.vocab_size, options.tensor_parallel_group),
        temperature=temperature_tensor(options.temperature, hidden),
        logits_dtype=dtype,
        chunk_tokens=chunk,
    )


class LinearLogProbs(torch.autograd.Function):
    """Log-probabilities and entropy from hidden states; gradients wait for backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: ChunkedHead, keep: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logits = head.new_logits(len(hidden), weight)
        parts = [
            score(head.chunk(rows, targets, logits), hidden[rows], weight)
            for rows in chunk_slices(0, len(hidden), head.chunk_tokens)
        ]
        statistics = RowStatistics.concatenate(parts, like=head.temperature)
        ctx.head, ctx.keep, ctx.logits = head, keep, logits if keep else None
        ctx.save_for_backward(hidden, weight, targets, *statistics.kept())
        return statistics.log_probs, statistics.entropy

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_log_probs_and_entropy")
        hidden, weight, targets, *saved = ctx.saved_tensors
        if all(gradient is None for gradient in incoming):
            return (None,) * 5
        head: ChunkedHead = ctx.head
        logits = ctx.logits if ctx.keep else head.new_logits(len(hidden), weight)
        if logits is None:
            raise RuntimeError("backward through kept logits a second time: they are overwritten")
        ctx.logits = None
        gradients = FactorGradients(hidden, weight, ctx.needs_input_grad[:2], final=True)
        statistics = RowStatistics(*saved)
        for rows in chunk_slices(0, len(hidden), head.chunk_tokens):
            chunk = head.chunk(rows, targets, logits)
            if not ctx.keep:
                multiply(hidden[rows], weight.t(), chunk.logits)
            coefficients = tuple(None if each is None else each[rows] for each in incoming)
            gradients.add(rows, hidden, chunk, statistics.rows(rows), coefficients)
            del chunk
        del logits  # before the weight's gradient asks for memory
        return (*gradients.finish(), None, None, None)


@dataclass(frozen=True)
class TokenLossWork:
    """What `linear_token_loss` has to do, apart from its tensors."""

    head: ChunkedHead
    token_loss: TokenLoss
    gradient_rows: int

    def run(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        gradients: FactorGradients,
        incoming: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores every chunk, and adds to `gradients` those of `incoming` times the loss (None: of the loss)."""
        tokens, size, rows_with = len(hidden), self.head.chunk_tokens, self.gradient_rows
        if gradients.hidden is not None:
            gradients.hidden[rows_with:] = 0
        logits = self.head.new_logits(tokens, weight)
        values, parts = [], []
        for rows in chunk_slices(0, rows_with, size) + chunk_slices(rows_with, tokens, size):
            chunk = self.head.chunk(rows, targets, logits)
            statistics = score(chunk, hidden[rows], weight)
            parts.append(statistics)
            value, coefficients = _coefficients(self.token_loss, statistics, rows, incoming)
            values.append(value)
            if rows.start < rows_with:
                gradients.add(rows, hidden, chunk, statistics, coefficients)
        zero = torch.zeros_like(self.head.temperature)
        whole = RowStatistics.concatenate(parts, like=zero)
        loss = values[0] if len(values) == 1 else sum(values, zero)
        return loss, whole.log_probs, whole.entropy


class LinearTokenLoss(torch.autograd.Function):
    """Loss of a sum over tokens: gradients in forward, scaled in backward, or deferred: everything in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, work: TokenLossWork, defer: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.work, ctx.defer = work, defer
        if defer:
            ctx.save_for_backward(hidden, weight, targets)
            sizes: tuple[tuple[int, ...], ...] = ((), targets.shape, targets.shape)
            outputs = tuple(work.head.temperature.new_full(size, math.nan) for size in sizes)
            # Aliases without a graph: the outputs would hold this node, which holds them.
            ctx.awaited = [each.detach() for each in outputs]
        else:
            ctx.gradients = FactorGradients(hidden, weight, ctx.needs_input_grad[:2], final=False)
            outputs = work.run(hidden, weight, targets, ctx.gradients)
        loss, log_probs, entropy = outputs
        ctx.mark_non_differentiable(log_probs, entropy)
        return loss, log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_token_loss")
        if ctx.defer:
            hidden, weight, targets = ctx.saved_tensors
            gradients = FactorGradients(hidden, weight, ctx.needs_input_grad[:2], final=True)
            found = ctx.work.run(hidden, weight, targets, gradients, grad_loss)
            for awaited, value in zip(ctx.awaited, found, strict=True):
                awaited.copy_(value)
            return (*gradients.finish(), None, None, None)
        if ctx.gradients is None:
            raise RuntimeError(
                "backward through linear_token_loss a second time: its gradients are given away"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return (*gradients.finish(grad_loss), None, None, None)


def _coefficients(
    token_loss: TokenLoss, statistics: RowStatistics, rows: slice, incoming: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Value of the loss of a chunk, and `incoming` times its gradients to log-probabilities and entropy."""
    with torch.enable_grad():
        log_probs = statistics.log_probs.detach().requires_grad_()
        entropy = statistics.entropy.detach().requires_grad_()
        loss = token_loss(log_probs, entropy, rows)
    if not loss.requires_grad:
        return loss, (torch.zeros_like(log_probs), None)
    if incoming is not None:
        incoming = incoming.to(loss.dtype).reshape(loss.shape)
    return loss.detach(), torch.autograd.grad(
        loss, (log_probs, entropy), incoming, allow_unused=True
    )
