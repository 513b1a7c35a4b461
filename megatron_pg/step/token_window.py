"""Tokens of a packed micro-batch on each context-parallel rank. All offset arithmetic is here.

Sequences are packed end to end (THD) and split over a context-parallel group of `c > 1` ranks like
in Transformer Engine's `thd_get_partitioned_indices` (zigzag): each sequence is padded to `2 c k`
tokens, `k = ceil(total / (2 c))`, and rank `r` owns its chunks `r` and `2 c - 1 - r` of `k` tokens
each, so that it holds `[sequence 0 chunk r, sequence 0 chunk 2c-1-r, sequence 1 chunk r, ...]`. At
`c = 1` there is no padding.

The logit at position `p` predicts token `p + 1`, so response token `t` (`prompt_length <= t <
total`) is scored on the rank that owns position `t - 1`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_pg.step.bins import Indices
from megatron_pg.step.sample import check_lengths, checked_integer

Length = TypeVar("Length", int, Indices)


@dataclass(frozen=True)
class Layout:
    """Position of one rank in a context-parallel group, and the lengths of packed sequences.

    Raises:
        ValueError: a number is not an integer or out of range.
    """

    cp_rank: int = 0
    cp_size: int = 1
    multiple: int = 1
    """A divisor of the packed length over the whole group (`pad_to_multiple`)."""

    def __post_init__(self) -> None:
        for name, size in (("cp_size", self.cp_size), ("pad_to_multiple", self.multiple)):
            if checked_integer(name, size) < 1:
                raise ValueError(f"{name} is {size}, expected 1 or more")
        if not 0 <= checked_integer("cp_rank", self.cp_rank) < self.cp_size:
            raise ValueError(
                f"cp_rank is {self.cp_rank} and cp_size {self.cp_size}, expected 0 <= cp_rank < "
                "cp_size"
            )

    @property
    def num_chunks(self) -> int:
        """Number of chunks per sequence, a divisor of its padded length."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def least_tokens(self) -> int:
        """Packed length of an empty micro-batch, and a divisor of every packed length."""
        return math.lcm(self.num_chunks, self.multiple)

    def padded_length(self, total_length: Length) -> Length:
        """Compute the tokens that one sequence takes in a pack, elementwise for arrays."""
        return -(-total_length // self.num_chunks) * self.num_chunks

    def packed_length(self, padded_tokens: int) -> int:
        """Compute a pack's tokens from the tokens of its padded samples. An empty pack is a dummy
        segment.
        """
        return max(-(-padded_tokens // self.least_tokens), 1) * self.least_tokens

    def local_positions(self, padded: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the segment and position [local_tokens] of this rank's tokens from padded lengths
        [segments].
        """
        segment_ids, positions = map(torch.from_numpy, _positions(self, padded.cpu().numpy()))
        return segment_ids.to(padded.device), positions.to(padded.device)


@dataclass(frozen=True, eq=False)
class TokenWindow:
    """Tokens of one packed micro-batch on one context-parallel rank, built by `build`.

    The "window" is the response tokens that this rank scores, in the order of its local rows. The
    windows of a context-parallel group are disjoint and cover every response token once.
    """

    total_lengths: tuple[int, ...]
    """Prompt and response tokens per sample. The padding segment is not a sample."""
    response_lengths: tuple[int, ...]
    """Response tokens per sample."""
    layout: Layout
    cu_seqlens: Tensor
    """The padded cumulative lengths [segments + 1] int32 over the whole group, including the
    padding segment."""
    max_seqlen: int
    """The longest padded segment, in tokens over the whole group."""
    segment_ids: Tensor
    """The segment of each local token, [local_tokens] int64."""
    position_ids: Tensor
    """The position of each local token within its own sequence, [local_tokens] int64."""
    token_indices: Tensor
    """Index [local_tokens] int64 into the samples' concatenated unpadded tokens, -1 for padding."""
    target_indices: Tensor
    """Index [local_tokens] int64 into the same tokens for the response token that the row scores,
    -1 for none."""
    logit_rows: Tensor
    """The local rows that score a response token, [window] int64."""
    response_indices: Tensor
    """Index [window] int64 of the scored token into the samples' concatenated responses."""
    window_segment_ids: Tensor
    """The sample of each scored token, [window] int64."""

    @property
    def cp_rank(self) -> int:
        """Rank in the context-parallel group."""
        return self.layout.cp_rank

    @property
    def cp_size(self) -> int:
        """Size of the context-parallel group."""
        return self.layout.cp_size

    @property
    def num_samples(self) -> int:
        """Samples in the micro-batch, over the whole group."""
        return len(self.total_lengths)

    @property
    def local_tokens(self) -> int:
        """Input tokens of the model on this rank, including padding."""
        return self.segment_ids.numel()

    @property
    def num_tokens(self) -> int:
        """Tokens in the packed micro-batch over the whole group, including padding."""
        return self.local_tokens * self.cp_size

    def __len__(self) -> int:
        return self.logit_rows.numel()

    def in_responses(self, values: Tensor) -> Tensor:
        """Scatter this rank's values [..., window] to all response tokens [..., sum of the response
        lengths].

        The sum over the context-parallel group then has every rank's values.
        """
        whole = values.new_zeros(*values.shape[:-1], sum(self.response_lengths))
        return whole.index_copy_(-1, self.response_indices.to(values.device), values)

    def sample_borders(self, loss_mask: Tensor, size: int) -> list[int]:
        """Split the samples into parts so that no rank of the context-parallel group scores more
        than `size` active tokens in a part.

        A longer sample is a separate part. Lengths of whole samples decide, so that every rank of
        the group computes the same parts. `loss_mask` is [sum of the response lengths] bool on the
        host. Returns borders [parts + 1], from 0 to `num_samples`.
        """
        lengths = np.array([self.total_lengths, self.response_lengths], np.int64)
        totals, responses = torch.from_numpy(lengths)
        samples = torch.arange(self.num_samples, device="cpu").repeat_interleave(responses)
        active = samples[loss_mask].bincount(minlength=self.num_samples)
        on_one_rank = self.layout.padded_length(totals) // self.cp_size
        ends = torch.minimum(active, on_one_rank).cumsum(0)
        borders, before = [0], 0
        while borders[-1] < self.num_samples:
            fit = int(torch.searchsorted(ends, before + size, right=True))
            borders.append(max(fit, borders[-1] + 1))
            before = int(ends[borders[-1] - 1])
        return borders

    @classmethod
    def build(
        cls,
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        cp_rank: int = 0,
        cp_size: int = 1,
        pad_to_multiple: int = 1,
    ) -> TokenWindow:
        """Compute the window of one rank, on the host and without communication.

        Args:
            total_lengths: prompt and response tokens per sample. Empty for an empty micro-batch.
            response_lengths: response tokens per sample. 0 is legal and contributes nothing.
            cp_rank: rank in the context-parallel group of size `cp_size`.
            cp_size: 1 without context parallelism.
            pad_to_multiple: the packed length over the whole group becomes a multiple of it, by a
                padding segment outside all samples (`cp_size * tp_size` under sequence
                parallelism).

        Raises:
            ValueError: lengths contradict each other, a response has no prompt token before it (its
                first token would have no logit), or sizes are not integers or out of range.
        """
        layout = Layout(cp_rank, cp_size, pad_to_multiple)
        total_lengths, response_lengths = _checked_lengths(total_lengths, response_lengths)
        segments = [
            (total, response, layout.padded_length(total))
            for total, response in zip(total_lengths, response_lengths, strict=True)
        ]
        used = sum(padded for *_, padded in segments)
        padding = layout.packed_length(used) - used
        if padding:  # a segment without tokens and response
            segments.append((0, 0, padding))
        totals, responses, padded = np.array(segments, dtype=np.int64).T
        segment_ids, position_ids = _positions(layout, padded)
        starts = [np.cumsum(totals) - totals, np.cumsum(responses) - responses]
        table = np.stack([totals, totals - responses, *starts])
        total, prompt, token_start, response_start = table.take(segment_ids, axis=1)
        next_position = position_ids + 1
        is_scored = (next_position >= prompt) & (next_position < total)
        (logit_rows,) = is_scored.nonzero()
        response_indices = (response_start + next_position - prompt)[logit_rows]
        is_token = position_ids < total
        tensors = {
            "cu_seqlens": np.concatenate([[0], np.cumsum(padded)]).astype(np.int32),
            "segment_ids": segment_ids,
            "position_ids": position_ids,
            "token_indices": np.where(is_token, token_start + position_ids, -1),
            "target_indices": np.where(is_scored, token_start + next_position, -1),
            "logit_rows": logit_rows,
            "response_indices": response_indices,
            "window_segment_ids": segment_ids[logit_rows],
        }
        return cls(
            total_lengths=total_lengths,
            response_lengths=response_lengths,
            layout=layout,
            max_seqlen=int(padded.max()),
            **{name: torch.from_numpy(values) for name, values in tensors.items()},
        )


def _positions(layout: Layout, padded: Indices) -> tuple[Indices, Indices]:
    cp_rank, cp_size = layout.cp_rank, layout.cp_size
    # NumPy has less overhead than torch on the host, and its `repeat` is ten times as fast.
    segments = np.arange(len(padded))
    local_lengths = padded // cp_size
    segment_ids = np.repeat(segments, local_lengths)
    starts = np.cumsum(local_lengths) - local_lengths
    offset = np.arange(len(segment_ids)) - starts[segment_ids]
    if cp_size == 1:
        return segment_ids, offset
    chunk = local_lengths[segment_ids] // 2
    # The first half of a rank's tokens is chunk r. The second half, already at offset k, is chunk
    # 2c - 1 - r.
    shift = np.where(offset < chunk, cp_rank * chunk, (2 * cp_size - 2 - cp_rank) * chunk)
    return segment_ids, offset + shift


def _checked_lengths(
    total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    if len(total_lengths) != len(response_lengths):
        raise ValueError(
            f"total_lengths has {len(total_lengths)} samples and response_lengths "
            f"{len(response_lengths)}: pass one of each per sample"
        )
    names = {"total_lengths": total_lengths, "response_lengths": response_lengths}
    totals, responses = (
        tuple(checked_integer(f"{name}[{number}]", value) for number, value in enumerate(lengths))
        for name, lengths in names.items()
    )
    for number, (total, response) in enumerate(zip(totals, responses, strict=True)):
        where = f"sample {number}: response_lengths[{number}]"
        check_lengths(where, response, f"total_lengths[{number}]", total)
    return totals, responses
