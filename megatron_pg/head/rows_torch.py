"""The two row passes in plain torch, a few rows at a time: statistics of the logits and gradient to
the logits.
"""

import math

import torch
from torch import Tensor

from megatron_pg.head.vocabulary_shard import Incoming, LogitRows, RowStatistics, VocabularyShard

_CHUNK_ELEMENTS = 1 << 23


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics, float32 logits and weight gradients: float32, or float64 for
    float64 operands.
    """
    return torch.promote_types(dtype, torch.float32)


def temperature_tensor(temperature: float | Tensor, logits: Tensor) -> Tensor:
    """Return the temperature as one element of the statistics dtype on the device of `logits`."""
    dtype = wide_dtype(logits.dtype)
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            shape = tuple(temperature.shape)
            raise ValueError(f"temperature must be a number or one element, found shape {shape}")
        return temperature.detach().to(device=logits.device, dtype=dtype).reshape(())
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite, found {temperature}")
    return torch.full((), temperature, dtype=dtype, device=logits.device)


def chunk_slices(begin: int, end: int, size: int) -> list[slice]:
    """Split [begin, end) into slices of at most `size` rows."""
    return [slice(first, min(first + size, end)) for first in range(begin, end, size)]


def row_chunks(rows: int, columns: int) -> list[slice]:
    """Split the rows of a matrix into slices with small float32 copies."""
    return chunk_slices(0, rows, max(1, _CHUNK_ELEMENTS // max(1, columns)))


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the logits, soft-capped unless `softcap` is None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def row_statistics(rows: LogitRows) -> RowStatistics:
    """Compute each row's statistics over the whole vocabulary. Every tensor-parallel rank must
    call.
    """
    local = _local_statistics(rows)
    if rows.has_set is not None and rows.set_statistics is not None:
        local = torch.where(rows.has_set[:, None], rows.set_statistics, local)
    return combine_statistics(local, rows.shard, rows.temperature, rows.row_mask)


def _local_statistics(rows: LogitRows) -> Tensor:
    """Compute the statistics [tokens, 4] of this shard's columns, (-inf, 0, 0, -inf) if all are
    padding.

    They are the largest logit, the sum of the exponentials `exp((logit - largest) / temperature)`,
    the dot product of exponentials and exponents, and the target's logit: -inf if another shard
    holds it, NaN if the vocabulary lacks it.
    """
    logits, columns, mask = rows.logits, rows.shard.columns, rows.pass_mask
    dtype = wide_dtype(logits.dtype)
    statistics = torch.zeros((logits.shape[0], 4), dtype=dtype, device=logits.device)
    if columns == 0:
        statistics[:, 0] = -math.inf
    for part in row_chunks(*logits.shape) if columns else ():
        chunk = capped(logits[part, :columns].to(dtype), rows.softcap)
        if mask is not None:  # not by `*`: NaN or inf must not survive
            chunk = torch.where(mask[part, None], chunk, 0.0)
        maximum = chunk.amax(1, keepdim=True)
        # A row of only -inf is not shifted. Its exponentials are 0, as they should be.
        exponents = (chunk - torch.where(maximum == -math.inf, 0.0, maximum)) / rows.temperature
        exponentials = exponents.exp()
        statistics[part, 0] = maximum[:, 0]
        statistics[part, 1] = exponentials.sum(1)
        statistics[part, 2] = torch.where(exponentials == 0, 0.0, exponentials * exponents).sum(1)
    column, is_here = rows.shard.columns_of(rows.targets)
    known = (rows.targets >= 0) & (rows.targets < rows.shard.vocab_size)
    picked = capped(logits.gather(1, column[:, None])[:, 0].to(dtype), rows.softcap)
    picked = torch.where(is_here, picked, torch.where(known, -math.inf, math.nan).to(dtype))
    statistics[:, 3] = picked if mask is None else torch.where(mask, picked, 0.0)
    return statistics


def combine_statistics(
    local: Tensor, shard: VocabularyShard, temperature: Tensor, row_mask: Tensor | None = None
) -> RowStatistics:
    """Combine the `_local_statistics` of all shards in one all-gather, the op's only
    communication.
    """
    if shard.group is None:
        maximum, total, dot, target = local.unbind(1)
    else:
        maxima, sums, dots, targets = shard.gather(local).unbind(2)
        maximum, target = maxima.amax(0), targets.amax(0)
        shift = (maxima - maximum) / temperature
        scale = shift.exp()
        shifted = torch.where(scale == 0, 0.0, shift * sums + dots)
        total, dot = (scale * sums).sum(0), (scale * shifted).sum(0)
    log_sum = total.log()
    log_probs = (target - maximum) / temperature - log_sum
    entropy = log_sum - dot / total
    if row_mask is not None:
        log_probs = torch.where(row_mask, log_probs, 0.0)
        entropy = torch.where(row_mask, entropy, 0.0)
    return RowStatistics(maximum, log_sum, log_probs, entropy)


def write_gradient(
    rows: LogitRows, statistics: RowStatistics, incoming: Incoming, out: Tensor
) -> None:
    """Write the gradient to this shard's logits to `out` [tokens, v/tp], rounded once. `out` may be
    the logits.

    With p_j the probability of column j, y the target and H the entropy, `temperature * gradient_j
    = grad_log_prob * (1[j = y] - p_j) - grad_entropy * p_j * (log p_j + H)`. Under a soft-cap, `1 -
    (capped / softcap) ** 2` multiplies it. A row gets exactly 0 if both incoming gradients are 0 or
    it has a kept set.
    """
    logits, columns, mask = rows.logits, rows.shard.columns, rows.pass_mask
    dtype = wide_dtype(logits.dtype)
    zero = logits.new_zeros((), dtype=dtype).expand(len(logits))
    to_log_probs, to_entropy = (zero if vector is None else vector.to(dtype) for vector in incoming)
    live = (to_log_probs != 0) | (to_entropy != 0)
    live = live if mask is None else live & mask
    column, is_here = rows.shard.columns_of(rows.targets)
    at_target = torch.where(live & is_here, to_log_probs, 0.0)
    for part in row_chunks(*logits.shape):
        chunk = torch.where(live[part, None], logits[part, :columns].to(dtype), 0.0)
        chunk = capped(chunk, rows.softcap)
        log_p = statistics.rows(part).log_softmax(chunk, rows.temperature)
        p = log_p.exp()
        gradient = -to_log_probs[part, None] * p
        if incoming[1] is not None:
            surprise = torch.where(p == 0, 0.0, p * (log_p + statistics.entropy[part, None]))
            gradient -= to_entropy[part, None] * surprise
        if columns:
            gradient.scatter_add_(1, column[part, None], at_target[part, None])
        if rows.softcap is not None:
            gradient *= 1 - (chunk / rows.softcap) ** 2
        gradient = torch.where(live[part, None], gradient / rows.temperature, 0.0)
        out[part, :columns] = gradient.to(out.dtype)
        out[part, columns:] = 0
