"""The two row passes in plain torch: statistics of the logits, and the gradient to the logits.

Both work on a few rows at a time, so that the float32 copies of a chunk never add up to a copy of
the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_pg.head.vocabulary_shard import (
    RowStatistics,
    VocabularyShard,
    combine_statistics,
)

_CHUNK_ELEMENTS = 1 << 23


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 logits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def temperature_tensor(temperature: float | Tensor, logits: Tensor) -> Tensor:
    """The temperature as one element of the statistics dtype on the device of `logits`."""
    dtype = statistics_dtype(logits.dtype)
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            raise ValueError(
                f"temperature must be a number or a tensor of one element, found "
                f"{tuple(temperature.shape)}"
            )
        return temperature.detach().to(device=logits.device, dtype=dtype).reshape(())
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite, found {temperature}")
    return torch.full((), temperature, dtype=dtype, device=logits.device)


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for begin in range(0, logits.shape[0], rows):
        yield slice(begin, min(begin + rows, logits.shape[0]))


def _without_masked_rows(rows: Tensor, keep: Tensor | None) -> Tensor:
    """`where` and not `*`: a NaN or inf of a masked row must not survive."""
    return rows if keep is None else torch.where(keep[:, None], rows, 0.0)


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    temperature: Tensor,
    row_mask: Tensor | None = None,
    with_entropy: bool = True,
) -> RowStatistics:
    """Statistics of each row over the whole vocabulary; every tensor-parallel rank must call.

    Args:
        logits: [tokens, v/tp] in any float dtype.
        targets: [tokens] int64 global token ids; one outside the vocabulary gives NaN.
        shard: this rank's part of the vocabulary.
        temperature: one element, statistics dtype.
        row_mask: [tokens] bool, rows to read; the others get finite placeholders.
        with_entropy: False leaves the entropy meaningless.

    Returns:
        Statistics in float32 (float64 for float64 logits).
    """
    local = _local_statistics(logits, targets, shard, temperature, row_mask, with_entropy)
    return combine_statistics(local, temperature, row_mask, shard.group)


def _local_statistics(
    logits: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    temperature: Tensor,
    row_mask: Tensor | None,
    with_entropy: bool,
) -> Tensor:
    """[tokens, 4] of this shard's columns, as `combine_statistics` takes them."""
    dtype = statistics_dtype(logits.dtype)
    statistics = torch.zeros((logits.shape[0], 4), dtype=dtype, device=logits.device)
    if shard.columns == 0:
        statistics[:, 0] = -math.inf
    for rows in _row_chunks(logits) if shard.columns else ():
        keep = None if row_mask is None else row_mask[rows]
        chunk = _without_masked_rows(logits[rows, : shard.columns].to(dtype), keep)
        maximum = chunk.amax(1, keepdim=True)
        # A row of -inf alone has nothing to shift by; its exponentials are 0 as they should be.
        exponents = (chunk - torch.where(maximum == -math.inf, 0.0, maximum)) / temperature
        exponentials = exponents.exp()
        statistics[rows, 0] = maximum[:, 0]
        statistics[rows, 1] = exponentials.sum(1)
        if with_entropy:
            products = torch.where(exponentials == 0, 0.0, exponentials * exponents)
            statistics[rows, 2] = products.sum(1)
    statistics[:, 3] = _target_logits(logits, targets, shard, row_mask).to(dtype)
    return statistics


def _target_logits(
    logits: Tensor, targets: Tensor, shard: VocabularyShard, row_mask: Tensor | None
) -> Tensor:
    """[tokens]: -inf where another shard holds the target, NaN where the vocabulary lacks it."""
    local = targets - shard.start
    here = (local >= 0) & (local < shard.columns)
    known = (targets >= 0) & (targets < shard.vocab_size)
    picked = logits.gather(1, torch.where(here, local, 0)[:, None])[:, 0]
    picked = torch.where(here, picked, torch.where(known, -math.inf, math.nan).to(picked.dtype))
    return picked if row_mask is None else torch.where(row_mask, picked, 0.0)


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    temperature: Tensor,
    statistics: RowStatistics,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    row_mask: Tensor | None = None,
) -> None:
    """Writes the gradient to this shard's logits into `out`, which may be `logits` itself.

    With p_j the probability of column j, y the target and H the entropy,
    `temperature * gradient_j = grad_log_prob * (1[j = y] - p_j) - grad_entropy * p_j * (log p_j + H)`.
    A row whose two incoming gradients are 0 gets exactly 0, whatever its logits are.

    Args:
        logits, targets, shard, temperature: as given to `row_statistics`.
        statistics: over the whole vocabulary.
        grad_log_probs, grad_entropy: [tokens] each, None for none.
        out: [tokens, v/tp]; its dtype is that of the gradient, rounded once, at this store.
        row_mask: [tokens] bool; rows that are False get a gradient of 0.
    """
    dtype = statistics_dtype(logits.dtype)
    zero = torch.zeros((), dtype=dtype, device=logits.device)
    to_log_probs = zero.expand(len(targets)) if grad_log_probs is None else grad_log_probs.to(dtype)
    to_entropy = zero.expand(len(targets)) if grad_entropy is None else grad_entropy.to(dtype)
    live = (to_log_probs != 0) | (to_entropy != 0)
    if row_mask is not None:
        live = live & row_mask
    local = targets - shard.start
    here = live & (local >= 0) & (local < shard.columns)
    for rows in _row_chunks(logits):
        chunk = _without_masked_rows(logits[rows, : shard.columns].to(dtype), live[rows])
        exponents = (chunk - statistics.maximum[rows, None]) / temperature
        log_p = exponents - statistics.log_sum[rows, None]
        p = log_p.exp()
        gradient = -to_log_probs[rows, None] * p
        if grad_entropy is not None:
            surprise = torch.where(p == 0, 0.0, p * (log_p + statistics.entropy[rows, None]))
            gradient -= to_entropy[rows, None] * surprise
        index = torch.where(here[rows], local[rows], 0)[:, None]
        at_target = torch.where(here[rows], to_log_probs[rows], 0.0)[:, None]
        if shard.columns:
            gradient.scatter_add_(1, index, at_target)
        gradient = _without_masked_rows(gradient / temperature, live[rows])
        out[rows, : shard.columns] = gradient.to(out.dtype)
        out[rows, shard.columns :] = 0
