"""The output layer together with the log-prob op, without the logits of all tokens in memory.

Three matrix products are needed: logits, gradient of the hidden states, gradient of the weight. Which
order of work reaches them depends on when the gradient of the loss to the log-probabilities is known:

* as soon as the log-probabilities are, where the loss is a sum over tokens whose weights were fixed before
  the step: `linear_token_loss` takes the loss as a function and does everything in forward, one chunk of
  logits at a time;
* only in backward, for any other loss: `linear_log_probs_and_entropy` either keeps the logits, or drops
  them and multiplies again in backward, a fourth product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.linear_autograd import ChunkedHead, LinearLogProbs
from megatron_pg.head.output_layer import default_chunk_tokens
from megatron_pg.head.rows_torch import temperature_tensor
from megatron_pg.head.token_loss_autograd import LinearTokenLoss, TokenLoss
from megatron_pg.head.vocabulary_shard import VocabularyShard

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
        keep_logits = hidden.shape[0] <= head.chunk_tokens
    return LinearLogProbs.apply(hidden, weight, targets, head, keep_logits)  # type: ignore


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLoss,
    options: HeadOptions | None = None,
    *,
    gradient_rows: int | None = None,
    loss_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of `token_loss` over chunks, its gradient computed on the way: three products, one chunk of memory.

    Each chunk's log-probabilities go through `token_loss`, autograd gives its coefficients, and the
    gradient of the chunk's logits takes their place. Backward only multiplies by the incoming gradient.

    Args:
        hidden, weight, targets, options: as for `linear_log_probs_and_entropy`; float16 with `loss_scale` only: its
            range would lose a gradient that does not carry the scale yet.
        token_loss: must be a sum over tokens of terms that depend on that token's log-probability and
            entropy alone, and the same on every tensor-parallel rank. A parameter that it reads besides gets no gradient.
        gradient_rows: rows from this one on have coefficient 0 (zero advantage, and no other term): they are
            scored, and left out of the two gradient products. None: no such rows.
        loss_scale: 0-d, the gradient that backward will hand to the loss, where it is known. The weight's gradient then
            goes straight to `main_grad` in forward, without a buffer of its own. Forward must be followed by
            backward with that scale, and `main_grad` not be zeroed in between; if not, rows of both gradients become
            NaN (see `megatron_pg.head.forward_gradients`).

    Returns:
        loss 0-d (differentiable), log_probs [tokens] and entropy [tokens] (detached).

    Raises:
        ValueError: shapes or dtypes that do not fit each other, or `gradient_rows` outside [0, tokens].
        NotImplementedError: float16 with gradients and no `loss_scale`.
    """
    head = _chunked_head(hidden, weight, targets, options or HeadOptions())
    tokens = hidden.shape[0]
    if hidden.dtype == torch.float16 and loss_scale is None and torch.is_grad_enabled():
        raise NotImplementedError(
            "linear_token_loss does not take float16 hidden states without a loss_scale: its gradients are computed "
            "before the scale arrives and would underflow; use linear_log_probs_and_entropy, or bfloat16"
        )
    rows = tokens if gradient_rows is None else gradient_rows
    if not 0 <= rows <= tokens:
        raise ValueError(f"gradient_rows must be between 0 and {tokens} tokens, found {rows}")
    if not torch.is_grad_enabled():
        rows = 0
    return LinearTokenLoss.apply(  # type: ignore
        hidden, weight, targets, head, token_loss, rows, loss_scale
    )


def _chunked_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions
) -> ChunkedHead:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [tokens, hidden] and weight [v/tp, hidden], found "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in _DTYPES:
        raise ValueError(
            f"hidden and weight must share one float dtype, found {hidden.dtype} and {weight.dtype}"
        )
    tokens, columns = hidden.shape[0], weight.shape[0]
    if tuple(targets.shape) != (tokens,) or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be ({tokens},) torch.int64 like the rows of hidden, found "
            f"{tuple(targets.shape)} {targets.dtype}"
        )
    chunk = options.chunk_tokens
    if chunk is None:
        chunk = default_chunk_tokens(tokens, columns, hidden.device)
    elif chunk < 1:
        raise ValueError(f"chunk_tokens must be at least 1, found {chunk}")
    return ChunkedHead(
        shard=VocabularyShard.build(columns, options.vocab_size, options.tensor_parallel_group),
        temperature=temperature_tensor(options.temperature, hidden),
        fp32_logits=options.fp32_logits,
        chunk_tokens=chunk,
    )
