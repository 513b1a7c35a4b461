"""HybridModel of attention and MLP layers in plain torch; megatron-core 0.18 and later."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_pg.megatron.cpu.layer_spec import TorchNorm, torch_block_spec


def hybrid_model(*, config: TransformerConfig, **keywords: Any) -> torch.nn.Module:
    """A HybridModel of as many layers as the config has, attention and MLP by turns, from GPTModel's keyword arguments."""
    del keywords["transformer_layer_spec"]
    # The stack builds its last norm from Transformer Engine without asking.
    hybrid_block.TENorm = TorchNorm
    layer = torch_block_spec(config).layer_specs[0].submodules
    stack = HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=layer.input_layernorm,
                self_attention=layer.self_attention,
                self_attn_bda=layer.self_attn_bda,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda
            ),
        ),
    )
    model: torch.nn.Module = HybridModel(
        config=config,
        hybrid_stack_spec=ModuleSpec(module=HybridStack, submodules=stack),
        hybrid_layer_pattern=("*-" * config.num_layers)[: config.num_layers],
        **keywords,
    )
    return model
