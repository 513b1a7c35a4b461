"""GPT layers in plain torch with packed sequences (THD), context and sequence parallelism, on any
device.

Megatron's `DotProductAttention` supports neither packed sequences nor context parallelism, and
Transformer Engine needs CUDA. Here keys and values are all-gathered over the context-parallel
group, and each query attends to earlier tokens of its sequence. The layers are for checks and not
fast.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_pg.step.token_window import Layout


class _Layout:
    """The places of a THD pack's tokens in a dense [rows, width] grid, and the attention mask.

    The grid has one row per sequence, or one row for the whole pack if that is smaller.
    """

    def __init__(self, packed: PackedSeqParams, local_tokens: int, rank: int, size: int) -> None:
        cu_seqlens = packed.cu_seqlens_q.to(torch.int64)
        segments, longest = cu_seqlens.numel() - 1, int(packed.max_seqlen_q)
        lengths = cu_seqlens.diff()
        positions = [Layout(other, size).local_positions(lengths) for other in range(size)]
        segment, place = positions[rank]
        held, most = lengths // size, longest // size  # each sequence's tokens on this rank
        row_per_segment = segments * longest * most <= local_tokens**2 * size
        self.rows = segments if row_per_segment else 1
        self.width = longest if row_per_segment else local_tokens * size
        self.query_width = most if row_per_segment else local_tokens

        # The row and the first column of each sequence.
        row = torch.arange(segments, device=segment.device) * row_per_segment
        start = cu_seqlens[:-1] * (not row_per_segment)
        self.key_slots = torch.cat([(row * self.width + start)[s] + p for s, p in positions])
        self.query_slots = torch.arange(local_tokens, device=segment.device)
        if row_per_segment:  # a rank holds a sequence's tokens consecutively
            self.query_slots += (row * self.query_width - held.cumsum(0) + held)[segment]

        # Slots without a query attend to everything, so that no softmax is empty. Their output is
        # dropped.
        grid = self.rows * self.query_width
        begin = start[segment]
        first = place.new_zeros(grid).index_copy(0, self.query_slots, begin)
        last = place.new_full((grid,), self.width)
        last = last.index_copy(0, self.query_slots, begin + place)
        column = torch.arange(self.width, device=segment.device)
        mask = (column >= first.unsqueeze(1)) & (column <= last.unsqueeze(1))
        self.mask = mask.view(self.rows, 1, self.query_width, self.width)

    def scatter(self, tokens: Tensor, slots: Tensor, width: int) -> Tensor:
        """Put tokens [tokens, heads, dim] into the grid [rows, heads, width, dim], with zeros in
        empty slots.
        """
        grid = tokens.new_zeros(self.rows * width, *tokens.shape[1:]).index_copy(0, slots, tokens)
        return grid.view(self.rows, width, *tokens.shape[1:]).transpose(1, 2)


def _layout_of(packed: PackedSeqParams, local_tokens: int, rank: int, size: int) -> _Layout:
    """Return the pack's layout, which the first layer makes and stores in `packed`."""
    kept: dict[tuple[int, ...], _Layout] = vars(packed).setdefault("_layouts", {})
    place = (local_tokens, rank, size)
    if place not in kept:
        kept[place] = _Layout(packed, *place)
    return kept[place]


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each packed sequence, exact at any context-parallel size, with
    grouped queries.

    The constructor has the arguments of Megatron's core attention (transformer/attention.py, 0.16.0
    to 0.19.2). It raises NotImplementedError for dropout, a sliding window, and other softmax or
    attention types.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        # the layer, the context-parallel exchange, and facts that `forward` or the tensors provide
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for setting, value, supported in (
            ("--attention-dropout", dropout, 0.0),
            ("--window-size", getattr(config, "window_size", None), None),
            ("--softmax-type", getattr(config, "softmax_type", "vanilla"), "vanilla"),
            ("attention_type", attention_type, "self"),
        ):
            if value != supported:
                raise NotImplementedError(
                    f"{setting} is {value!r}: PackedCoreAttention supports only {supported!r}"
                )
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(
            required_pgs=["tp", "cp"]
        )
        self.softmax_scale = (
            1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute attention. Every rank in the context-parallel group must call it with the same
        sequences.

        The group `pg_collection.cp` is read in each call, so a caller may replace it to run the
        model without context parallelism, as for generation.

        Args:
            query: [local_tokens, heads, dim].
            key, value: [local_tokens, query_groups, dim]. heads is a multiple of query_groups.
            attention_mask: ignored. `packed_seq_params` defines the sequences.
            packed_seq_params: THD, with `cu_seqlens_q` and `max_seqlen_q` of the padded sequences
                over all ranks.

        Returns:
            [local_tokens, heads * dim].
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise NotImplementedError(
                "PackedCoreAttention requires packed_seq_params with qkv_format='thd'"
            )
        is_causal = attn_mask_type in (None, AttnMaskType.causal, AttnMaskType.padding_causal)
        if attention_bias is not None or not is_causal:
            raise NotImplementedError(
                f"attn_mask_type is {attn_mask_type}: PackedCoreAttention supports only causal "
                "attention without attention_bias"
            )
        group = self.pg_collection.cp
        layout = _layout_of(packed_seq_params, query.size(0), group.rank(), group.size())
        both = torch.cat((key, value), dim=-1)
        both = gather_from_sequence_parallel_region(both, group=group)
        both = layout.scatter(both, layout.key_slots, layout.width)
        both = both.repeat_interleave(query.size(1) // key.size(1), dim=1)
        context = F.scaled_dot_product_attention(
            layout.scatter(query, layout.query_slots, layout.query_width),
            both[..., : key.size(-1)],
            both[..., key.size(-1) :],
            attn_mask=layout.mask,
            scale=self.softmax_scale,
        )
        return context.transpose(1, 2).flatten(0, 1)[layout.query_slots].flatten(1)


class TorchNorm:
    """A constructor for torch's LayerNorm or RMSNorm, marked for sequence parallelism.

    `finalize_model_grads` sums the gradients of marked parameters over the tensor-parallel ranks.
    Megatron's `WrappedTorchNorm` (transformer/torch_norm.py) does not mark its parameters and
    refuses sequence parallelism.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        kind = config.normalization
        if kind not in ("LayerNorm", "RMSNorm") or config.layernorm_zero_centered_gamma:
            raise NotImplementedError(
                f"--normalization is {kind!r}, zero-centered gamma "
                f"{config.layernorm_zero_centered_gamma}: TorchNorm builds only plain LayerNorm "
                "and RMSNorm"
            )
        build = getattr(torch.nn, kind)
        norm: torch.nn.Module = build(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def torch_block_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Build the `transformer_layer_spec=` of a GPTModel that needs neither Transformer Engine nor
    Apex.

    Args:
        config: the model's config, which decides this stage's layers.
        vp_stage: the chunk's virtual pipeline stage, None without a virtual pipeline.
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


def hybrid_stack_spec(
    config: TransformerConfig, *, use_transformer_engine: bool = False
) -> ModuleSpec:
    """Build the `hybrid_stack_spec=` of a HybridModel from the parts of GPTModel's layers.

    Megatron's spec needs Transformer Engine and ignores `--qk-layernorm`.

    Args:
        config: the model's config.
        use_transformer_engine: use Transformer Engine's layers instead of plain torch.
    """
    # Old versions lack these modules.
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mlp_layer import MLPLayer

    both = copy.copy(config)  # one layer with an MLP, and one with experts if there are any
    both.num_layers, both.moe_layer_freq = 2, [0, 1]
    both.pipeline_model_parallel_size, both.virtual_pipeline_model_parallel_size = 1, None
    if use_transformer_engine:
        block = get_gpt_decoder_block_spec(both, use_transformer_engine=True)
    else:
        block = torch_block_spec(both)
        # The stack always builds its last norm from Transformer Engine.
        hybrid_block.TENorm = TorchNorm
    dense, experts = (layer.submodules for layer in block.layer_specs)

    def part(module: Any, layer: TransformerLayerSubmodules, *names: str) -> ModuleSpec:
        parts = {name: getattr(layer, name) for name in (*names, "sharded_state_dict_keys_map")}
        return ModuleSpec(module, submodules=TransformerLayerSubmodules(**parts))

    attention = ("input_layernorm", "self_attention", "self_attn_bda")
    mlp = ("pre_mlp_layernorm", "mlp", "mlp_bda")
    layers = hybrid_block.HybridStackSubmodules(
        attention_layer=part(TransformerLayer, dense, *attention),
        mlp_layer=part(MLPLayer, dense, *mlp),
        moe_layer=part(TransformerLayer, experts, *mlp),
    )
    return ModuleSpec(hybrid_block.HybridStack, submodules=layers)
