"""Megatron broken inside the model: attention, positions, tensor, pipeline and expert parallelism, recomputation.

The reference of `megatron-pg check` runs the same classes, one sequence at a time and without sharding: a breakage
here says by the size of a group, or by there being several sequences, that it leaves that alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_pg.check.options import has_transformer_engine
from megatron_pg.loss.sequence import SequenceReduction
from megatron_pg.megatron.cpu import attention
from megatron_pg.step.token_window import local_positions

from .breakage import Patch, breakage, with_argument, wrap

TILE = 32
"""Keys that one tile of an attention kernel holds, and no more than one of the CPU's long sequences."""


def context_rank() -> int:
    return parallel_state.get_context_parallel_rank()


def context_size() -> int:
    return parallel_state.get_context_parallel_world_size()


def places(packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
    """The sequence and the position in it of each of this rank's tokens."""
    lengths = packed.cu_seqlens_q.to(torch.int64).diff()
    return local_positions(lengths, context_rank(), context_size())


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


def position_ids(patch: Patch, wrong: Callable[[Tensor, PackedSeqParams], Tensor]) -> None:
    """Has the model called with other position ids, where they are not those of one whole sequence."""

    def forward(right, model, input_ids, position_ids, attention_mask, **keywords):  # type: ignore[no-untyped-def]
        packed = keywords.get("packed_seq_params")
        if is_packed(packed):
            position_ids = wrong(position_ids, packed)
        return right(model, input_ids, position_ids, attention_mask, **keywords)

    wrap(patch, GPTModel, "forward", forward)


@breakage("CP2", "position", fails="tied", passes="loss only|end to end")
def position_ids_are_those_within_the_rank(patch: Patch) -> None:
    def wrong(right: Tensor, packed: PackedSeqParams) -> Tensor:
        starts = packed.cu_seqlens_q.to(torch.int64) // context_size()
        sequence, _ = places(packed)
        return torch.arange(right.size(1), device=right.device)[None] - starts[sequence]

    position_ids(patch, wrong)


@breakage("DP2", "position", fails="tied", passes="loss only|end to end")
def position_ids_run_on_over_the_sequences(patch: Patch) -> None:
    position_ids(
        patch, lambda right, packed: torch.arange(right.size(1), device=right.device)[None]
    )


@breakage("CP2", "position", fails="tied", passes="loss only|end to end")
def position_ids_are_zero(patch: Patch) -> None:
    position_ids(patch, lambda right, packed: torch.zeros_like(right))


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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None

    patch.setattr(attention._AllGather, "backward", staticmethod(backward))


@breakage("CP2", "sequence", "context-parallel", fails="gspo", passes="gradient")
def sums_over_sequences_are_of_this_rank_alone(patch: Patch) -> None:
    def sums(right, reduction, rows):  # type: ignore[no-untyped-def]
        return right(type(reduction)(reduction.window_segment_ids, reduction.num_samples), rows)

    wrap(patch, SequenceReduction, "sums", sums)


# Tensor parallelism

SHARDS = ("embedding", "output.layer", "tensor-parallel rank 1")


def tensor_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


def tensor_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


@breakage("TP2 SP", *SHARDS, passes="loss only")
def embedding_is_one_id_off_on_the_second_rank(patch: Patch) -> None:
    def forward(right, embedding, input_ids):  # type: ignore[no-untyped-def]
        shift = tensor_rank()  # 0 where there is one rank
        embedding.vocab_start_index += shift
        output = right(embedding, input_ids)
        embedding.vocab_start_index -= shift
        return output

    wrap(patch, layers.VocabParallelEmbedding, "forward", forward)


def built(patch: Patch, change: Callable[[Any], None]) -> None:
    """Has every sharded GPTModel changed once it is built."""

    def init(right, model, *args, **keywords):  # type: ignore[no-untyped-def]
        right(model, *args, **keywords)
        change(model)

    wrap(patch, GPTModel, "__init__", init)


@breakage("TP2 SP", *SHARDS, passes="loss only")
def output_layer_is_one_id_off_on_the_second_rank(patch: Patch) -> None:
    def change(model: Any) -> None:
        if tensor_rank() == 1:
            model.output_layer.register_forward_hook(
                lambda layer, inputs, output: (output[0].roll(1, -1), *output[1:])
            )

    built(patch, change)


class Done:
    """A collective's handle."""

    def wait(self) -> None: ...


@breakage("TP2 SP", "tensor-parallel", passes="loss only")
def input_gradients_of_columns_are_not_reduced(patch: Patch) -> None:
    def reduce_scatter(output: Tensor, whole: Tensor, *, group: Any, **_: Any) -> Done:
        output.copy_(whole.chunk(group.size())[group.rank()])
        return Done()

    patch.setattr(layers, "dist_reduce_scatter_func", reduce_scatter)


@breakage("TP2 SP", "loss is right|loss-only rows pass", passes="loss only")
def rows_are_averaged_over_tensor_parallelism(patch: Patch) -> None:
    def reduce(right, tensor, *args, **keywords):  # type: ignore[no-untyped-def]
        return right(tensor, *args, **keywords) / tensor_size()

    wrap(patch, layers, "reduce_scatter_to_sequence_parallel_region", reduce)


# Pipelines


def each_message(patch: Patch, argument: str, change: Callable[[Tensor], Tensor]) -> None:
    """Has stages send something else."""

    def changed(message: Tensor | None) -> Tensor | None:
        return None if message is None else change(message)

    with_argument(patch, P2PCommunicator, "_communicate", argument, changed)


@breakage("PP2", "pipeline|stage", "activation")
def stage_sends_the_activation_before(patch: Patch) -> None:
    kept: list[Tensor] = []

    def change(message: Tensor) -> Tensor:
        stale = message.detach().clone()
        if kept:
            before, count = kept.pop(), message.size(0)
            stale.zero_()[: before.size(0)] = before[:count]
        kept.append(message.detach().clone())
        return stale

    each_message(patch, "tensor_send_next", change)


@breakage("PP2", "stage 0", "2 times", passes="loss only")
def gradient_is_sent_back_twice_as_large(patch: Patch) -> None:
    each_message(patch, "tensor_send_prev", lambda message: 2.0 * message)


# Experts


@breakage("EP2", "expert", passes="loss only")
def gradients_of_tokens_at_other_experts_are_lost(patch: Patch) -> None:
    right = mappings._AllToAll.backward

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, whole, *rest = right(ctx, *gradients)
        sizes = ctx.input_split_sizes
        if sizes is not None and ctx.group.size() > 1:
            mine = ctx.group.rank()
            parts = [
                part if rank == mine else torch.zeros_like(part)
                for rank, part in enumerate(whole.split([int(size) for size in sizes]))
            ]
            whole = torch.cat(parts)
        return group, whole, *rest

    patch.setattr(mappings._AllToAll, "backward", staticmethod(backward))


def auxiliary_scale(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Has the schedule give another scale to the auxiliary loss."""
    right = MoEAuxLossAutoScaler.set_loss_scale
    patch.setattr(
        MoEAuxLossAutoScaler, "set_loss_scale", staticmethod(lambda scale: right(change(scale)))
    )


@breakage("EP2", "auxiliary", fails="auxiliary loss", passes="gradient")
def auxiliary_loss_is_dropped(patch: Patch) -> None:
    auxiliary_scale(patch, lambda scale: 0.0 * scale)


@breakage("CP2 experts", "auxiliary", fails="auxiliary loss", passes="gradient")
def auxiliary_loss_has_the_context_parallel_factor_twice(patch: Patch) -> None:
    auxiliary_scale(patch, lambda scale: context_size() * scale)


@breakage("CP2 experts", "auxiliary", fails="auxiliary loss", passes="gradient|per micro-batch")
def auxiliary_loss_is_not_scaled_by_tokens(patch: Patch) -> None:
    def attach(right, router, *args, **keywords):  # type: ignore[no-untyped-def]
        kept, router.calculate_per_token_loss = router.calculate_per_token_loss, False
        result = right(router, *args, **keywords)
        router.calculate_per_token_loss = kept
        return result

    wrap(patch, TopKRouter, "attach_and_log_load_balancing_loss", attach)


# Recomputation


@breakage("DP2", "recomput", fails="recompute", passes="gradient")
def activations_are_recomputed_from_another_input(patch: Patch) -> None:
    def detach_variable(right, inputs):  # type: ignore[no-untyped-def]
        first, *rest = right(inputs)
        other = (1.1 * first).detach().requires_grad_(first.requires_grad)
        return other, *rest

    wrap(patch, random, "detach_variable", detach_variable)
