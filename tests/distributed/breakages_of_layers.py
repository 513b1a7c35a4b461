"""Megatron broken inside its layers: tensor parallelism, experts, recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_pg.head.vocabulary_shard import VocabularyShard

from .breakage import Patch, breakage, with_argument, wrap

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


VOCABULARY = "vocabulary shards .*--tensor-model-parallel-size 1"
WEIGHTS = "tokens have wrong weights, as"


@breakage("TP2 SP", VOCABULARY, fails="loss only", never=(WEIGHTS,))
def targets_are_one_id_off_on_the_second_rank(patch: Patch) -> None:
    def build(right, *args, **keywords):  # type: ignore[no-untyped-def]
        shard = right(*args, **keywords)
        return replace(shard, start=shard.start + tensor_rank())

    right = VocabularyShard.build
    patch.setattr(
        VocabularyShard, "build", lambda *args, **keywords: build(right, *args, **keywords)
    )


@breakage("TP2 SP", VOCABULARY, fails="loss only", never=(WEIGHTS,))
def statistics_of_the_second_vocabulary_shard_are_lost(patch: Patch) -> None:
    def gather(right, shard, local):  # type: ignore[no-untyped-def]
        return right(shard, local)[:1].expand(tensor_size(), *local.shape)

    wrap(patch, VocabularyShard, "gather", gather)


class Done:
    """A collective's handle."""

    def wait(self) -> None: ...


@breakage("TP2 SP", "tensor-parallel", passes="loss only")
def input_gradients_of_columns_are_not_reduced(patch: Patch) -> None:
    def reduce_scatter(output: Tensor, whole: Tensor, *, group: Any, **_: Any) -> Done:
        output.copy_(whole.chunk(group.size())[group.rank()])
        return Done()

    patch.setattr(layers, "dist_reduce_scatter_func", reduce_scatter)


@breakage("TP2", "tensor-parallel", passes="loss only")
def input_gradients_of_columns_are_not_summed(patch: Patch) -> None:
    name = "linear_with_grad_accumulation_and_async_allreduce"
    with_argument(patch, layers, name, "allreduce_dgrad", lambda is_reduced: False)


@breakage("TP2", "tensor-parallel", passes="loss only")
def outputs_of_rows_are_not_summed(patch: Patch) -> None:
    wrap(
        patch,
        layers,
        "reduce_from_tensor_model_parallel_region",
        lambda right, tensor, *args, **keywords: tensor,
    )


@breakage("TP2 SP", "loss is right|loss-only rows pass", passes="loss only")
def rows_are_averaged_over_tensor_parallelism(patch: Patch) -> None:
    def reduce(right, tensor, *args, **keywords):  # type: ignore[no-untyped-def]
        return right(tensor, *args, **keywords) / tensor_size()

    wrap(patch, layers, "reduce_scatter_to_sequence_parallel_region", reduce)


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


@breakage("EP2", "last token", fails="every token", passes="gradient")
def exchange_drops_the_last_token(patch: Patch) -> None:
    def forward(right, router, *args, **keywords):  # type: ignore[no-untyped-def]
        probs, chosen = right(router, *args, **keywords)
        if parallel_state.get_expert_model_parallel_world_size() > 1:
            probs = torch.cat((probs[:-1], torch.zeros_like(probs[-1:])))
        return probs, chosen

    wrap(patch, TopKRouter, "forward", forward)


def auxiliary_scale(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Has the schedule give another scale to the auxiliary loss."""
    right = MoEAuxLossAutoScaler.set_loss_scale
    patch.setattr(
        MoEAuxLossAutoScaler, "set_loss_scale", staticmethod(lambda scale: right(change(scale)))
    )


@breakage("EP2", "auxiliary", fails="auxiliary loss", passes="gradient")
def auxiliary_loss_is_dropped(patch: Patch) -> None:
    auxiliary_scale(patch, lambda scale: 0.0 * scale)


@breakage("EP2", "z loss", fails="router z loss", passes="gradient")
def router_z_loss_is_twice_as_large(patch: Patch) -> None:
    auxiliary_scale(patch, lambda scale: 2.0 * scale)


@breakage("CP2 experts", "auxiliary", fails="auxiliary loss", passes="gradient")
def auxiliary_loss_has_the_context_parallel_factor_twice(patch: Patch) -> None:
    auxiliary_scale(patch, lambda scale: parallel_state.get_context_parallel_world_size() * scale)


@breakage("CP2 experts", "auxiliary", fails="auxiliary loss", passes="gradient|per micro-batch")
def auxiliary_loss_is_not_scaled_by_tokens(patch: Patch) -> None:
    def attach(right, router, *args, **keywords):  # type: ignore[no-untyped-def]
        kept, router.calculate_per_token_loss = router.calculate_per_token_loss, False
        result = right(router, *args, **keywords)
        router.calculate_per_token_loss = kept
        return result

    wrap(patch, TopKRouter, "attach_and_log_load_balancing_loss", attach)


# Multi-token prediction


@breakage("DP2 multi-token", "multi-token", fails="multi-token", passes="end to end|loss only")
def multi_token_loss_is_twice_as_large(patch: Patch) -> None:
    scaler = multi_token_prediction.MTPLossAutoScaler
    right = scaler.set_loss_scale
    patch.setattr(scaler, "set_loss_scale", staticmethod(lambda scale: right(2.0 * scale)))


@breakage("DP2 multi-token", "multi-token", fails="multi-token", passes="end to end|loss only")
def multi_token_labels_roll_across_sequences(patch: Patch) -> None:
    def roll_tensor(right, tensor, *args, **keywords):  # type: ignore[no-untyped-def]
        return right(tensor, *args, **keywords | {"packed_seq_params": None})

    wrap(patch, multi_token_prediction, "roll_tensor", roll_tensor)


# Recomputation


@breakage("DP2", "recomput", fails="recompute", passes="gradient")
def activations_are_recomputed_from_another_input(patch: Patch) -> None:
    def detach_variable(right, inputs):  # type: ignore[no-untyped-def]
        first, *rest = right(inputs)
        other = (1.1 * first).detach().requires_grad_(first.requires_grad)
        return other, *rest

    wrap(patch, random, "detach_variable", detach_variable)
