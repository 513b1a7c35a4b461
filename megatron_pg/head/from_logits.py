"""Log-probabilities and entropy of the target tokens, from vocabulary-parallel logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.autograd import LogProbsAndEntropy
from megatron_pg.head.rows_torch import temperature_tensor
from megatron_pg.head.vocabulary_shard import VocabularyShard

__all__ = ["log_probs_and_entropy"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tensor_parallel_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    row_mask: Tensor | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target token, and the entropy, of `softmax(logits / temperature)`.

    Statistics are float32 whatever the logits are; no float32 copy of the logits is kept. Tensor-parallel
    ranks exchange one all-gather of `[tokens, 4]` statistics in forward and nothing in backward. As
    in Megatron's own cross-entropy, the incoming gradients must be equal on those ranks, and each
    rank gets the gradient of its own columns.

    On CUDA, Triton kernels do the work, and **backward overwrites the logits with their gradient**
    unless they are a leaf. Autograd raises where their old values would be needed again (a second
    backward, another loss on the same logits); pass `logits.clone()` then.

    Args:
        logits: [tokens, v/tp] bfloat16, float16 or float32 (or float64, for tests): this rank's
            columns; rank r holds the global ids from `r * v/tp` on.
        targets: [tokens] int64 global token ids. One outside the vocabulary gives NaN.
        tensor_parallel_group: the group over which the vocabulary is split; every one of its ranks
            must call, with equal targets. None: not split, torch.distributed is not touched.
        temperature: a positive number, or a tensor of one element (no gradient, never read on the host).
        row_mask: [tokens] bool. Rows that are False give 0 and 0, and a gradient of exactly 0, even
            where their logits are NaN or inf.
        vocab_size: true size of the vocabulary; columns from it on are padding and take no part.
        with_entropy: also return the entropy.

    Returns:
        log_probs [tokens] and entropy [tokens] in nats (None without `with_entropy`), float32
        (float64 for float64 logits), both differentiable.

    Raises:
        ValueError: a wrong shape or dtype, a temperature that is not positive and finite, or a
            `vocab_size` that the logits cannot hold.
    """
    _check(logits, targets, row_mask)
    shard = VocabularyShard.build(logits.shape[1], vocab_size, tensor_parallel_group)
    scale = temperature_tensor(temperature, logits)
    log_probs, entropy = LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, scale, row_mask, shard, with_entropy
    )
    return log_probs, entropy


def _check(logits: Tensor, targets: Tensor, row_mask: Tensor | None) -> None:
    if logits.dim() != 2 or logits.dtype not in _DTYPES:
        raise ValueError(
            "logits must be [tokens, v/tp] in bfloat16, float16, float32 or float64, found "
            f"{tuple(logits.shape)} {logits.dtype}: flatten batch and sequence first"
        )
    tokens = (logits.shape[0],)
    if tuple(targets.shape) != tokens or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be {tokens} torch.int64 like the rows of logits, found "
            f"{tuple(targets.shape)} {targets.dtype}"
        )
    if row_mask is not None and (tuple(row_mask.shape) != tokens or row_mask.dtype != torch.bool):
        raise ValueError(
            f"row_mask must be {tokens} torch.bool like the rows of logits, found "
            f"{tuple(row_mask.shape)} {row_mask.dtype}"
        )
