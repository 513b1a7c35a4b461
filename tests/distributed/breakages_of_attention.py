"""Megatron broken where tokens meet: positions, attention, sums over sequences.

The reference of `megatron-pg check` runs the same classes, one sequence at a time and without
sharding: a breakage of a model says by the size of a group, or by there being several sequences,
that it leaves that alone.
"""

import functools
from collections.abc import Callable
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
from megatron_pg.megatron.cpu import layer_spec
from megatron_pg.step.token_window import Layout

from .breakage import Break, Patch, around, breakage, wrap

LEARNED_POSITIONS = 128
"""No more than those of the check's model."""
TILE = 32
"""Keys that one tile of an attention kernel holds, and no more than one of the CPU's long
sequences."""


def places(packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
    """The sequence and the position in it of each of this rank's tokens."""
    rank = parallel_state.get_context_parallel_rank()
    layout = Layout(rank, parallel_state.get_context_parallel_world_size())
    return layout.local_positions(packed.cu_seqlens_q.to(torch.int64).diff())


def is_packed(packed: PackedSeqParams | None) -> bool:
    """Whether there are several sequences, as the reference never has them."""
    return packed is not None and packed.cu_seqlens_q.numel() > 2


# Positions


def rotary_slice(wrong: Callable[[Tensor, Tensor], Tensor]) -> Break:
    """Has `wrong(right, frequencies)` give the frequencies of one sequence's tokens on a rank of
    several.
    """

    @around(rope_utils, "_get_thd_freqs_on_this_cp_rank")
    @functools.wraps(wrong)
    def get(right, rank, size, tokens, frequencies, *args):
        own = right(rank, size, tokens, frequencies, *args)
        return own if size == 1 else wrong(own, frequencies)

    return get


@breakage("CP2", passes="loss only|tied")
@rotary_slice
def rotary_positions_are_not_those_of_the_context_parallel_rank(right, frequencies):
    return frequencies[: right.size(0)]


@breakage("CP2", passes="loss only|tied")
@rotary_slice
def rotary_positions_are_wrong_in_the_second_chunk(right, frequencies):
    first = right[: right.size(0) // 2]
    return torch.cat((first, first))


@breakage("CP2", fails="every token", passes="loss only|tied|gradient")
@around(rope_utils, "_get_thd_freqs_on_this_cp_rank")
def last_token_of_a_sequence_is_not_rotated(right, rank, *args):
    """In the reference too, whose sequences have no padding after their last token."""
    own = right(rank, *args)
    return torch.cat((own[:-1], 0.0 * own[-1:])) if rank == 0 else own


def position_ids(
    wrong: Callable[[Tensor, PackedSeqParams], Tensor],
    is_spoilt: Callable[[PackedSeqParams | None], bool] = is_packed,
) -> Break:
    """Has the model called with other position ids, where they are not those of one whole
    sequence.
    """

    @around(GPTModel, "forward")
    @functools.wraps(wrong)
    def forward(right, model, input_ids, position_ids, attention_mask, **keywords):
        packed = keywords.get("packed_seq_params")
        if is_spoilt(packed):
            position_ids = wrong(position_ids, packed)
        return right(model, input_ids, position_ids, attention_mask, **keywords)

    return forward


def running_on(right: Tensor, packed: PackedSeqParams) -> Tensor:
    """No further than the model has positions."""
    return torch.arange(right.size(1), device=right.device)[None] % LEARNED_POSITIONS


def anything(packed: PackedSeqParams | None) -> bool:
    return True


OF_POSITIONS = {"fails": "tied", "passes": "loss only|end to end"}


@breakage("CP2", **OF_POSITIONS)
@position_ids
def position_ids_are_those_within_the_rank(right, packed):
    size = parallel_state.get_context_parallel_world_size()
    sequence, _ = places(packed)
    starts = packed.cu_seqlens_q.to(torch.int64) // size
    return torch.arange(right.size(1), device=right.device)[None] - starts[sequence]


for name, group, wrong in (
    ("run on over the sequences", "DP2", position_ids(running_on)),
    ("are zero", "CP2", position_ids(lambda right, packed: 0 * right)),
    ("are zero in the reference too", "DP2", position_ids(lambda right, _: 0 * right, anything)),
):
    breakage(group, name=f"position ids {name}", **OF_POSITIONS)(wrong)


# Attention


def each_attention(wrong: Callable[..., Tensor]) -> Break:
    """Has `wrong(right, query, key, value, packed)` run in the place of each core attention."""
    owners: list[Any] = [layer_spec.PackedCoreAttention]
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        owners.append(TEDotProductAttention)

    def forward(right, core, query, key, value, mask, *args, packed_seq_params, **keywords):
        def attend(query, key, value, packed):
            inputs = (core, query, key, value, mask, *args)
            return right(*inputs, packed_seq_params=packed, **keywords)

        return wrong(attend, query, key, value, packed_seq_params)

    @functools.wraps(wrong)
    def apply(patch: Patch) -> None:
        for owner in owners:
            wrap(patch, owner, "forward", forward)

    return apply


def spoil_values(is_spoilt: Callable[[Tensor, Tensor], Tensor]) -> Break:
    """Has attention find nothing at tokens by (position, length of their sequence) on every rank of
    several.
    """

    @each_attention
    @functools.wraps(is_spoilt)
    def wrong(attend, query, key, value, packed):
        if dist.get_world_size() > 1 and is_packed(packed):
            sequence, position = places(packed)
            length = packed.cu_seqlens_q.to(torch.int64).diff()[sequence]
            spoilt = is_spoilt(position, length).view(-1, *[1] * (value.dim() - 1))
            value = value.masked_fill(spoilt, 0.0)
        return attend(query, key, value, packed)

    return wrong


@breakage("CP2", passes="loss only")
@spoil_values
def attention_misses_the_second_chunk(position, length):
    return position >= length // 2


@breakage("DP2", passes="loss only")
@spoil_values
def attention_misses_what_lies_beyond_the_first_tile(position, length):
    return position >= TILE


@breakage("DP2", passes="loss only")
@each_attention
def attention_leaks_across_sequences(attend, query, key, value, packed):
    if is_packed(packed):
        ends = packed.cu_seqlens_q[[0, -1]]
        longest = int(ends[-1])
        packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    return attend(query, key, value, packed)


@breakage("CP2", passes="loss only")
@around(layer_spec, "gather_from_sequence_parallel_region")
def gradients_of_keys_and_values_stay_on_their_rank(right, *args, **keywords):
    return right(*args, **keywords, tensor_parallel_output_grad=False)


@breakage("CP2", fails="gspo", passes="gradient")
@around(micro_batch, "add_over_group")
def sums_over_sequences_are_of_this_rank_alone(right, sums, group):
    return sums
