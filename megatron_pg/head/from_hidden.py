"""The output layer fused with the log-prob op, without all tokens' logits in memory.

Three matrix products are needed: logits, gradient of the hidden states, and gradient of the weight.
Their order depends on when the loss's gradient to the log-probabilities is known:

* as soon as the token's or sequence's log-probabilities are known, if the loss is a sum over tokens
  with weights fixed before the step. Then `linear_token_loss` does everything in one pass over
  chunks of logits, in forward or, deferred, in backward. If the loss reads sequences, a chunk holds
  whole sequences.
* only in backward, for any other loss. Then `linear_log_probs` keeps the logits or recomputes them,
  a fourth product.

`float32_logits` is only the output layer.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.chunks import chunk_rows
from megatron_pg.head.factor_gradients import FactorGradients, multiply
from megatron_pg.head.from_logits import Scorer, refuse_second_derivative
from megatron_pg.head.output_layer import (
    Factors,
    HeadOptions,
    KeepOnly,
    LogitTransform,
    OutputLayer,
    check_factors,
)
from megatron_pg.head.rows_torch import chunk_slices, wide_dtype
from megatron_pg.head.vocabulary_shard import RowStatistics, joined

TokenLoss = Callable[..., Tensor]
"""A function `token_loss(log_probs, entropy, rows)` -> 0-d loss of these rows, where `log_probs`
and `entropy` are [rows] float32. With a scorer: `token_loss(log_probs, entropy, score, rows)`,
score [..., rows]."""


def linear_log_probs(
    factors: Factors,
    options: HeadOptions,
    keep_logits: bool | None = None,
    keep_only: KeepOnly | None = None,
    scorer: Scorer | None = None,
) -> tuple[Tensor, ...]:
    """Compute `linear_log_probs_and_entropy` over all columns."""
    layer, tokens = OutputLayer.build(factors, options, keep_only), len(factors.hidden)
    if keep_logits is None:
        keep_logits = tokens <= layer.held_tokens
    if keep_logits:
        layer = replace(layer, chunk_tokens=max(tokens, 1))
    return LinearLogProbs.apply(*factors, layer, keep_logits, scorer)  # type: ignore


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
    scorer: Scorer | None = None,
) -> tuple[Tensor, ...]:
    """Add up `token_loss` over chunks and compute its gradient in the same pass, with three
    products and one chunk of logits in memory.

    Each chunk's log-probabilities go through `token_loss`, autograd gives its coefficients, and the
    gradient of the chunk's logits overwrites the logits.

    Args:
        hidden, weight, targets, options: as for `linear_log_probs_and_entropy`. float16 requires
            `defer`: without a loss scale its gradients would underflow.
        token_loss: a sum over tokens of terms that depend only on the token's log-probability and
            entropy (with `piece_sizes`: on its piece's), the same on every tensor-parallel rank.
            Other parameters that it reads get no gradient.
        gradient_rows: rows from this one on have coefficient 0. They are scored, but left out of
            the gradient products.
        piece_sizes: [pieces] rows of each piece, such as a whole sequence. `token_loss` is called
            once per piece, even for a piece without rows. A piece of up to two chunks is one chunk.
            In a longer piece, all chunks except the last are recomputed, a fourth product. None:
            the loss takes any rows.
        defer: compute everything in backward with the incoming gradient. The weight's gradient goes
            directly to `weight.main_grad`, without a separate buffer. The outputs are NaN until
            backward fills them in place. If nothing needs a gradient, they are computed at once.
        scorer: a teacher for the same tokens, with a chunk of logits in memory next to the
            student's, or a `Centering`, which needs no further product.

    Returns:
        loss 0-d (differentiable), log_probs [tokens] and entropy [tokens] (detached), and with a
        scorer the score [..., tokens].

    Raises:
        ValueError: inconsistent arguments.
        NotImplementedError: float16 with gradients and no `defer`; a teacher with
            `options.transform`.
    """
    factors, tokens = Factors(hidden, weight, targets), len(hidden)
    options = options or HeadOptions()
    is_light = scorer is None or scorer.is_sparse
    layer = OutputLayer.build(
        factors, options, may_be_exponentials=is_light, chunks_at_once=1 if is_light else 2
    )
    if not is_light and options.transform != LogitTransform():
        raise NotImplementedError(
            "distillation supports no logit scale or soft-cap in the fused head, found "
            f"{options.transform}: drop --fused-lm-head"
        )
    if hidden.dtype == torch.float16 and not defer and torch.is_grad_enabled():
        raise NotImplementedError(
            "float16 hidden states require defer=True in linear_token_loss: gradients computed "
            "before the loss scale arrives would underflow. Or use linear_log_probs_and_entropy or "
            "bfloat16"
        )
    rows = tokens if gradient_rows is None else gradient_rows
    if not 0 <= rows <= tokens:
        raise ValueError(f"gradient_rows must be between 0 and {tokens} tokens, found {rows}")
    if piece_sizes is not None and sum(piece_sizes) != tokens:
        raise ValueError(f"piece_sizes add up to {sum(piece_sizes)} instead of {tokens} tokens")
    has_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if piece_sizes is None:
        chunks = layer.chunks(0, rows) + layer.chunks(rows, tokens)
        pieces = [(chunk, [chunk]) for chunk in chunks]
    else:
        ends = itertools.pairwise(itertools.accumulate(piece_sizes, initial=0))
        pieces = [(slice(*piece), layer.chunks(*piece, held=True)) for piece in ends]
    work = functools.partial(
        _loss_in_pieces, token_loss, scorer, layer, pieces, rows if has_backward else 0
    )
    awaited = None
    if defer and has_backward:
        sizes = [(), (tokens,), (tokens,)]
        sizes += [] if scorer is None else [(*scorer.shape, tokens)]
        awaited = [layer.temperature.new_full(size, math.nan) for size in sizes]
    return LinearTokenLoss.apply(*factors, work, awaited)  # type: ignore


class LinearLogProbs(torch.autograd.Function):
    """Log-probabilities and entropy from hidden states, with gradients in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        layer: OutputLayer,
        keep: bool,
        scorer: Scorer | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.chunks, factors = layer.chunks(0, len(hidden)), Factors(hidden, weight, targets)
        logits = layer.new_logits(weight, ctx.chunks)
        parts, scores = [], []
        for rows in ctx.chunks:
            chunk = layer.chunk(factors, rows, logits)
            parts.append(chunk.statistics())
            if scorer is not None:
                scores.append(scorer.on(chunk, parts[-1], rows)[0])
            del chunk
        statistics = RowStatistics.concatenate(parts, like=layer.temperature)
        ctx.layer, ctx.keep, ctx.logits = layer, keep, logits if keep else None
        ctx.scorer = scorer
        ctx.parameter = weight  # a saved tensor may lose its `main_grad`
        ctx.save_for_backward(hidden, weight, targets, *statistics.kept())
        if scorer is None:
            return statistics.log_probs, statistics.entropy
        like = layer.temperature.new_empty((*scorer.shape, 0))
        return statistics.log_probs, statistics.entropy, joined(scores, like=like)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_log_probs_and_entropy")
        hidden, _, targets, *saved = ctx.saved_tensors
        if all(gradient is None for gradient in incoming):
            return (None,) * 6
        factors = Factors(hidden, ctx.parameter, targets)
        logits = ctx.logits if ctx.keep else ctx.layer.new_logits(ctx.parameter, ctx.chunks)
        if logits is None:
            raise RuntimeError(
                "linear_log_probs_and_entropy allows one backward with keep_logits: "
                "it overwrites the logits"
            )
        ctx.logits = None
        gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad[:2], final=True)
        statistics = RowStatistics(*saved)
        for rows in ctx.chunks:
            chunk = ctx.layer.chunk(factors, rows, logits, is_kept=ctx.keep)
            own, columns = statistics.rows(rows), None
            coefficients: Any = tuple(None if x is None else x[..., rows] for x in incoming)
            if ctx.scorer is not None:
                found = ctx.scorer.on(chunk, own, rows)[1](coefficients, hidden.dtype)
                coefficients, columns = found.incoming, found.columns
            chunk.add_gradient(gradients, own, coefficients, columns)
            del chunk
        del logits  # before the weight's gradient allocates memory
        return (*gradients.finish(), None, None, None, None)


class LinearTokenLoss(torch.autograd.Function):
    """A sum over tokens. Gradients are computed in forward and scaled in backward, or all in
    backward if deferred.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        work: Callable[..., tuple[Tensor, ...]],
        awaited: list[Tensor] | None,
    ) -> tuple[Tensor, ...]:
        ctx.is_deferred = awaited is not None
        if awaited is None:
            ctx.gradients = FactorGradients(hidden, weight, ctx.needs_input_grad[:2], final=False)
            outputs = work(Factors(hidden, weight, targets), ctx.gradients)
        else:
            # Detached aliases avoid a reference cycle between the outputs and this node.
            outputs, ctx.awaited = tuple(awaited), [output.detach() for output in awaited]
            ctx.work, ctx.parameter = work, weight  # as in `LinearLogProbs`
            ctx.save_for_backward(hidden, weight, targets)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_token_loss")
        if ctx.is_deferred:
            hidden, _, targets = ctx.saved_tensors
            factors = Factors(hidden, ctx.parameter, targets)
            gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad[:2], final=True)
            outputs = ctx.work(factors, gradients, grad_loss)
            for awaited, output in zip(ctx.awaited, outputs, strict=True):
                awaited.copy_(output)
            return (*gradients.finish(), None, None, None)
        if ctx.gradients is None:
            raise RuntimeError("linear_token_loss allows one backward: its gradients are gone")
        gradients, ctx.gradients = ctx.gradients, None
        return (*gradients.finish(grad_loss), None, None, None)


def _loss_in_pieces(
    token_loss: TokenLoss,
    scorer: Scorer | None,
    layer: OutputLayer,
    pieces: list[tuple[slice, list[slice]]],
    gradient_rows: int,
    factors: Factors,
    gradients: FactorGradients,
    incoming: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute the outputs of `linear_token_loss`. Each of `pieces` has the rows of one `token_loss`
    call and their chunks.

    Add the gradients of `incoming` (None: 1) times the loss.
    """
    logits = layer.new_logits(factors.weight, [rows for _, chunks in pieces for rows in chunks])
    zero = torch.zeros_like(layer.temperature)
    likes = [zero, zero, *([] if scorer is None else [zero.new_empty((*scorer.shape, 0))])]
    losses: list[Tensor] = []
    columns: list[list[Tensor]] = [[] for _ in likes]
    to_logits: Any  # may hold a teacher's logits, so it is freed before the next chunk
    for piece, chunks in pieces:
        parts, scores = [], []
        for rows in chunks:
            chunk: Any = layer.chunk(factors, rows, logits)
            parts.append(chunk.statistics())
            if scorer is not None:
                to_logits = None
                score, to_logits = scorer.on(chunk, parts[-1], rows)
                scores.append(score)
        statistics = RowStatistics.concatenate(parts, like=zero)
        outputs = [statistics.log_probs, statistics.entropy, joined(scores, like=likes[-1])]
        for column, vector in zip(columns, outputs, strict=False):
            column.append(vector)
        loss, coefficients = _coefficients(token_loss, outputs[: len(columns)], piece, incoming)
        losses.append(loss)
        for rows in reversed(chunks):  # the last chunk's logits are still there
            if rows.start >= gradient_rows:
                continue
            place = slice(rows.start - piece.start, rows.stop - piece.start)
            own = statistics.rows(place)
            to_rows = [None if vector is None else vector[..., place] for vector in coefficients]
            if rows is not chunks[-1]:
                chunk = layer.chunk(factors, rows, logits)
            if scorer is None or to_rows[2] is None:
                chunk.add_gradient(gradients, own, to_rows[:2])
                continue
            if rows is not chunks[-1]:
                to_logits = None
                _, to_logits = scorer.on(chunk, own, rows)
            found = to_logits(to_rows, factors.hidden.dtype)
            if found.dense is None:
                chunk.add_gradient(gradients, own, found.incoming, found.columns)
                continue
            gradient = found.dense
            if any(vector is not None for vector in found.incoming):
                gradient = chunk.write_gradient(own, found.incoming).add_(gradient)
            gradients.add_products(rows, chunk.hidden, gradient)
            del gradient, found  # may be the teacher's logits
    total = losses[0] if len(losses) == 1 else sum(losses, zero)
    found_columns = zip(columns, likes, strict=True)
    return (total, *(joined(column, like=like) for column, like in found_columns))


def _coefficients(
    token_loss: TokenLoss, vectors: Sequence[Tensor], rows: slice, incoming: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return a piece's loss, and `incoming` times its gradients to log-probabilities, entropy and
    score.
    """
    with torch.enable_grad():
        leaves = [vector.detach().requires_grad_() for vector in vectors]
        loss = token_loss(*leaves, rows)
    if not loss.requires_grad:
        return loss, (torch.zeros_like(leaves[0]), *[None] * (len(leaves) - 1))
    if incoming is not None:
        incoming = incoming.to(loss.dtype).reshape(loss.shape)
    return loss.detach(), torch.autograd.grad(loss, leaves, incoming, allow_unused=True)


def float32_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute float32 logits from operands that are not upcast. Accumulation, output and bias are
    float32.

    Backward rounds the gradient of the logits to the dtype of the hidden states before its two
    products. Raises ValueError for inconsistent shapes or dtypes.

    Args:
        hidden: [..., hidden], otherwise as for `linear_log_probs_and_entropy`, like `weight`.
        weight: [v/tp, hidden].
        bias: [v/tp]. Its gradient is summed in float32 and rounded to its dtype.

    Returns:
        [..., v/tp] float32 (float64 for float64). The caller may overwrite it.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    check_factors(rows, weight)
    logits: Tensor = Float32Product.apply(rows, weight)  # type: ignore
    if bias is not None:
        logits = logits.add_(bias)
    return logits.view(*hidden.shape[:-1], weight.shape[0])


class Float32Product(torch.autograd.Function):
    """hidden [tokens, hidden] times the transposed weight [v/tp, hidden], in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.parameter = weight  # as in `LinearLogProbs`
        ctx.save_for_backward(hidden, weight)
        logits = weight.new_empty((len(hidden), len(weight)), dtype=wide_dtype(weight.dtype))
        multiply(hidden, weight.t(), logits)
        return logits

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("float32_logits")
        hidden, weight = ctx.saved_tensors
        gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad, final=True)
        size = chunk_rows(len(hidden), hidden.shape[1], len(weight), hidden.device)
        for rows in chunk_slices(0, len(hidden), size):
            gradients.add_products(rows, hidden[rows], incoming[rows].to(hidden.dtype))
        return gradients.finish()
