"""Models of `tests/distributed/own_models.py` with Transformer Engine's layers, for
`megatron-pg check --model-provider` on GPUs.
"""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)

from tests.distributed import own_models
from tests.distributed.own_models import *  # noqa: F403


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    if config.num_moe_experts:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)


own_models.torch_block_spec = layer_spec
own_models.SIZES |= {"hidden_size": 256, "ffn_hidden_size": 384}


def adapter_experts(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    return own_models.with_adapters(own_models.experts(pre_process, post_process, vp_stage, config))


def unreduced_adapter_experts(
    pre_process, post_process, vp_stage=None, config=None, pg_collection=None
):
    model = adapter_experts(pre_process, post_process, vp_stage, config)
    return own_models.unmarked(model, "layers.1.mlp.adapter.down")
