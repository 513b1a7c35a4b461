"""Megatron broken where tokens meet: positions, attention, sums over sequences.

The reference of `megatron-pg check` runs the same classes, one sequence at a time and without sharding: a breakage of a
model says by the size of a group, or by there being several sequences, that it leaves that alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_pg.check.options import has_transformer_engine
from megatron_pg.loss import micro_batch
from megatron_pg.megatron.cpu import attention
from megatron_pg.step.token_window import Layout

from .breakage import Patch, breakage, wrap

POSITIONS = 128
"""No more than the learned ones of the check's model."""
TILE = 32
"""Keys that one tile of an attention kernel holds, and no more than one of the CPU's long sequences."""


def context_rank() -> int:
    return parallel_state.get_context_parallel_rank()


def context_size() -> int:
    return parallel_state.get_context_parallel_world_size()


def places(packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
    """The sequence and the position in it of each of this rank's tokens."""
    lengths = packed.cu_seqlens_q.to(torch.int64).diff()
    return Layout(context_rank(), context_size()).local_positions(lengths)


def is_packed(packed: PackedSeqParams | None) -> bool:
    """Whether there are several sequences, as the reference never has them."""
    return packed is not None and packed.cu_seqlens_q.numel() > 2


# Positions


def rotary_slice(patch: Patch, wrong: Callable[[Tensor, int, Tensor], Tensor]) -> None:
    """Has `wrong(right, rank, frequencies)` give the frequencies of one sequence's tokens on this rank."""

    def get(right, rank, size, tokens, frequencies, *args):  # type: ignore[no-untyped-def]
        found = right(rank, size, tokens, frequencies, *args)
        return found if size == 1 else wrong(found, rank, frequencies)

    wrap(patch, rope_utils, "_get_thd_freqs_on_this_cp_rank", get)


@breakage("CP2", "rotary", passes="loss only|tied")
def rotary_positions_are_not_those_of_the_context_parallel_rank(patch: Patch) -> None:
    rotary_slice(patch, lambda right, rank, frequencies: frequencies[: right.size(0)])


@breakage("CP2", "rotary", passes="loss only|tied")
def rotary_positions_are_wrong_in_the_second_chunk(patch: Patch) -> None:
    def wrong(right: Tensor, rank: int, frequencies: Tensor) -> Tensor:
        first = right[: right.size(0) // 2]
        return torch.cat((first, first))

    rotary_slice(patch, wrong)


def position_ids(
    patch: Patch,
    wrong: Callable[[Tensor, PackedSeqParams], Tensor],
    is_spoilt: Callable[[PackedSeqParams | None], bool] = is_packed,
) -> None:
    """Has the model called with other position ids, where they are not those of one whole sequence."""

    def forward(right, model, input_ids, position_ids, attention_mask, **keywords):  # type: ignore[no-untyped-def]
        packed = keywords.get("packed_seq_params")
        if is_spoilt(packed):
            position_ids = wrong(position_ids, packed)
        return right(model, input_ids, position_ids, attention_mask, **keywords)

    wrap(patch, GPTModel, "forward", forward)


def positions_within_the_rank(right: Tensor, packed: PackedSeqParams) -> Tensor:
    starts = packed.cu_seqlens_q.to(torch.int64) // context_size()
    sequence, _ = places(packed)
    return torch.arange(right.size(1), device=right.device)[None] - starts[sequence]


@breakage("CP2", "position", fails="tied", passes="loss only|end to end")
def position_ids_are_those_within_the_rank(patch: Patch) -> None:
    position_ids(patch, positions_within_the_rank)


@breakage("CP2 contiguous", "position ids", fails="end to end|tied", passes="loss only")
def position_ids_of_contiguous_slices_run_on(patch: Patch) -> None:
    position_ids(
        patch,
        lambda right, packed: torch.arange(right.size(1), device=right.device)[None] % POSITIONS,
    )


@breakage("DP2", "position", fails="tied", passes="loss only|end to end")
def position_ids_run_on_over_the_sequences(patch: Patch) -> None:
    def wrong(right: Tensor, packed: PackedSeqParams) -> Tensor:
        # No further than the model has positions.
        return torch.arange(right.size(1), device=right.device)[None] % POSITIONS

    position_ids(patch, wrong)


@breakage("CP2", "position", fails="tied", passes="loss only|end to end")
def position_ids_are_zero(patch: Patch) -> None:
    position_ids(patch, lambda right, packed: torch.zeros_like(right))


@breakage("DP2", "position ids", fails="tied", passes="loss only|end to end")
def position_ids_are_zero_in_the_reference_too(patch: Patch) -> None:
    position_ids(patch, lambda right, packed: torch.zeros_like(right), lambda packed: True)


# Attention


def each_attention(patch: Patch, wrong: Callable[..., Tensor]) -> None:
    """Has `wrong(right, query, key, value, packed)` run in the place of each core attention."""
    owners: list[Any] = [attention.PackedCoreAttention]
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        owners.append(TEDotProductAttention)

    def forward(right, core, query, key, value, mask, *args, packed_seq_params, **keywords):  # type: ignore[no-untyped-def]
        def attend(query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
            found: Tensor = right(
                *(core, query, key, value, mask, *args), packed_seq_params=packed, **keywords
            )
            return found

        return wrong(attend, query, key, value, packed_seq_params)

    for owner in owners:
        wrap(patch, owner, "forward", forward)


def spoil_values(patch: Patch, is_spoilt: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Has attention find nothing at tokens by (position, length of their sequence) on every rank of several."""

    def wrong(attend: Any, query: Tensor, key: Tensor, value: Tensor, packed: Any) -> Tensor:
        if dist.get_world_size() > 1 and is_packed(packed):
            sequence, position = places(packed)
            length = packed.cu_seqlens_q.to(torch.int64).diff()[sequence]
            spoilt = is_spoilt(position, length).view(-1, *[1] * (value.dim() - 1))
            value = value.masked_fill(spoilt, 0.0)
        found: Tensor = attend(query, key, value, packed)
        return found

    each_attention(patch, wrong)


@breakage("CP2", "attention", passes="loss only")
def attention_misses_the_second_chunk(patch: Patch) -> None:
    spoil_values(patch, lambda position, length: position >= length // 2)


@breakage("DP2", "attention", passes="loss only")
def attention_misses_what_lies_beyond_the_first_tile(patch: Patch) -> None:
    spoil_values(patch, lambda position, length: position >= TILE)


@breakage("DP2", "attention", passes="loss only")
def attention_leaks_across_sequences(patch: Patch) -> None:
    def wrong(attend: Any, query: Tensor, key: Tensor, value: Tensor, packed: Any) -> Tensor:
        if is_packed(packed):
            ends = packed.cu_seqlens_q[[0, -1]]
            longest = int(ends[-1])
            packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        found: Tensor = attend(query, key, value, packed)
        return found

    each_attention(patch, wrong)


@breakage("CP2", "attention", passes="loss only")
def gradients_of_keys_and_values_stay_on_their_rank(patch: Patch) -> None:
    gather = attention.gather_from_sequence_parallel_region
    own_alone = partial(gather, tensor_parallel_output_grad=False)
    patch.setattr(attention, "gather_from_sequence_parallel_region", own_alone)


@breakage("CP2", "sequence", "context-parallel", fails="gspo", passes="gradient")
def sums_over_sequences_are_of_this_rank_alone(patch: Patch) -> None:
    patch.setattr(micro_batch, "add_over_group", lambda sums, group: sums)
