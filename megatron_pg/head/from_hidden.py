"""The output layer together with the log-prob op, without the logits of all tokens in memory.

Three matrix products are needed: logits, gradient of the hidden states, gradient of the weight. Which
order of work reaches them depends on when the gradient of the loss to the log-probabilities is known:

* as soon as the log-probabilities are, where the loss is a sum over tokens whose weights were fixed before
  the step: `linear_token_loss` takes the loss as a function and does everything in one pass, in forward or,
  deferred, in backward, one chunk of logits at a time;
* as soon as those of the token's sequence are: the same, with chunks that hold whole sequences;
* only in backward, for any other loss: `linear_log_probs_and_entropy` either keeps the logits, or drops
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

from megatron_pg.head.distill.divergence import Teacher
from megatron_pg.head.from_logits import refuse_second_derivative, row_passes
from megatron_pg.head.kept.sets import check_rows
from megatron_pg.head.kept.sparse_layer import sparse_log_probs_and_entropy, split_rows
from megatron_pg.head.output_layer import (
    FactorGradients,
    HeadOptions,
    OutputLayer,
    row_statistics,
    wide_dtype,
)
from megatron_pg.head.ragged import Ragged, to_device
from megatron_pg.head.vocabulary_shard import RowStatistics

TokenLoss = Callable[..., Tensor]
"""A function `token_loss(log_probs, entropy, rows)` -> 0-d loss of these rows, both arguments [rows] float32; with a teacher
`token_loss(log_probs, entropy, divergence, rows)`."""


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions | None = None,
    *,
    keep_logits: bool | None = None,
    kept: Ragged | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy, for any loss downstream.

    Backward recomputes the logits chunk by chunk unless they were kept. Of rows with a set of kept tokens the columns in it
    alone are multiplied (`sparse_layer`), or, where the sets are so large that it costs less, all of them.

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
        kept: the global ids that each token was sampled from, [tokens] rows of distinct ids below the size of the
            vocabulary, the target among them, values on the device of `hidden` or the host: log-probability and entropy are those
            of the distribution renormalised to them. An empty row is the whole vocabulary.

    Returns:
        log_probs [tokens] and entropy [tokens] in nats, float32, both differentiable.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    options = options or HeadOptions()
    if kept is not None:
        kept = kept.to(hidden.device)
        check_rows(kept, hidden)
        sparse, dense = split_rows(kept, weight.shape[0], options.tensor_parallel_group)
        if len(sparse):
            return _of_both_layers(hidden, weight, targets, options, kept, sparse, dense)
    layer = OutputLayer(hidden, weight, targets, options, kept)
    if keep_logits is None:
        keep_logits = len(hidden) <= layer.chunk_tokens
    if keep_logits:
        whole = replace(layer.options, chunk_tokens=max(len(hidden), 1))
        layer = OutputLayer(hidden, weight, targets, whole, kept)
    return LinearLogProbs.apply(hidden, weight, layer, keep_logits)  # type: ignore


def _of_both_layers(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    kept: Ragged,
    sparse: Tensor,
    dense: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy [tokens] of the rows that the sparse layer takes and those that the dense one does."""
    if not len(dense):
        return sparse_log_probs_and_entropy(hidden, weight, targets, options, kept=kept)
    both = ((sparse, sparse_log_probs_and_entropy), (dense, linear_log_probs_and_entropy))
    log_probs = entropy = torch.zeros_like(targets, dtype=wide_dtype(hidden.dtype))
    for rows, layer_of in both:
        at = to_device(rows, hidden.device)
        found = layer_of(hidden[at], weight, targets[at], options, kept=kept.select(rows))
        log_probs, entropy = (
            each.index_copy(0, at, part)
            for each, part in zip((log_probs, entropy), found, strict=True)
        )
    return log_probs, entropy


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
            entropy alone (with `piece_sizes`: of its piece), and the same on every tensor-parallel rank. A parameter that
            it reads besides gets no gradient.
        gradient_rows: rows from this one on have coefficient 0 (zero advantage, and no other term): they are
            scored, and left out of the two gradient products. None: no such rows.
        piece_sizes: [pieces] rows of each piece, such as whole sequences: `token_loss` is called once for each, with all of
            its rows, also where that is none. Up to four chunks of them are one chunk; of a longer piece all chunks but
            the last are multiplied again, a fourth product. None: the loss takes any rows.
        defer: leave everything to backward.
        teacher: on the same tokens; it gets no gradient. A chunk of its logits lies beside one of the student's.

    Returns:
        loss 0-d (differentiable), log_probs [tokens] and entropy [tokens] (detached); with a teacher the divergence [tokens]
        too.

    Raises:
        ValueError: shapes or dtypes that do not fit each other, `gradient_rows` outside [0, tokens], or `piece_sizes`
            that do not add up to the tokens.
        NotImplementedError: float16 with gradients and no `defer`.
    """
    options = options or HeadOptions()
    layer = OutputLayer(hidden, weight, targets, options, teacher=teacher, may_be_exponentials=True)
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
        passes = row_passes(logits)
        parts = [passes.row_statistics(layer.chunk(rows, logits)) for rows in layer.chunks()]
        statistics = RowStatistics.concatenate(parts, like=layer.temperature)
        ctx.options, ctx.keep, ctx.logits = layer.options, keep, logits if keep else None
        ctx.kept = layer.kept
        ctx.parameter = weight  # saved, it may come back without its `main_grad`
        ctx.save_for_backward(hidden, weight, layer.targets, *statistics.kept())
        return statistics.log_probs, statistics.entropy

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_log_probs_and_entropy")
        hidden, _, targets, *saved = ctx.saved_tensors
        if all(gradient is None for gradient in incoming):
            return (None,) * 4
        layer = OutputLayer(hidden, ctx.parameter, targets, ctx.options, ctx.kept)
        logits = ctx.logits if ctx.keep else layer.new_logits(layer.chunks())
        if logits is None:
            raise RuntimeError("backward through kept logits a second time: they are overwritten")
        ctx.logits = None
        gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad[:2], final=True)
        statistics = RowStatistics(*saved)
        for rows in layer.chunks():
            chunk = layer.chunk(rows, logits, is_kept=ctx.keep)
            coefficients = tuple(None if each is None else each[rows] for each in incoming)
            gradients.add(rows, hidden, chunk, statistics.rows(rows), coefficients)
            del chunk
        del logits  # before the weight's gradient asks for memory
        return (*gradients.finish(), None, None)


class LinearTokenLoss(torch.autograd.Function):
    """Loss of a sum over tokens: gradients in forward, scaled in backward, or deferred: everything in backward."""

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
            ctx.options, ctx.work, ctx.teacher = layer.options, work, layer.teacher
            ctx.parameter = weight  # saved, it may come back without its `main_grad`
            ctx.save_for_backward(hidden, weight, layer.targets)
            vectors = 2 if layer.teacher is None else 3
            sizes: list[tuple[int, ...]] = [(), *[tuple(layer.targets.shape)] * vectors]
            outputs = tuple(layer.temperature.new_full(size, math.nan) for size in sizes)
            # Aliases without a graph: the outputs would hold this node, which holds them.
            ctx.awaited = [each.detach() for each in outputs]
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
        layer = OutputLayer(
            hidden,
            ctx.parameter,
            targets,
            ctx.options,
            teacher=ctx.teacher,
            may_be_exponentials=True,
        )
        gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad[:2], final=True)
        outputs = ctx.work(layer, gradients, grad_loss)
        for awaited, found in zip(ctx.awaited, outputs, strict=True):
            awaited.copy_(found)
        return (*gradients.finish(), None, None, None)


Piece = tuple[slice, list[slice]]
"""Rows that `token_loss` takes together, and the chunks in which they are multiplied."""


def _pieces(layer: OutputLayer, gradient_rows: int, sizes: Sequence[int] | None) -> list[Piece]:
    """The pieces of these sizes; without any every chunk is one, and none has rows with and without gradient."""
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
    """Loss, log-probabilities, entropy, with a teacher the divergence; adds to `gradients` those of `incoming` times the loss
    (None: of the loss)."""
    logits = layer.new_logits([rows for _, chunks in pieces for rows in chunks])
    zero, teacher = torch.zeros_like(layer.temperature), layer.teacher
    values, parts, divergences = [], [], [zero.new_empty(0)]
    for piece, chunks in pieces:
        found, of_piece, of_teacher = [], [zero.new_empty(0)], None
        for rows in chunks:
            chunk: Any = layer.first_product(rows, logits)
            found.append(row_statistics(chunk))
            if teacher is not None:
                of_teacher = teacher.on(chunk, found[-1], rows)
                of_piece.append(of_teacher.value)
        statistics = RowStatistics.concatenate(found, like=zero)
        parts.append(statistics)
        divergences += of_piece
        vectors = [statistics.log_probs, statistics.entropy]
        vectors += [] if teacher is None else [torch.cat(of_piece)]
        value, coefficients = _coefficients(token_loss, vectors, piece, incoming)
        values.append(value)
        for rows in reversed(chunks):  # the last one's logits are still there
            if rows.start < gradient_rows:
                place = slice(rows.start - piece.start, rows.stop - piece.start)
                if rows is not chunks[-1]:
                    chunk = layer.first_product(rows, logits)
                own, more = statistics.rows(place), None
                of_rows = tuple(None if each is None else each[place] for each in coefficients)
                if teacher is not None and of_rows[2] is not None:
                    if of_teacher is None or rows is not chunks[-1]:
                        of_teacher = teacher.on(chunk, own, rows)
                    more = of_teacher.gradient(of_rows[2], layer.hidden.dtype)
                gradients.add(rows, layer.hidden, chunk, own, of_rows[:2], more)
    whole = RowStatistics.concatenate(parts, like=zero)
    loss = values[0] if len(values) == 1 else sum(values, zero)
    outputs = loss, whole.log_probs, whole.entropy
    return outputs if teacher is None else (*outputs, torch.cat(divergences))


def _coefficients(
    token_loss: TokenLoss, vectors: Sequence[Tensor], rows: slice, incoming: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Value of the loss of a chunk, and `incoming` times its gradients to log-probabilities, entropy and divergence."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in vectors]
        loss = token_loss(*leaves, rows)
    if not loss.requires_grad:
        return loss, (torch.zeros_like(leaves[0]), *[None] * (len(leaves) - 1))
    if incoming is not None:
        incoming = incoming.to(loss.dtype).reshape(loss.shape)
    return loss.detach(), torch.autograd.grad(loss, leaves, incoming, allow_unused=True)
