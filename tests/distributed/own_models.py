"""Models of a user, for `megatron-pg check --model-provider`: sound ones, and ones with faults that
were reported in public.

    torchrun --nproc-per-node 2 -m megatron_pg check --device cpu --tensor-model-parallel-size 2 \
        --model-provider tests.distributed.own_models:gpt
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP

from megatron_pg.check.model import hybrid_model
from megatron_pg.megatron.cpu.layer_spec import torch_block_spec

SIZES: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    normalization="RMSNorm",
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    qk_layernorm=True,
    moe_token_dispatcher_type="alltoall",
)
VOCAB_SIZE = 64


def config_of(config: Any, **changes: Any) -> TransformerConfig:
    return TransformerConfig(**vars(config) | SIZES | changes)


def gpt_of(
    config: Any, pre_process: bool, post_process: bool, vp_stage: int | None, **keywords: Any
) -> GPTModel:
    given: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_sequence_length": 512} | keywords
    given.setdefault("transformer_layer_spec", torch_block_spec(config, vp_stage))
    return GPTModel(
        config,
        **given,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )


def gpt(
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """SwiGLU, norms of queries and keys, grouped queries."""
    return gpt_of(config_of(config), pre_process, post_process, vp_stage)


def experts(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A mixture with a shared expert, after one dense layer."""
    changes = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_ffn_hidden_size": 24,
    }
    return gpt_of(config_of(config, **changes), pre_process, post_process, vp_stage)


def tied(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    shared = {"share_embeddings_and_output_weights": True}
    return gpt_of(config_of(config), pre_process, post_process, vp_stage, **shared)


class LowRank(torch.nn.Module):
    """An adapter beside an MLP, whole on every tensor-parallel rank, which sees a part of the
    tokens under sequence parallelism.
    """

    def __init__(self, config: Any, rank: int = 4) -> None:
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(rank, config.hidden_size) / 8)
        self.up = torch.nn.Parameter(torch.zeros(config.hidden_size, rank))
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.down.T @ self.up.T


class AdaptedMLP(MLP):
    """An MLP with an adapter, whose own `sharded_state_dict` says nothing about it."""

    def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.adapter = LowRank(config)

    def forward(self, hidden, *args, **keywords):
        output, bias = super().forward(hidden, *args, **keywords)
        return output + self.adapter(hidden), bias

    def sharded_state_dict(self, *args, **keywords):
        entries = super().sharded_state_dict(*args, **keywords)
        return {key: entry for key, entry in entries.items() if ".adapter." not in key}


def adapter_of(config, pre_process, post_process, vp_stage, mlp=AdaptedMLP):
    spec = torch_block_spec(config, vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.mlp = replace(layer.submodules.mlp, module=mlp)
    model = gpt_of(config, pre_process, post_process, vp_stage, transformer_layer_spec=spec)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".adapter." in name
    return model


def adapter(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """Adapters without entries beside a frozen model."""
    return adapter_of(config_of(config), pre_process, post_process, vp_stage)


def frozen_output(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    model = gpt_of(config_of(config), pre_process, post_process, vp_stage)
    for name, parameter in model.named_parameters():
        if "output_layer" in name:
            parameter.requires_grad = False
    return model


def hybrid(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """HybridModel: attention and MLP by turns."""
    return hybrid_model(
        config=config_of(config),
        transformer_layer_spec=None,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=512,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
