"""What a run must share with the one that it goes on with."""

from __future__ import annotations

import argparse

from megatron_pg.config.fields import fields_of
from megatron_pg.config.planning import PlanningConfig
from megatron_pg.config.policy_loss import PolicyLossConfig

MODEL = """
    num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels swiglu
    squared_relu openai_gelu quick_geglu normalization layernorm_epsilon apply_residual_connection_post_layernorm
    add_bias_linear add_qkv_bias qk_layernorm untie_embeddings_and_output_weights vocab_size position_embedding_type
    max_position_embeddings rotary_base rotary_percent rotary_seq_len_interpolation_factor use_rope_scaling
    rope_scaling_factor multi_latent_attention attention_dropout hidden_dropout num_experts moe_ffn_hidden_size
    moe_layer_freq moe_router_topk moe_router_topk_scaling_factor moe_router_score_function moe_router_pre_softmax
    moe_router_num_groups moe_router_group_topk moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_expert_capacity_factor
"""
TRAINING = """
    bf16 fp16 optimizer use_distributed_optimizer clip_grad adam_beta1 adam_beta2 adam_eps seed
    task task_settings system_prompt prompt_examples prompts_per_step samples_per_prompt max_response_tokens
    held_out_tasks advantage
"""
"""The learning rate and the weight decay Megatron compares itself, with flags of its own about them."""
FREE = ("max_tokens_per_microbatch", "oversized_samples", "ragged_microbatches", "rollout_files")
"""Settings of planning that change the order of sums alone; the files are compared by their contents."""


def refuse_other_settings(args: argparse.Namespace, stored: argparse.Namespace) -> None:
    """Raises unless a run may go on from a checkpoint.

    Args:
        args: of this run.
        stored: of the run that wrote it.

    Raises:
        ValueError: naming the setting, both values and what to do.
    """
    planning = [name for name in fields_of(PlanningConfig) if name not in FREE]
    names = (*MODEL.split(), *TRAINING.split(), *fields_of(PolicyLossConfig), *planning)
    for name in names:
        then, now = getattr(stored, name, None), getattr(args, name, None)
        if then != now and hasattr(stored, name):
            raise ValueError(
                f"{args.load} was made with {name} {then!r} and this run has {now!r}: a run that goes on repeats what "
                "the first would have done, so give the same, or begin anew with its weights (--finetune, and another "
                "--save)"
            )
    if (stored.expert_model_parallel_size > 1) != (args.expert_model_parallel_size > 1):
        raise ValueError(
            f"--expert-model-parallel-size was {stored.expert_model_parallel_size} in {args.load} and is "
            f"{args.expert_model_parallel_size}: Megatron keeps one optimizer more where experts are parallel"
        )
