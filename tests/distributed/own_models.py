"""Models of a user, for `megatron-pg check --model-provider`: sound ones, and ones with faults that
were reported in public.

    torchrun --nproc-per-node 2 -m megatron_pg check --device cpu --tensor-model-parallel-size 2 \
        --model-provider tests.distributed.own_models:gpt
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_pg.head import LogitTransform
from megatron_pg.megatron import output_layer
from megatron_pg.megatron.cpu.layer_spec import torch_block_spec
from megatron_pg.megatron.groups import unwrapped

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
ROTATE = multi_latent_attention.apply_rotary_pos_emb


def config_of(config: Any, **changes: Any) -> TransformerConfig:
    return TransformerConfig(**vars(config) | SIZES | changes)


def gpt_of(
    config: Any,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    kind: type[GPTModel] = GPTModel,
    **keywords: Any,
) -> GPTModel:
    given: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_sequence_length": 512} | keywords
    given.setdefault("transformer_layer_spec", torch_block_spec(config, vp_stage))
    return kind(
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


def wide(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A model whose query and key norms have gradients that rounding to bfloat16 moves most."""
    changes = dict(num_layers=2, hidden_size=256, num_attention_heads=8, ffn_hidden_size=512)
    changed = config_of(config, **changes, num_query_groups=4)
    return gpt_of(changed, pre_process, post_process, vp_stage)


class NormAndLinear(ColumnParallelLinear):
    """A column-parallel layer with its norm, as Transformer Engine joins them."""

    def forward(self, hidden, *args, **keywords):
        weight = self.layer_norm_weight
        normed = torch.nn.functional.rms_norm(hidden, weight.shape, weight, 1e-5)
        return super().forward(normed, *args, **keywords)


def joined_norm(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """The norms before MLPs joined with the layer after them."""
    model = gpt(pre_process, post_process, vp_stage, config)
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.__class__ = NormAndLinear
        layer.mlp.linear_fc1.layer_norm_weight = layer.pre_mlp_layernorm.weight
        layer.pre_mlp_layernorm = torch.nn.Identity()
    return model


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


class LowRank(MegatronModule):
    """An adapter beside an MLP: whole on every tensor-parallel rank, which has a part of the tokens
    under sequence parallelism.
    """

    def __init__(self, config: Any, rank: int = 4) -> None:
        super().__init__(config)
        self.down = torch.nn.Parameter(torch.randn(rank, config.hidden_size) / 8)
        self.up = torch.nn.Parameter(torch.zeros(config.hidden_size, rank))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, output: Tensor) -> Tensor:
        return output + hidden @ self.down.T @ self.up.T


def with_adapters(model: Any, new: Callable[[Any], Any] = LowRank) -> Any:
    """Freezes a model and adds an adapter beside each MLP, without entries in
    `sharded_state_dict`.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
    for layer in model.decoder.layers:
        layer.mlp.adapter = adapter = new(model.config)

        def add(mlp: Any, inputs: Any, output: Any, adapter: Any = adapter) -> Any:
            return adapter(inputs[0], output[0]), *output[1:]

        layer.mlp.register_forward_hook(add)
        entries = layer.mlp.sharded_state_dict

        def without(*args: Any, entries: Any = entries, **keywords: Any) -> Any:
            found = entries(*args, **keywords)
            return {key: entry for key, entry in found.items() if ".adapter." not in key}

        layer.mlp.sharded_state_dict = without
    return model


def adapter(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    return with_adapters(gpt(pre_process, post_process, vp_stage, config))


class RowLowRank(MegatronModule):
    """An adapter beside the row-parallel `linear_fc2`: a rank has columns of its first factor."""

    reduces = True

    def __init__(self, config: Any, rank: int = 4) -> None:
        super().__init__(config)
        whole = torch.randn(rank, config.ffn_hidden_size) / 8
        size = parallel_state.get_tensor_model_parallel_world_size()
        self.down = torch.nn.Parameter(
            whole.chunk(size, 1)[parallel_state.get_tensor_model_parallel_rank()].clone()
        )
        self.up = torch.nn.Parameter(torch.zeros(config.hidden_size, rank))
        set_tensor_model_parallel_attributes(self.down, True, 1, 1)
        self.up.sequence_parallel = config.sequence_parallel

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"down": 1}, sharded_offsets)

    def forward(self, hidden: Tensor, output: Tensor) -> Tensor:
        inner = hidden @ self.down.T
        if self.config.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner)
        elif self.reduces:
            inner = reduce_from_tensor_model_parallel_region(inner)
        return output + inner @ self.up.T


class UnreducedRowLowRank(RowLowRank):
    reduces = False


def with_row_adapters(model: Any, new: Callable[[Any], Any]) -> Any:
    for layer in model.decoder.layers:
        layer.mlp.linear_fc2.adapter = adapter = new(model.config)

        def add(linear: Any, inputs: Any, output: Any, adapter: Any = adapter) -> Any:
            return adapter(inputs[0], output[0]), *output[1:]

        layer.mlp.linear_fc2.register_forward_hook(add)
        entries = layer.mlp.sharded_state_dict

        def with_own(
            prefix="", sharded_offsets=(), metadata=None, entries=entries, adapter=adapter
        ):
            found = entries(prefix, sharded_offsets, metadata)
            found = {key: entry for key, entry in found.items() if ".adapter." not in key}
            return found | adapter.sharded_state_dict(
                f"{prefix}adapter.", sharded_offsets, metadata
            )

        layer.mlp.sharded_state_dict = with_own
    return model


def row_adapter(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    return with_row_adapters(gpt(pre_process, post_process, vp_stage, config), RowLowRank)


def frozen_output(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    model = gpt_of(config_of(config), pre_process, post_process, vp_stage)
    for name, parameter in model.named_parameters():
        if "output_layer" in name:
            parameter.requires_grad = False
    return model


def of_page(name: str) -> dict[str, Any]:
    """The contents of a file that the page on check shows."""
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    found: dict[str, Any] = {}
    exec(page.partition(f"```python\n# {name}.py\n")[2].partition("```")[0], found)
    return found


def hybrid(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """HybridModel: attention and MLP by turns."""
    return of_page("hybrid")["provider"](pre_process, post_process, vp_stage, config)


def lora(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    return of_page("lora")["add_lora"](gpt(pre_process, post_process, vp_stage, config))


def latent(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """Multi-latent attention."""
    config = MLATransformerConfig(
        **vars(config)
        | SIZES
        | {
            "multi_latent_attention": True,
            "qk_layernorm": False,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 8,
            "num_query_groups": None,
            "rope_type": "rope",
            "apply_rope_fusion": False,
        }
    )
    return gpt_of(config, pre_process, post_process, vp_stage)


def repaired_latent(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """The same, with the gradient of the rotary key summed over tensor-parallel ranks, whose heads
    share it.
    """

    def rotate(tokens: Tensor, *args: Any, **keywords: Any) -> Tensor:
        if tokens.size(-2) == 1:  # the key of all heads
            tokens = copy_to_tensor_model_parallel_region(tokens)
        return ROTATE(tokens, *args, **keywords)

    multi_latent_attention.apply_rotary_pos_emb = rotate
    return latent(pre_process, post_process, vp_stage, config)


class Cap(GPTModel):
    """Logits that are capped after the model has made them."""

    def forward(self, *args, **keywords):
        output = super().forward(*args, **keywords)
        return 5.0 * torch.tanh(output / 5.0) if self.post_process else output


def capped(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    return gpt_of(config_of(config), pre_process, post_process, vp_stage, kind=Cap)


class ScaledAndCapped(ColumnParallelLinear):
    def forward(self, *args, **keywords):
        output, bias = super().forward(*args, **keywords)
        return 0.5 * torch.tanh(1.5 * output / 0.5), bias


def capped_layer(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """Logits that the output layer scales and caps."""
    model = gpt(pre_process, post_process, vp_stage, config)
    if post_process:
        model.output_layer.__class__ = ScaledAndCapped
    return model


class RunningState(torch.nn.Module):
    """A gated running mean of the hidden states before a layer: a small recurrent model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, hidden: Tensor, starts: Tensor) -> Tensor:
        decay, states = torch.sigmoid(self.gate), []
        state = torch.zeros_like(hidden[0])
        for token, is_start in zip(hidden, starts.tolist(), strict=True):
            state = token + (0.0 if is_start else 1.0) * decay * state
            states.append(state)
        return hidden + 0.1 * torch.stack(states)


class ShortConvolution(torch.nn.Module):
    """A causal convolution over two tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, hidden: Tensor, starts: Tensor) -> Tensor:
        before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
        return hidden + before.masked_fill(starts.view(-1, 1, 1), 0.0) * self.weight


def with_memory(model: Any, new: Any, *, knows_packs: bool) -> Any:
    """Adds a layer with a memory before each decoder layer."""
    for layer in model.decoder.layers:
        layer.memory = memory = new(model.config)

        def remember(layer: Any, args: Any, keywords: Any, memory: Any = memory) -> Any:
            hidden = keywords.pop("hidden_states") if "hidden_states" in keywords else args[0]
            packed = keywords["packed_seq_params"]
            starts = torch.zeros(len(hidden), dtype=torch.bool)
            starts[packed.cu_seqlens_q[:-1].long() if knows_packs else 0] = True
            return (), keywords | {"hidden_states": memory(hidden, starts)}

        layer.register_forward_pre_hook(remember, with_kwargs=True)
    return model


def running_state(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    model = gpt(pre_process, post_process, vp_stage, config)
    return with_memory(model, RunningState, knows_packs=True)


def convolution(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    model = gpt(pre_process, post_process, vp_stage, config)
    return with_memory(model, ShortConvolution, knows_packs=True)


def of_flags(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A model of the layers that the flags after `--` ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    changed = config_of(config, num_layers=parser.parse_args().layers)
    return gpt_of(changed, pre_process, post_process, vp_stage)


# Faults


def leaking_state(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    model = gpt(pre_process, post_process, vp_stage, config)
    return with_memory(model, RunningState, knows_packs=False)


def leaking_convolution(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    model = gpt(pre_process, post_process, vp_stage, config)
    return with_memory(model, ShortConvolution, knows_packs=False)


def leaking_attention(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """Attention that takes a pack for one sequence."""
    model = gpt(pre_process, post_process, vp_stage, config)

    def as_one(attention: Any, args: Any, keywords: Any) -> Any:
        ends = keywords["packed_seq_params"].cu_seqlens_q[[0, -1]]
        longest = int(ends[-1])
        one = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        return args, keywords | {"packed_seq_params": one}

    for layer in model.decoder.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(as_one, with_kwargs=True)
    return model


def unreduced_row_adapter(
    pre_process, post_process, vp_stage=None, config=None, pg_collection=None
):
    model = gpt(pre_process, post_process, vp_stage, config)
    return with_row_adapters(model, UnreducedRowLowRank)


def unmarked(model: Any, *parts: str) -> Any:
    found = [p for name, p in model.named_parameters() if any(part in name for part in parts)]
    assert found, f"the model has no {parts}"
    for parameter in found:
        parameter.sequence_parallel = False
    return model


def unreduced_adapter(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """Adapters that sequence parallelism gives a part of the tokens, not marked for its sum."""
    model = adapter(pre_process, post_process, vp_stage, config)
    return unmarked(model, "layers.1.mlp.adapter.down")


def other_adapters(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """Adapters with first weights of their own on each tensor-parallel rank."""
    model = adapter(pre_process, post_process, vp_stage, config)
    for name, parameter in model.named_parameters():
        if name.endswith("adapter.down"):
            parameter.data += parallel_state.get_tensor_model_parallel_rank()
    return model


def without_mark(model: Any) -> Any:
    """The norm before an MLP, by itself or joined with the layer after it, without its mark."""
    layer = f"layers.{len(model.decoder.layers) // 2}"
    return unmarked(model, f"{layer}.pre_mlp_layernorm", f"{layer}.mlp.linear_fc1.layer_norm")


def unmarked_norm(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    return without_mark(gpt(pre_process, post_process, vp_stage, config))


def unmarked_wide_norm(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """The copies of its gradient differ by little more than rounding to bfloat16."""
    changed = config_of(config, hidden_size=256, ffn_hidden_size=384)
    return without_mark(gpt_of(changed, pre_process, post_process, vp_stage))


def unmarked_joined_norm(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    return without_mark(joined_norm(pre_process, post_process, vp_stage, config))


def half_again(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A gradient that is 1.5 times the right one under tensor parallelism."""
    model = wide(pre_process, post_process, vp_stage, config)
    factor = 0.5 + 0.5 * parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        if name.endswith("layers.1.self_attention.q_layernorm.weight"):
            parameter.register_hook(lambda gradient: factor * gradient)
    return model


def unreduced_router(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    model = experts(pre_process, post_process, vp_stage, config)
    return unmarked(model, "layers.3.mlp.router")


def restarting_positions(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """Rotary positions that begin at 0 on every context-parallel rank."""
    right = rope_utils._get_thd_freqs_on_this_cp_rank

    def wrong(rank: int, size: int, tokens: Tensor, frequencies: Tensor, *args: Any) -> Tensor:
        if size == 1:
            return right(rank, size, tokens, frequencies, *args)
        return frequencies[: tokens.size(0)]

    rope_utils._get_thd_freqs_on_this_cp_rank = wrong
    return gpt(pre_process, post_process, vp_stage, config)


def lost_tie(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A tied embedding whose gradient is not added up over the pipeline."""
    model = tied(pre_process, post_process, vp_stage, config)

    def finalize(chunks: Any, *args: Any, **keywords: Any) -> None:
        for chunk in chunks:
            unwrapped(chunk).share_embeddings_and_output_weights = False
        finalize_model_grads(chunks, *args, **keywords)
        for chunk in chunks:
            unwrapped(chunk).share_embeddings_and_output_weights = True

    model.config.finalize_model_grads_func = finalize
    return model


def doubled_gradient(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A norm of queries whose gradient is summed over ranks that all have the whole of it."""
    model = gpt(pre_process, post_process, vp_stage, config)
    size = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        if name.endswith("layers.1.input_layernorm.weight"):
            parameter.register_hook(lambda gradient: size * gradient)
    return model


def updated_on_one_rank(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A norm that the optimizer leaves as it is on the second tensor-parallel rank."""
    model = gpt(pre_process, post_process, vp_stage, config)
    right = FP32Optimizer.step_with_ready_grads

    def wrong(optimizer: Any) -> Any:
        norm = model.decoder.final_layernorm.weight
        before = norm.detach().clone()
        result = right(optimizer)
        if parallel_state.get_tensor_model_parallel_rank() == 1:
            norm.data.copy_(before)
        return result

    FP32Optimizer.step_with_ready_grads = wrong
    return model


def lost_cap(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A soft-cap of the output layer that the fused head leaves out."""
    output_layer.read_transform = lambda *args, **keywords: LogitTransform()
    return capped_layer(pre_process, post_process, vp_stage, config)


# Not a provider, or not a model that can be checked


def old_signature(pre_process, post_process):
    return None


def returns_a_list(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    return [gpt(pre_process, post_process, vp_stage, config)]


def fails_on_one_rank(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    if torch.distributed.get_rank() == 1:
        raise OSError("no such tokenizer here")
    return gpt(pre_process, post_process, vp_stage, config)


def with_dropout(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    changed = config_of(config, hidden_dropout=0.1)
    return gpt_of(changed, pre_process, post_process, vp_stage)


def without_packs(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """Megatron's own attention in plain torch."""
    config = config_of(config, qk_layernorm=False)
    spec = torch_block_spec(config, vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    return gpt_of(config, pre_process, post_process, vp_stage, transformer_layer_spec=spec)


def padded_vocabulary(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    size = 60 + 2 * config.tensor_model_parallel_size
    return gpt_of(config_of(config), pre_process, post_process, vp_stage, vocab_size=size)


def own_sizes(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A provider that does not ask for the sizes."""
    config.tensor_model_parallel_size = 2
    return gpt(pre_process, post_process, vp_stage, config)
