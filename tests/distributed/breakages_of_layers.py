"""Megatron broken inside its layers: tensor parallelism, experts, recomputation."""

import functools
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from megatron_pg.head.centering import Centering
from megatron_pg.head.vocabulary_shard import VocabularyShard
from megatron_pg.megatron import experts
from megatron_pg.megatron.routing_replay import Replay

from .breakage import Patch, around, breakage, with_argument

tensor_rank = parallel_state.get_tensor_model_parallel_rank
tensor_size = parallel_state.get_tensor_model_parallel_world_size

# Tensor parallelism


@breakage("TP2 SP", passes="loss only")
@around(layers.VocabParallelEmbedding, "forward")
def embedding_is_one_id_off_on_the_second_rank(right, embedding, input_ids):
    shift = tensor_rank()  # 0 where there is one rank
    embedding.vocab_start_index += shift
    output = right(embedding, input_ids)
    embedding.vocab_start_index -= shift
    return output


@breakage("TP2 SP", passes="loss only")
@around(GPTModel, "__init__")
def output_layer_is_one_id_off_on_the_second_rank(right, model, *args, **keywords):
    right(model, *args, **keywords)
    if tensor_rank() == 1:
        model.output_layer.register_forward_hook(
            lambda layer, inputs, output: (output[0].roll(1, -1), *output[1:])
        )


@breakage("TP2 SP", fails="loss only")
@around(VocabularyShard, "build")
def targets_are_one_id_off_on_the_second_rank(right, *args, **keywords):
    shard = right(*args, **keywords)
    return replace(shard, start=shard.start + tensor_rank())


@breakage("TP2 SP", fails="loss only")
@around(VocabularyShard, "gather")
def statistics_of_the_second_vocabulary_shard_are_lost(right, shard, local):
    return right(shard, local)[:1].expand(tensor_size(), *local.shape)


@breakage("TP2", fails="centering", passes="gradient|kept set")
@around(Centering, "on")
def each_rank_centers_over_its_own_tokens_of_the_head(right, centering, chunk, statistics, rows):
    _, is_here = chunk.shard.columns_of(centering.ids)
    return right(replace(centering, ids=centering.ids.where(is_here, -1)), chunk, statistics, rows)


@breakage("TP2 SP", passes="loss only")
@around(layers, "dist_reduce_scatter_func")
def input_gradients_of_columns_are_not_reduced(right, output, whole, *, group, **_):
    output.copy_(whole.chunk(group.size())[group.rank()])
    return SimpleNamespace(wait=lambda: None)


@breakage("TP2", passes="loss only")
def input_gradients_of_columns_are_not_summed(patch: Patch) -> None:
    name = "linear_with_grad_accumulation_and_async_allreduce"
    with_argument(layers, name, "allreduce_dgrad", lambda is_reduced: False)(patch)


@breakage("TP2", passes="loss only")
@around(layers, "reduce_from_tensor_model_parallel_region")
def outputs_of_rows_are_not_summed(right, tensor, *args, **keywords):
    return tensor


@breakage("TP2 SP", passes="loss only")
@around(layers, "reduce_scatter_to_sequence_parallel_region")
def rows_are_averaged_over_tensor_parallelism(right, tensor, *args, **keywords):
    return right(tensor, *args, **keywords) / tensor_size()


# Experts


@breakage("EP2", passes="loss only")
@around(mappings._AllToAll, "backward")
def gradients_of_tokens_at_other_experts_are_lost(right, ctx, *gradients):
    group, whole, *rest = right(ctx, *gradients)
    sizes = ctx.input_split_sizes
    if sizes is not None and ctx.group.size() > 1:
        parts = whole.split([int(size) for size in sizes])
        mine = [rank == ctx.group.rank() for rank in range(len(parts))]
        whole = torch.cat([part * is_own for part, is_own in zip(parts, mine, strict=True)])
    return group, whole, *rest


@breakage("EP2", fails="every token", passes="gradient")
@around(TopKRouter, "forward")
def exchange_drops_the_last_token(right, router, *args, **keywords):
    probs, chosen = right(router, *args, **keywords)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        probs = torch.cat((probs[:-1], torch.zeros_like(probs[-1:])))
    return probs, chosen


@breakage("EP2", fails="auxiliary loss", passes="gradient")
@around(MoEAuxLossAutoScaler, "set_loss_scale")
def auxiliary_loss_is_dropped(right, scale):
    right(0.0 * scale)


@breakage("EP2", fails="router z loss", passes="gradient")
@around(MoEAuxLossAutoScaler, "set_loss_scale")
def router_z_loss_is_twice_as_large(right, scale):
    right(2.0 * scale)


@breakage("CP2 experts", fails="auxiliary loss", passes="gradient")
@around(MoEAuxLossAutoScaler, "set_loss_scale")
def auxiliary_loss_has_the_context_parallel_factor_twice(right, scale):
    right(parallel_state.get_context_parallel_world_size() * scale)


@breakage("CP2 experts", fails="auxiliary loss", passes="gradient|per micro-batch")
@around(TopKRouter, "attach_and_log_load_balancing_loss")
def auxiliary_loss_is_not_scaled_by_tokens(right, router, *args, **keywords):
    kept, router.calculate_per_token_loss = router.calculate_per_token_loss, False
    result = right(router, *args, **keywords)
    router.calculate_per_token_loss = kept
    return result


@breakage("CP2 experts", fails="auxiliary loss", passes="gradient")
@around(router, "compute_routing_scores_for_aux_loss")
def auxiliary_loss_counts_padding(right, *args, padding_mask=None, **keywords):
    return right(*args, **keywords)


@breakage("CP2 experts", fails="router z loss", passes="gradient")
@around(router, "z_loss_func")
def router_z_loss_counts_padding(right, *args, padding_mask=None, **keywords):
    return right(*args, **keywords)


@breakage("CP2 experts", fails="auxiliary loss", passes="gradient")
@around(TopKRouter, "routing")
def router_takes_the_padding_mask_one_token_late(right, router, logits, padding_mask=None):
    return right(router, logits, None if padding_mask is None else padding_mask.roll(1, 0))


auxiliary = functools.partial(breakage, fails="auxiliary loss", passes="gradient")
z_loss = functools.partial(breakage, fails="router z loss", passes="gradient")
replay = functools.partial(breakage, fails="routing replay", passes="gradient|recompute")


@auxiliary("EP2")
@around(MoEAuxLossAutoScaler, "set_loss_scale")
def auxiliary_loss_is_ten_times_as_large(right, scale):
    right(10.0 * scale)


@auxiliary("CP2 experts")
@around(router, "get_tokens_per_expert_and_token_count")
def auxiliary_loss_counts_the_tokens_of_one_rank(right, routing_map, reduce_group, **keywords):
    _, local, whole = right(routing_map, reduce_group, **keywords)
    return routing_map.sum(0) * reduce_group.size(), local, whole


@auxiliary("EP2")
@around(router, "compute_routing_scores_for_aux_loss")
def auxiliary_loss_counts_one_expert_fewer(right, logits, topk, *args, **keywords):
    return right(logits, topk - 1, *args, **keywords)


@auxiliary("CP2 experts")
@around(TopKRouter, "routing")
def router_counts_padding_alone(right, router, logits, padding_mask=None):
    return right(router, logits, None if padding_mask is None else ~padding_mask)


@z_loss("EP2")
@around(TopKRouter, "apply_z_loss")
def router_z_loss_is_dropped(right, router, logits, padding_mask=None):
    return logits


@z_loss("CP2 experts")
@around(router, "z_loss_func")
def router_z_loss_is_divided_by_context_parallelism(right, *args, **keywords):
    return right(*args, **keywords) / parallel_state.get_context_parallel_world_size()


@replay("CP2 experts")
@around(router, "topk_routing_with_score_function")
def given_experts_are_ignored(right, *args, router_replay=None, **keywords):
    right(*args, router_replay=router_replay, **keywords)  # a router that never asks is refused
    return right(*args, **keywords)


@replay("CP2 experts")
@around(Replay, "_next")
def given_experts_are_those_of_the_next_token(right, replay, in_backward):
    experts = right(replay, in_backward)
    return None if experts is None else experts.roll(1, 0)


@auxiliary("EP2")
@around(router, "switch_load_balancing_loss_func")
def auxiliary_loss_is_a_sum_over_experts_and_not_their_number_times_it(right, **keywords):
    return right(**keywords) / keywords["num_experts"]


LOSSES = "auxiliary loss|sequence loss|global loss|gradient"


@breakage("EP2", fails="sequence loss", passes="auxiliary loss|gradient")
@around(TopKRouter, "_apply_seq_aux_loss")
def sequence_loss_is_dropped(right, router, probs, *args, **keywords):
    return probs


@breakage("EP2", fails="global loss", passes="auxiliary loss|gradient")
@around(experts, "_global_loss")
def global_loss_divides_by_the_tokens_of_the_last_micro_batch(right, router, *args, **keywords):
    return type(router)._apply_global_aux_loss(router, *args, **keywords)


@breakage("EP2", fails="global loss", passes="auxiliary loss|gradient")
@around(experts, "_coefficient")
def global_loss_is_averaged_over_data_parallel_ranks(right, router, kind):
    return type(router).get_aux_loss_coeff(router, kind)


@breakage("EP2", fails="listed losses", passes=LOSSES)
@around(TopKRouter, "get_aux_loss_coeff")
def every_listed_loss_has_the_first_coefficient(right, router, kind):
    values = router.config.moe_aux_loss_coeff
    return values[0] if isinstance(values, list) else right(router, kind)


@breakage("CP2 experts", fails="listed losses", passes=LOSSES)
@around(router, "compute_routing_scores_for_aux_loss")
def sigmoid_scores_are_not_normalised(right, logits, topk, score_function, *args, **keywords):
    choices, scores = right(logits, topk, score_function, *args, **keywords)
    return choices, logits.sigmoid() if score_function == "sigmoid" else scores


bias = functools.partial(breakage, fails="expert bias", passes="gradient")


@bias("CP2 experts")
@around(experts, "_count_tokens")
def expert_bias_counts_padding(right, router, routing_map, padding_mask=None):
    return right(router, routing_map)


@bias("EP2")
@around(router, "topk_routing_with_score_function")
def experts_are_chosen_without_their_bias(right, *args, expert_bias=None, **keywords):
    return right(*args, **keywords)


@bias("EP2")
@around(sys.modules[finalize_model_grads.__module__], "get_updated_expert_bias")
def expert_bias_follows_the_tokens_of_one_rank(right, tokens, bias, rate, *args, **keywords):
    return bias + rate * torch.sign(tokens.mean(-1, keepdim=True) - tokens)


@bias("EP2")
@around(sys.modules[finalize_model_grads.__module__], "get_updated_expert_bias")
def expert_bias_goes_the_other_way(right, tokens, bias, rate, *args, **keywords):
    return right(tokens, bias, -rate, *args, **keywords)


@replay("EP2")
@around(Replay, "_next")
def router_chooses_anew_in_recomputation(right, replay, in_backward):
    return None if in_backward else right(replay, in_backward)


# Multi-token prediction


@breakage("DP2 multi-token", fails="multi-token", passes="end to end|loss only")
@around(multi_token_prediction.MTPLossAutoScaler, "set_loss_scale")
def multi_token_loss_is_twice_as_large(right, scale):
    right(2.0 * scale)


@breakage("DP2 multi-token", fails="multi-token", passes="end to end|loss only")
@around(multi_token_prediction, "roll_tensor")
def multi_token_labels_roll_across_sequences(right, tensor, *args, **keywords):
    return right(tensor, *args, **keywords | {"packed_seq_params": None})


# Recomputation


@breakage("DP2", fails="recompute", passes="gradient")
@around(random, "detach_variable")
def activations_are_recomputed_from_another_input(right, inputs):
    first, *rest = right(inputs)
    other = (1.1 * first).detach().requires_grad_(first.requires_grad)
    return other, *rest
