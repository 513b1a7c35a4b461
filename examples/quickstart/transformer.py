"""Megatron-Core's GPTModel from the arguments: this rank's chunks of it."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from megatron_pg.config.versions import has_megatron_training, needs_kept_pipeline_outputs
from megatron_pg.megatron.cpu.layer_spec import torch_block_spec


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Megatron's own translation of its arguments where the wheel has it."""
    if has_megatron_training():
        from megatron.training.arguments import core_transformer_config_from_args

        config = core_transformer_config_from_args(args)
    else:
        config = _translated(args)
    if config.virtual_pipeline_model_parallel_size is not None and needs_kept_pipeline_outputs():
        config.deallocate_pipeline_outputs = False
    return config


def num_chunks(args: argparse.Namespace) -> int:
    """Model chunks of a rank: more than one in a virtual pipeline."""
    return args.virtual_pipeline_model_parallel_size or 1


def build_chunk(
    args: argparse.Namespace, config: TransformerConfig, vocabulary_size: int, number: int
) -> GPTModel:
    """Chunk `number` of this rank's pipeline stage, on the CPU or wherever Megatron initialises it.

    Args:
        vocabulary_size: without padding; it is padded to a multiple of the tensor-parallel size.
    """
    vp_stage = None if num_chunks(args) == 1 else number
    ends = {"ignore_virtual": False, "vp_stage": vp_stage}
    optional = {
        "rope_scaling": getattr(args, "use_rope_scaling", False),
        "rope_scaling_factor": getattr(args, "rope_scaling_factor", 8.0),
        "seq_len_interpolation_factor": getattr(args, "rotary_seq_len_interpolation_factor", None),
    }
    tensor_parallel_size = args.tensor_model_parallel_size
    return GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(args, config, vp_stage),
        vocab_size=-(-vocabulary_size // tensor_parallel_size) * tensor_parallel_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        **optional,
    )


def _layer_spec(args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None) -> Any:
    if args.transformer_impl == "transformer_engine":
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    return torch_block_spec(config, vp_stage)


def _translated(args: argparse.Namespace) -> TransformerConfig:
    """The config of the small parser's arguments, most of which have the names of its fields."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    found = {name: value for name, value in vars(args).items() if name in fields}
    found |= {
        "num_moe_experts": args.num_experts,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "pipeline_dtype": args.params_dtype,
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "deallocate_pipeline_outputs": True,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
    }
    if args.swiglu:
        found |= {"activation_func": F.silu, "gated_linear_unit": True}
        if args.ffn_hidden_size is None:  # as Megatron does: as many parameters as without the gate
            found["ffn_hidden_size"] = int(4 * args.hidden_size * 2 / 3 / 64) * 64
    return TransformerConfig(**found)
