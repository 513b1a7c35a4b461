"""Megatron-Core's GPTModel from the arguments: what its set-up of model and optimizer asks for."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from megatron_pg.config.versions import needs_kept_pipeline_outputs
from megatron_pg.megatron.cpu.layer_spec import torch_block_spec


def provide_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: Any = None,
) -> GPTModel:
    """One chunk of a pipeline stage; the `model_provider_func` of `megatron.training.training.get_model`."""
    args = get_args()
    if config is None:
        config = core_transformer_config_from_args(args)
    if config.virtual_pipeline_model_parallel_size is not None and needs_kept_pipeline_outputs():
        config.deallocate_pipeline_outputs = False
    if args.transformer_impl == "transformer_engine":
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, qk_l2_norm=args.qk_l2_norm, vp_stage=vp_stage
        )
    else:
        spec = torch_block_spec(config, vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
