"""Which part of the vocabulary a tensor-parallel rank holds, and how row statistics are combined over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MAXIMUM, SUM_OF_EXPONENTIALS, SHIFTED_DOT_PRODUCT, TARGET_LOGIT = range(4)


@dataclass(frozen=True)
class VocabularyShard:
    """The columns of the output layer on this tensor-parallel rank (Megatron's contiguous split).

    Attributes:
        start: global token id of the first local column.
        columns: local columns that stand for real tokens; those from here on are padding.
        vocab_size: true size of the vocabulary, over all ranks.
        group: tensor-parallel process group, None when the vocabulary is not split.
    """

    start: int
    columns: int
    vocab_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def build(
        cls, local_columns: int, vocab_size: int | None, group: dist.ProcessGroup | None
    ) -> VocabularyShard:
        """Works out this rank's shard from the width of its logits.

        Raises:
            ValueError: `vocab_size` is not in [1, local_columns * tensor-parallel size].
        """
        size, rank = 1, 0
        if group is not None and dist.get_world_size(group) > 1:
            size, rank = dist.get_world_size(group), dist.get_rank(group)
        else:
            group = None
        padded_size = local_columns * size
        if vocab_size is None:
            vocab_size = padded_size
        if not 1 <= vocab_size <= padded_size:
            raise ValueError(
                f"vocab_size must be between 1 and {padded_size} ({local_columns} local columns on "
                f"{size} tensor-parallel ranks), found {vocab_size}"
            )
        start = rank * local_columns
        columns = min(max(vocab_size - start, 0), local_columns)
        return cls(start=start, columns=columns, vocab_size=vocab_size, group=group)


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of each row over the whole vocabulary, equal on every tensor-parallel rank.

    The log-probability of column j is `(logit_j - maximum) / temperature - log_sum`; maximum and
    log_sum stay apart because their sum, rounded to float32, would cost large logits their digits.
    """

    maximum: Tensor
    log_sum: Tensor
    log_probs: Tensor
    entropy: Tensor

    def rows(self, rows: slice) -> RowStatistics:
        """Those of some rows, as views."""
        return RowStatistics(
            self.maximum[rows], self.log_sum[rows], self.log_probs[rows], self.entropy[rows]
        )

    @classmethod
    def concatenate(cls, parts: list[RowStatistics], like: Tensor) -> RowStatistics:
        """Those of all rows, from those of consecutive parts; `like` gives dtype and device of none."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls(*(like.new_empty(0) for _ in range(4)))
        return cls(
            torch.cat([part.maximum for part in parts]),
            torch.cat([part.log_sum for part in parts]),
            torch.cat([part.log_probs for part in parts]),
            torch.cat([part.entropy for part in parts]),
        )


def gather_statistics(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[tokens, 4] of this shard -> [shards, tokens, 4] on every rank; every rank of the group must call."""
    shards = dist.get_world_size(group)
    gathered = local.new_empty((shards * local.shape[0], local.shape[1]))
    if len(local) > 0:
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
    return gathered.view(shards, *local.shape)


def combine_statistics(
    local: Tensor, temperature: Tensor, row_mask: Tensor | None, group: dist.ProcessGroup | None
) -> RowStatistics:
    """Combines per-shard statistics; the only communication of the op: one all-gather.

    Args:
        local: [tokens, 4] of this shard: largest logit, sum of `exp((logit - largest) / temperature)`,
            dot product of those exponentials with their exponents, logit of the target token (-inf
            where another shard holds it). A shard of padding columns alone has (-inf, 0, 0, -inf).
        temperature: one element.
        row_mask: [tokens] bool; rows that are False get log-probability and entropy 0.
        group: tensor-parallel group; every one of its ranks must call. None: nothing to combine.
    """
    if group is None:
        maximum, total, dot, target = local.unbind(1)
    else:
        shards = gather_statistics(local, group)
        maximum = shards[..., MAXIMUM].amax(0)
        shift = (shards[..., MAXIMUM] - maximum) / temperature
        scale = shift.exp()
        sums = shards[..., SUM_OF_EXPONENTIALS]
        shifted = torch.where(scale == 0, 0.0, shift * sums + shards[..., SHIFTED_DOT_PRODUCT])
        total, dot = (scale * sums).sum(0), (scale * shifted).sum(0)
        target = shards[..., TARGET_LOGIT].amax(0)
    log_sum = total.log()
    log_probs = (target - maximum) / temperature - log_sum
    entropy = log_sum - dot / total
    if row_mask is not None:
        log_probs = torch.where(row_mask, log_probs, 0.0)
        entropy = torch.where(row_mask, entropy, 0.0)
    return RowStatistics(maximum, log_sum, log_probs, entropy)
