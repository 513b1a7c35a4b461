"""Tiny GPT models that are the same function of the same parameters at every sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_pg.check import sharded_parameters
from megatron_pg.check.sharded_parameters import Shard, complete_reduce_scatter, shards
from megatron_pg.megatron.layer_spec import torch_block_spec
from megatron_pg.megatron.versions import needs_kept_pipeline_outputs

VOCAB_SIZE = 16
HIDDEN_SIZE = 16
NUM_LAYERS = 4
NUM_EXPERTS = 4
MAX_SEQUENCE_LENGTH = 64


@dataclass(frozen=True)
class Sharding:
    """How a model is cut; what is left of the world is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    virtual_pipeline: int | None = None
    sequence_parallel: bool = False
    expert: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        parts = [
            f"TP{self.tensor}{'+SP' if self.sequence_parallel else ''}" * (self.tensor > 1),
            f"PP{self.pipeline}" * (self.pipeline > 1),
            f"VPP{self.virtual_pipeline}" * (self.virtual_pipeline is not None),
            f"CP{self.context}" * (self.context > 1),
            f"EP{self.expert}" * (self.expert > 1),
            f"DP{self.data}" * (self.data > 1),
        ]
        return " ".join(part for part in parts if part) or "one process"


@dataclass(frozen=True)
class ModelOptions:
    """What of Megatron's model and DDP settings the tests vary."""

    mixture_of_experts: bool = False
    moe_aux_loss_coeff: float = 0.0
    tied_embeddings: bool = False
    calculate_per_token_loss: bool = False
    average_in_collective: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    dtype: torch.dtype = torch.float32
    hybrid: bool = False
    """HybridModel, the successor that 0.19 names for GPTModel, of attention and MLP layers."""


def initialize_groups(sharding: Sharding) -> None:
    """Make Megatron's process groups anew; every rank of the world calls it."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sharding.tensor,
        pipeline_model_parallel_size=sharding.pipeline,
        virtual_pipeline_model_parallel_size=sharding.virtual_pipeline,
        context_parallel_size=sharding.context,
        expert_model_parallel_size=sharding.expert,
        expert_tensor_parallel_size=1,
    )


def transformer_config(sharding: Sharding, options: ModelOptions) -> TransformerConfig:
    """fp32, no dropout, no fused kernels; grouped queries, so that heads and groups differ."""
    moe: dict[str, Any] = {}
    if options.mixture_of_experts:
        moe = {
            "num_moe_experts": NUM_EXPERTS,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "aux_loss" if options.moe_aux_loss_coeff else "none",
            "moe_aux_loss_coeff": options.moe_aux_loss_coeff,
            "moe_grouped_gemm": False,
            "moe_router_dtype": "fp64" if options.dtype == torch.float64 else "fp32",
        }
    pipeline: dict[str, Any] = {}
    if sharding.virtual_pipeline is not None:
        pipeline = {
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
            "deallocate_pipeline_outputs": not needs_kept_pipeline_outputs(),
        }
    return TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
        ffn_hidden_size=2 * HIDDEN_SIZE,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        # The gradient of a key bias is what is left of a cancellation: nothing to measure 1e-6 on.
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sharding.tensor,
        sequence_parallel=sharding.sequence_parallel,
        pipeline_model_parallel_size=sharding.pipeline,
        virtual_pipeline_model_parallel_size=sharding.virtual_pipeline,
        context_parallel_size=sharding.context,
        expert_model_parallel_size=sharding.expert,
        expert_tensor_parallel_size=1,
        pipeline_dtype=options.dtype,
        params_dtype=options.dtype,
        variable_seq_lengths=sharding.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        perform_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=options.calculate_per_token_loss,
        **moe,
        **pipeline,
    )


def _new_model(
    config: TransformerConfig, options: ModelOptions, vp_stage: int | None
) -> torch.nn.Module:
    """One chunk, not yet wrapped, with Megatron's own initial values."""
    keywords: dict[str, Any] = {
        "config": config,
        "vocab_size": VOCAB_SIZE,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        "pre_process": parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        "post_process": parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        "share_embeddings_and_output_weights": options.tied_embeddings,
        "position_embedding_type": "rope",
        "vp_stage": vp_stage,
    }
    if options.hybrid:
        from .hybrid import hybrid_model

        return hybrid_model(**keywords)
    return GPTModel(transformer_layer_spec=torch_block_spec(config, vp_stage), **keywords)


def build_model(
    sharding: Sharding, options: ModelOptions | None = None
) -> list[DistributedDataParallel]:
    """This rank's chunks under Megatron's DDP, with the parameters that every sharding has."""
    options = options or ModelOptions()
    config = transformer_config(sharding, options)
    chunks = []
    for stage in range(sharding.virtual_pipeline or 1):
        vp_stage = None if sharding.virtual_pipeline is None else stage
        model = _new_model(config, options, vp_stage)
        set_parameters(model)
        chunks.append(
            DistributedDataParallel(
                config=config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=options.dtype == torch.float32,
                    overlap_grad_reduce=options.overlap_grad_reduce,
                    use_distributed_optimizer=options.distributed_optimizer,
                    average_in_collective=options.average_in_collective,
                ),
                module=model,
                disable_bucketing=stage > 0,
            )
        )
    return chunks


def set_parameters(model: Any) -> None:
    """Values that depend on the whole model's parameter names alone."""
    sharded_parameters.set_parameters(model)
    if model.share_embeddings_and_output_weights and model.post_process:
        # The output layer is as large as the embedding: keep logits small.
        for name, parameter in model.decoder.named_parameters():
            if "final" in name:
                parameter.data.mul_(0.05)


def gather_gradients(chunks: list[DistributedDataParallel]) -> dict[str, Tensor] | None:
    """Whole gradients by whole names, on rank 0; every rank of the world calls it.

    Raises:
        AssertionError: two ranks that hold the same slice hold different gradients.
    """
    mine = []
    for chunk in chunks:
        complete_reduce_scatter(chunk)
        for shard, parameter in shards(chunk.module):
            mine.append((shard, parameter.main_grad.detach().clone()))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, gathered if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return None
    slices: dict[str, dict[int, tuple[Shard, Tensor]]] = {}
    for shard, gradient in (entry for entries in gathered for entry in entries):
        known = slices.setdefault(shard.name, {}).setdefault(shard.index, (shard, gradient))
        assert relative_error(gradient, known[1]) < 1e-6, f"replicas of {shard.name} differ"
    return {
        name: torch.cat([gradient for _, (_, gradient) in sorted(parts.items())], _dimension(parts))
        for name, parts in slices.items()
    }


def _dimension(parts: dict[int, tuple[Shard, Tensor]]) -> int:
    return parts[0][0].dimension


def relative_error(found: Tensor, expected: Tensor) -> float:
    """max|found - expected| / max|expected|, in float64."""
    difference = (found.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale
