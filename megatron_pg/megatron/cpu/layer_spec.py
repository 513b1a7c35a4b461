"""GPT layers in plain torch: packed sequences, context and sequence parallelism, on any device."""

import copy

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pg.megatron.cpu.attention import PackedCoreAttention


class TorchNorm:
    """A constructor of torch's LayerNorm or RMSNorm, marked for sequence parallelism.

    `finalize_model_grads` sums the gradients of marked parameters over the tensor-parallel ranks. Megatron's
    `WrappedTorchNorm` (transformer/torch_norm.py) does not mark its parameters, and refuses sequence parallelism.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        kind = config.normalization
        if kind not in ("LayerNorm", "RMSNorm") or config.layernorm_zero_centered_gamma:
            raise NotImplementedError(
                f"--normalization is {kind!r}, zero-centered gamma {config.layernorm_zero_centered_gamma}: TorchNorm builds "
                "plain LayerNorm and RMSNorm"
            )
        build = getattr(torch.nn, kind)
        norm: torch.nn.Module = build(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def torch_block_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Build the `transformer_layer_spec=` of a GPTModel that needs neither Transformer Engine nor Apex.

    Args:
        config: the model's; its pipeline layout decides which layers this stage gets.
        vp_stage: virtual pipeline stage of the chunk, None without a virtual pipeline.
    """
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    layers = copy.deepcopy(block.layer_specs)
    for layer in layers:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedCoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = attention.kv_layernorm = TorchNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm)
