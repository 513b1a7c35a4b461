"""Core attention for packed sequences (THD) under context parallelism, in plain torch.

Megatron's own `DotProductAttention` refuses both, and Transformer Engine needs CUDA. This attention runs anywhere: keys and
values are all-gathered over the context-parallel group, and each query attends to the earlier tokens of its own sequence.
It is meant for CPU runs and for checks, not for speed.
"""

from __future__ import annotations

import copy
import math
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.step.token_window import Layout


class _AllGather(torch.autograd.Function):
    """A concatenation over the ranks along dimension 0, whose backward sums each rank's share."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty(local.size(0) * group.size(), *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        local = gradient.new_empty(gradient.size(0) // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


class _Layout:
    """The places of a THD pack's tokens in a dense [rows, width] grid, and the mask of attention there.

    The grid has one row a sequence, or one row for the whole pack where that is smaller (one long sequence among many short
    ones).
    """

    def __init__(self, packed: PackedSeqParams, local_tokens: int, rank: int, size: int) -> None:
        cu_seqlens = packed.cu_seqlens_q.to(torch.int64)
        segments, longest = cu_seqlens.numel() - 1, int(packed.max_seqlen_q)
        mode: CpPartitionMode = getattr(packed, "cp_partition_mode", "zigzag")
        positions = [
            Layout(other, size, mode).local_positions(cu_seqlens.diff()) for other in range(size)
        ]
        segment, place = positions[rank]
        held = torch.bincount(segment, minlength=segments)  # tokens of each sequence on this rank
        most = int(held.max())
        row_per_segment = segments * longest * most <= local_tokens**2 * size
        self.rows = segments if row_per_segment else 1
        self.width = longest if row_per_segment else local_tokens * size
        self.query_width = most if row_per_segment else local_tokens

        # The row and the first column of each sequence.
        row = torch.arange(segments, device=segment.device) * row_per_segment
        start = cu_seqlens[:-1] * (not row_per_segment)
        self.key_slots = torch.cat([(row * self.width + start)[s] + p for s, p in positions])
        self.query_slots = torch.arange(local_tokens, device=segment.device)
        if row_per_segment:  # a rank holds the tokens of a sequence one after the other
            self.query_slots += (row * self.query_width - held.cumsum(0) + held)[segment]

        # Slots without a query see everything, so that no softmax is empty; their output is dropped.
        grid = self.rows * self.query_width
        first = place.new_zeros(grid).index_copy(0, self.query_slots, start[segment])
        last = place.new_full((grid,), self.width).index_copy(
            0, self.query_slots, start[segment] + place
        )
        column = torch.arange(self.width, device=segment.device)
        mask = (column >= first.unsqueeze(1)) & (column <= last.unsqueeze(1))
        self.mask = mask.view(self.rows, 1, self.query_width, self.width)

    def scatter(self, tokens: Tensor, slots: Tensor, width: int) -> Tensor:
        """Put tokens [tokens, heads, dim] into the grid [rows, heads, width, dim], zero where no token goes."""
        grid = tokens.new_zeros(self.rows * width, *tokens.shape[1:]).index_copy(0, slots, tokens)
        return grid.view(self.rows, width, *tokens.shape[1:]).transpose(1, 2)


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each packed sequence, exact at any context-parallel size.

    The constructor has the arguments that Megatron gives every core attention (transformer/attention.py, 0.15.3 to 0.19.2).
    Grouped queries are supported; attention dropout, sliding windows, other softmax types and other masks are refused.

    Raises:
        NotImplementedError: `config` asks for one of the refused settings.
    """

    cp_partition_modes = get_args(CpPartitionMode)
    """The supported values of `packed_seq_params.cp_partition_mode`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,  # of multi-latent attention, as the tensors say too
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0.0:
            raise NotImplementedError(
                f"--attention-dropout is {dropout}: PackedCoreAttention has no dropout, set it to 0"
            )
        if getattr(config, "window_size", None) is not None:
            raise NotImplementedError(
                f"--window-size is {config.window_size}: PackedCoreAttention has no sliding window"
            )
        if getattr(config, "softmax_type", "vanilla") != "vanilla":
            raise NotImplementedError(
                f"--softmax-type is {config.softmax_type!r}: PackedCoreAttention has only 'vanilla'"
            )
        if attention_type != "self":
            raise NotImplementedError(
                f"attention_type is {attention_type!r}: PackedCoreAttention does self-attention only"
            )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.pg_collection = pg_collection
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
        """Attend; every rank of the context-parallel group must call it, with the same sequences.

        The group is `packed_seq_params.cp_group` where set, else `pg_collection.cp`, both read in this call: a caller that
        exchanges the entry runs the model without context parallelism for a while (generation).

        Args:
            query: [local_tokens, heads, dim].
            key, value: [local_tokens, query_groups, dim]; heads is a multiple of query_groups.
            attention_mask: ignored; `packed_seq_params` defines the sequences.
            packed_seq_params: THD; `cu_seqlens_q` int32 [segments + 1] bounds the padded sequences over all
                context-parallel ranks; `max_seqlen_q` is the longest of them.

        Returns:
            [local_tokens, heads * dim].

        Raises:
            NotImplementedError: not packed, not causal, or with an attention bias.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise NotImplementedError(
                "PackedCoreAttention needs packed_seq_params with qkv_format='thd'"
            )
        if attention_bias is not None:
            raise NotImplementedError("PackedCoreAttention takes no attention_bias")
        if attn_mask_type not in (None, AttnMaskType.causal, AttnMaskType.padding_causal):
            raise NotImplementedError(
                f"attn_mask_type is {attn_mask_type}: PackedCoreAttention is causal only"
            )
        group = getattr(packed_seq_params, "cp_group", None) or self.pg_collection.cp
        layout = _Layout(packed_seq_params, query.size(0), group.rank(), group.size())

        key_and_value = torch.cat((key, value), dim=-1)
        if group.size() > 1:
            key_and_value = _AllGather.apply(  # type: ignore[no-untyped-call]
                key_and_value, group
            )
        key_and_value = layout.scatter(key_and_value, layout.key_slots, layout.width)
        key_and_value = key_and_value.repeat_interleave(query.size(1) // key.size(1), dim=1)
        context = F.scaled_dot_product_attention(
            layout.scatter(query, layout.query_slots, layout.query_width),
            key_and_value[..., : key.size(-1)],
            key_and_value[..., key.size(-1) :],
            attn_mask=layout.mask,
            scale=self.softmax_scale,
        )
        return context.transpose(1, 2).flatten(0, 1)[layout.query_slots].flatten(1)


def use_packed_core_attention(layer_spec: ModuleSpec) -> ModuleSpec:
    """Copy a transformer layer spec and give its self-attention the core `PackedCoreAttention`.

    Args:
        layer_spec: a spec such as that of `get_gpt_layer_local_spec()`; it is not changed.

    Raises:
        ValueError: the spec has no self-attention with a core attention.
    """
    attention = getattr(layer_spec.submodules, "self_attention", None)
    if not hasattr(getattr(attention, "submodules", None), "core_attention"):
        raise ValueError(
            "the layer spec has no submodules.self_attention.submodules.core_attention to replace"
        )
    changed = copy.deepcopy(layer_spec)
    changed.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    return changed
