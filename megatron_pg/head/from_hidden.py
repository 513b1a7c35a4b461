"""The output layer together with the log-prob op, without the logits of all tokens in memory.

Three matrix products are needed: logits, gradient of the hidden states, gradient of the weight. Their order depends on
when the gradient of the loss to the log-probabilities is known:

* as soon as the log-probabilities are, where the loss is a sum over tokens whose weights were fixed before
  the step: `linear_token_loss` takes the loss as a function and does everything in one pass, in forward or,
  deferred, in backward, one chunk of logits at a time;
* as soon as those of the token's sequence are: the same, with chunks that hold whole sequences;
* only in backward, for any other loss: `linear_log_probs` either keeps the logits, or drops
  them and multiplies again in backward, a fourth product.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.factor_gradients import FactorGradients
from megatron_pg.head.from_logits import refuse_second_derivative
from megatron_pg.head.output_layer import HeadOptions, OutputLayer
from megatron_pg.head.vocabulary_shard import RowStatistics
from megatron_pg.head.wings import KeepOnly, Teacher, TeacherRows

TokenLoss = Callable[..., Tensor]
"""A function `token_loss(log_probs, entropy, rows)` -> 0-d loss of these rows, both arguments [rows] float32; with a teacher
`token_loss(log_probs, entropy, divergence, rows)`."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    keep_logits: bool | None = None,
    keep_only: KeepOnly | None = None,
) -> tuple[Tensor, Tensor]:
    """Do the work of `linear_log_probs_and_entropy` with all columns; `keep_only` restricts rows to their kept sets."""
    layer = OutputLayer(hidden, weight, targets, options, keep_only)
    if keep_logits is None:
        keep_logits = len(hidden) <= layer.chunk_tokens
    if keep_logits:
        whole = replace(layer.options, chunk_tokens=max(len(hidden), 1))
        layer = OutputLayer(hidden, weight, targets, whole, keep_only)
    return LinearLogProbs.apply(hidden, weight, layer, keep_logits)  # type: ignore


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLoss,
    options: HeadOptions | None = None,
    *,
    gradient_rows: int | None = None,
    piece_sizes: Sequence[int] | None = None,
    defer: bool = False,
    teacher: Teacher | None = None,
) -> tuple[Tensor, ...]:
    """Add up `token_loss` over chunks and compute its gradient on the way: three products, one chunk of memory.

    Each chunk's log-probabilities go through `token_loss`, autograd gives its coefficients, and the
    gradient of the chunk's logits takes their place. Backward only multiplies by the incoming gradient.

    Deferred, forward keeps its arguments and all of this happens in backward, with the gradient that arrives: the
    weight's goes to `weight.main_grad` at once, without a buffer of its own. The outputs are NaN until backward
    has filled them in, in place; where nothing needs a gradient they are computed at once.

    Args:
        hidden, weight, targets, options: as for `linear_log_probs_and_entropy`; float16 with `defer` only: its
            range would lose a gradient that does not carry a loss scale yet.
        token_loss: a sum over tokens of terms that depend on that token's log-probability and
            entropy alone (with `piece_sizes`: on those of its piece), the same on every tensor-parallel rank. Other
            parameters that it reads get no gradient.
        gradient_rows: rows from this one on have coefficient 0 (zero advantage, and no other term): they are
            scored, and left out of the two gradient products. None: no such rows.
        piece_sizes: [pieces] rows of each piece, such as whole sequences: `token_loss` is called once for each, with all of
            its rows, even for a piece without rows. Up to four chunks of a piece are one chunk; of a longer piece all
            chunks but the last are multiplied again, a fourth product. None: the loss takes any rows.
        defer: leave everything to backward.
        teacher: a teacher of the same tokens; it gets no gradient. A chunk of its logits lies beside one of the student's.

    Returns:
        loss 0-d (differentiable), log_probs [tokens] and entropy [tokens] (detached); with a teacher also the divergence
        [tokens].

    Raises:
        ValueError: shapes or dtypes that do not fit each other, `gradient_rows` outside [0, tokens], or `piece_sizes`
            that do not add up to the tokens.
        NotImplementedError: float16 with gradients and no `defer`.
    """
    layer = OutputLayer(
        hidden, weight, targets, options or HeadOptions(), teacher=teacher, may_be_exponentials=True
    )
    tokens = len(hidden)
    if hidden.dtype == torch.float16 and not defer and torch.is_grad_enabled():
        raise NotImplementedError(
            "linear_token_loss takes float16 hidden states with defer=True alone: gradients that are computed before "
            "the loss scale arrives would underflow; defer, use linear_log_probs_and_entropy, or bfloat16"
        )
    rows = tokens if gradient_rows is None else gradient_rows
    if not 0 <= rows <= tokens:
        raise ValueError(f"gradient_rows must be between 0 and {tokens} tokens, found {rows}")
    if piece_sizes is not None and sum(piece_sizes) != tokens:
        raise ValueError(f"piece_sizes add up to {sum(piece_sizes)} and there are {tokens} tokens")
    has_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    pieces = _pieces(layer, rows, piece_sizes)
    work = functools.partial(_loss_in_pieces, token_loss, pieces, rows if has_backward else 0)
    return LinearTokenLoss.apply(hidden, weight, layer, work, defer and has_backward)  # type: ignore


class LinearLogProbs(torch.autograd.Function):
    """Log-probabilities and entropy from hidden states; gradients wait for backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, layer: OutputLayer, keep: bool
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        logits = layer.new_logits(layer.chunks())
        parts = [layer.chunk(rows, logits).statistics() for rows in layer.chunks()]
        statistics = RowStatistics.concatenate(parts, like=layer.temperature)
        ctx.layer = functools.partial(OutputLayer, options=layer.options, keep_only=layer.keep_only)
        ctx.keep, ctx.logits = keep, logits if keep else None
        ctx.parameter = weight  # saved, it may come back without its `main_grad`
        ctx.save_for_backward(hidden, weight, layer.targets, *statistics.kept())
        return statistics.log_probs, statistics.entropy

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_log_probs_and_entropy")
        hidden, _, targets, *saved = ctx.saved_tensors
        if all(gradient is None for gradient in incoming):
            return (None,) * 4
        layer = ctx.layer(hidden, ctx.parameter, targets)
        logits = ctx.logits if ctx.keep else layer.new_logits(layer.chunks())
        if logits is None:
            raise RuntimeError("backward through kept logits a second time: they are overwritten")
        ctx.logits = None
        gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad[:2], final=True)
        statistics = RowStatistics(*saved)
        for rows in layer.chunks():
            chunk = layer.chunk(rows, logits, is_kept=ctx.keep)
            coefficients = tuple(None if vector is None else vector[rows] for vector in incoming)
            chunk.add_gradient(gradients, statistics.rows(rows), coefficients)
            del chunk
        del logits  # before the weight's gradient asks for memory
        return (*gradients.finish(), None, None)


class LinearTokenLoss(torch.autograd.Function):
    """The loss of a sum over tokens: gradients in forward, scaled in backward, or, deferred, everything in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        layer: OutputLayer,
        work: Callable[..., tuple[Tensor, ...]],
        defer: bool,
    ) -> tuple[Tensor, ...]:
        ctx.defer = defer
        if defer:
            ctx.layer = functools.partial(
                OutputLayer, options=layer.options, teacher=layer.teacher, may_be_exponentials=True
            )
            ctx.work, ctx.parameter = (
                work,
                weight,
            )  # saved, it may come back without its `main_grad`
            ctx.save_for_backward(hidden, weight, layer.targets)
            vectors = 2 if layer.teacher is None else 3
            sizes: list[tuple[int, ...]] = [(), *[tuple(layer.targets.shape)] * vectors]
            outputs = tuple(layer.temperature.new_full(size, math.nan) for size in sizes)
            # Aliases without a graph: the outputs would hold this node, which holds them.
            ctx.awaited = [output.detach() for output in outputs]
        else:
            ctx.gradients = FactorGradients(hidden, weight, ctx.needs_input_grad[:2], final=False)
            outputs = work(layer, ctx.gradients)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_token_loss")
        if not ctx.defer:
            if ctx.gradients is None:
                raise RuntimeError(
                    "backward through linear_token_loss a second time: its gradients are given away"
                )
            gradients, ctx.gradients = ctx.gradients, None
            return (*gradients.finish(grad_loss), None, None, None)
        hidden, _, targets = ctx.saved_tensors
        layer = ctx.layer(hidden, ctx.parameter, targets)
        gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad[:2], final=True)
        outputs = ctx.work(layer, gradients, grad_loss)
        for awaited, output in zip(ctx.awaited, outputs, strict=True):
            awaited.copy_(output)
        return (*gradients.finish(), None, None, None)


Piece = tuple[slice, list[slice]]
"""Rows that `token_loss` takes together, and the chunks in which they are multiplied."""


def _pieces(layer: OutputLayer, gradient_rows: int, sizes: Sequence[int] | None) -> list[Piece]:
    """Cut the rows into pieces of these sizes; without sizes into chunks, each with gradient or without."""
    if sizes is None:
        chunks = layer.chunks(0, gradient_rows) + layer.chunks(gradient_rows)
        return [(rows, [rows]) for rows in chunks]
    ends = list(itertools.accumulate(sizes, initial=0))
    return [
        (slice(begin, end), layer.chunks(begin, end, held=True))
        for begin, end in itertools.pairwise(ends)
    ]


def _loss_in_pieces(
    token_loss: TokenLoss,
    pieces: list[Piece],
    gradient_rows: int,
    layer: OutputLayer,
    gradients: FactorGradients,
    incoming: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute the outputs of `linear_token_loss`, and add the gradients of `incoming` (None: 1) times the loss."""
    logits = layer.new_logits([rows for _, chunks in pieces for rows in chunks])
    zero, teacher = torch.zeros_like(layer.temperature), layer.teacher
    losses, parts, divergences = [], [], [zero.new_empty(0)]
    for piece, chunks in pieces:
        chunk_parts, piece_divergences = [], [zero.new_empty(0)]
        taught: TeacherRows | None = None
        for rows in chunks:
            chunk: Any = layer.first_product(rows, logits)  # with a teacher always `LogitChunk`
            chunk_parts.append(chunk.statistics())
            if teacher is not None:
                taught = teacher.on(chunk, chunk_parts[-1], rows)
                piece_divergences.append(taught.value)
        statistics = RowStatistics.concatenate(chunk_parts, like=zero)
        parts.append(statistics)
        divergences += piece_divergences
        vectors = [statistics.log_probs, statistics.entropy]
        vectors += [] if teacher is None else [torch.cat(piece_divergences)]
        loss, coefficients = _coefficients(token_loss, vectors, piece, incoming)
        losses.append(loss)
        for rows in reversed(chunks):  # the last one's logits are still there
            if rows.start >= gradient_rows:
                continue
            place = slice(rows.start - piece.start, rows.stop - piece.start)
            if rows is not chunks[-1]:
                chunk = layer.first_product(rows, logits)
            own, more = statistics.rows(place), None
            to_log_probs, to_entropy, *to_divergence = (
                None if vector is None else vector[place] for vector in coefficients
            )
            if teacher is not None and to_divergence[0] is not None:
                if taught is None or rows is not chunks[-1]:
                    taught = teacher.on(chunk, own, rows)
                more = taught.gradient(to_divergence[0], layer.hidden.dtype)
            chunk.add_gradient(gradients, own, (to_log_probs, to_entropy), more)
    whole = RowStatistics.concatenate(parts, like=zero)
    total = losses[0] if len(losses) == 1 else sum(losses, zero)
    outputs = total, whole.log_probs, whole.entropy
    return outputs if teacher is None else (*outputs, torch.cat(divergences))


def _coefficients(
    token_loss: TokenLoss, vectors: Sequence[Tensor], rows: slice, incoming: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the loss of a piece, and `incoming` times its gradients to log-probabilities, entropy and divergence."""
    with torch.enable_grad():
        leaves = [vector.detach().requires_grad_() for vector in vectors]
        loss = token_loss(*leaves, rows)
    if not loss.requires_grad:
        return loss, (torch.zeros_like(leaves[0]), *[None] * (len(leaves) - 1))
    if incoming is not None:
        incoming = incoming.to(loss.dtype).reshape(loss.shape)
    return loss.detach(), torch.autograd.grad(loss, leaves, incoming, allow_unused=True)
