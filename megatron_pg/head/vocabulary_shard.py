"""The part of the vocabulary on a tensor-parallel rank, and the inputs and outputs of passes over
its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Incoming = Sequence[Tensor | None]
"""The gradients [tokens] to log-probabilities and entropy, None for none."""


@dataclass(frozen=True)
class VocabularyShard:
    """The output layer's columns on this tensor-parallel rank (Megatron's contiguous split)."""

    start: int
    """Global token id of the first local column."""
    columns: int
    """Local columns of real tokens. Columns from here on are padding."""
    vocab_size: int
    """True size of the vocabulary, over all ranks."""
    group: dist.ProcessGroup | None
    """Tensor-parallel process group, None if the vocabulary is not split."""

    @classmethod
    def build(
        cls, local_columns: int, vocab_size: int | None, group: dist.ProcessGroup | None
    ) -> VocabularyShard:
        """Compute this rank's shard. Raise ValueError for a `vocab_size` that the ranks' columns
        cannot hold.
        """
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        padded_size = local_columns * size
        vocab_size = padded_size if vocab_size is None else vocab_size
        if not 1 <= vocab_size <= padded_size:
            raise ValueError(
                f"vocab_size must be between 1 and {padded_size} ({local_columns} local columns on "
                f"{size} tensor-parallel ranks), found {vocab_size}"
            )
        start = rank * local_columns
        return cls(start, min(max(vocab_size - start, 0), local_columns), vocab_size, group)

    def columns_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return global ids' local columns, 0 if another shard holds the id, and a mask of the ids
        that this shard holds.
        """
        local = ids - self.start
        is_here = (local >= 0) & (local < self.columns)
        return torch.where(is_here, local, 0), is_here

    def gather(self, local: Tensor) -> Tensor:
        """Gather each shard's statistics [tokens, 4] into [shards, tokens, 4]. Every rank in the
        group must call.
        """
        shards = dist.get_world_size(self.group)
        gathered = local.new_empty((shards * local.shape[0], local.shape[1]))
        if len(local) > 0:
            dist.all_gather_into_tensor(gathered, local.contiguous(), group=self.group)
        return gathered.view(shards, *local.shape)


@dataclass(frozen=True)
class LogitRows:
    """Rows of logits with all settings of their statistics, the input of both row passes."""

    logits: Tensor  # [tokens, v/tp] in any float dtype
    targets: Tensor  # global ids [tokens] int64, NaN results outside the vocabulary
    shard: VocabularyShard
    temperature: Tensor  # one element in the dtype of the statistics
    row_mask: Tensor | None = None  # rows to read, [tokens] bool
    has_set: Tensor | None = None  # rows with a sampling set, [tokens] bool
    set_statistics: Tensor | None = None  # [tokens, 4], this shard's part of the sets
    softcap: float | None = None
    """The passes use `softcap * tanh(logits / softcap)` as logits. None: no soft-cap."""

    def logits_of(self, columns: Tensor) -> Tensor:
        """Return the logits [tokens, n] of local columns, under the soft-cap."""
        logits = self.logits.gather(1, columns).to(self.temperature.dtype)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def part(self, rows: slice) -> LogitRows:
        """Take some rows, as views, without the statistics of kept sets."""
        mask, has_set = (None if x is None else x[rows] for x in (self.row_mask, self.has_set))
        return LogitRows(
            self.logits[rows],
            self.targets[rows],
            self.shard,
            self.temperature,
            mask,
            has_set,
            softcap=self.softcap,
        )

    @property
    def pass_mask(self) -> Tensor | None:
        """The rows that the passes read, [tokens] bool, None for all."""
        if self.has_set is None:
            return self.row_mask
        return ~self.has_set if self.row_mask is None else self.row_mask & ~self.has_set


@dataclass(frozen=True)
class ColumnGradients:
    """The gradients of single columns that differ from the formula for all columns."""

    columns: Tensor  # local columns [rows, n] int64
    is_here: Tensor  # [rows, n] bool: True for a column of this rank, once per row
    values: Tensor  # [rows, n] in the dtype of the statistics

    def write(self, out: Tensor, values: Tensor | None = None) -> None:
        """Write `values` (default: `self.values`) to their columns of `out` [rows, v/tp]."""
        values = self.values if values is None else values
        # A column of another rank rewrites the row's first local column. A row without a local
        # column keeps its first column.
        first = self.is_here.int().argmax(1, keepdim=True)
        columns = torch.where(self.is_here, self.columns, self.columns.gather(1, first))
        values = torch.where(self.is_here, values, values.gather(1, first)).to(out.dtype)
        has_one = self.is_here.any(1, keepdim=True)
        columns = torch.where(has_one, columns, 0)
        out.scatter_(1, columns, torch.where(has_one, values, out[:, :1]))


class ScoreGradient(NamedTuple):
    """The gradient of rows of logits, including a further score's gradient."""

    incoming: Incoming
    """The gradients [rows] to log-probabilities and entropy for the pass over all columns."""
    dense: Tensor | None
    """The further gradient [rows, v/tp]."""
    columns: ColumnGradients | None
    """The columns to write after the pass."""


class RowStatistics(NamedTuple):
    """Statistics of each row over the whole vocabulary, [tokens] each, equal on every
    tensor-parallel rank.

    Maximum and log_sum are separate, because their float32 sum would cost large logits digits.
    """

    maximum: Tensor
    log_sum: Tensor
    log_probs: Tensor
    entropy: Tensor

    @classmethod
    def empty(cls, rows: int, like: Tensor) -> RowStatistics:
        """Allocate uninitialized statistics."""
        return cls(*(like.new_empty(rows) for _ in cls._fields))

    def rows(self, rows: slice) -> RowStatistics:
        """Take the statistics of some rows, as views."""
        return RowStatistics(*(vector[rows] for vector in self))

    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Return the log-probabilities of logits [rows, columns]."""
        return (logits - self.maximum[:, None]) / temperature - self.log_sum[:, None]

    def kept(self) -> RowStatistics:
        """Drop the log-probabilities, which the gradient does not need and the caller may
        change.
        """
        return self._replace(log_probs=self.maximum)

    @classmethod
    def concatenate(cls, parts: list[RowStatistics], like: Tensor) -> RowStatistics:
        """Concatenate the statistics of consecutive parts. See `joined`."""
        return cls(*(joined([part[i] for part in parts], like) for i in range(len(cls._fields))))


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Concatenate the vectors of consecutive rows. Without parts, `like` gives dtype, device and
    shape.
    """
    if len(parts) == 1:
        return parts[0]
    return torch.cat([like.new_empty((*like.shape[:-1], 0)), *parts], -1)
