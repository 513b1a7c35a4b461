"""What a resumed run must share with the one that it goes on with."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from megatron_pg import PolicyLossConfig

ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "max_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "layernorm_epsilon",
    "apply_residual_connection_post_layernorm",
    "squared_relu",
    "openai_gelu",
    "quick_geglu",
    "multi_latent_attention",
    "attention_dropout",
    "hidden_dropout",
)
EXPERTS = (
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_expert_input_to_capacity",
)
TRAINING = (
    "bf16",
    "attention_softmax_in_fp32",
    "use_distributed_optimizer",  # it keeps its state in a form of its own
    "use_precision_aware_optimizer",
    "seed",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_iters",
    "weight_decay",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "train_iters",
)
REPEATED = ARCHITECTURE + EXPERTS + TRAINING
"""Arguments that decide what any run computes; a resumed run must share them.

Neither the parallel sizes are among them nor --max-tokens-per-microbatch: they change the order of sums, and so rounding.
"""

REPEATED_ONLINE = (
    "world_size",  # every rank samples with a random state of its own
    "tensor_model_parallel_size",
    "context_parallel_size",
    "global_batch_size",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "max_response_len",
    "num_training_tasks",
    "num_held_out_tasks",
    "warm_start_iters",
    "warm_start_lr",
    "warm_start_batch_size",
    "warm_start_corruption",
    "warm_start_stutter",
)
REPEATED_FROM_FILES = (
    "vocab_size",
    "docs_per_step",
    "docs_per_step_mode",
    "keep_prompt_groups",
    "on_bad_row",
)


def identity_of(args: argparse.Namespace, config: PolicyLossConfig) -> dict[str, Any]:
    """The settings by name; None for those that the parser does not know."""
    own = REPEATED_FROM_FILES if args.rollout_files else REPEATED_ONLINE
    identity = {name: getattr(args, name, None) for name in REPEATED + own}
    # Megatron then keeps their optimizer apart.
    identity["expert parallelism"] = args.expert_model_parallel_size > 1
    return identity | dataclasses.asdict(config)
