"""What a resumed run must share with the one that it goes on with."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from megatron_pg import PolicyLossConfig

REPEATED = (
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
    "rotary_base",
    "num_experts",
    "moe_router_topk",
    "moe_aux_loss_coeff",
    "bf16",
    "use_distributed_optimizer",  # it keeps its state in a form of its own
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
