"""Tiny GPT models that are the same function of the same parameters at every sharding."""

import re
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_pg.check import model as builder
from megatron_pg.check.model import GPTModel, model_config
from megatron_pg.check.options import CheckOptions
from megatron_pg.check.placement import Piece, gradient_parts
from megatron_pg.critic import add_value_head

from .steps import NUM_EXPERTS, TOPK, VOCAB_SIZE

SHAPE = {"num_query_groups": 2, "num_attention_heads": 4, "hidden_size": 32, "ffn_hidden_size": 64}
AXES = {
    **{"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline"},
    **{"CP": "context", "EP": "expert", "ETP": "expert_tensor", "DP": "data"},
}


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
    expert_tensor: int = 1

    @classmethod
    def named(cls, name: str) -> Self:
        """The sharding that a name as "TP2+SP CP2" begins with."""
        sizes = {AXES[axis]: int(size) for axis, size in re.findall(r"\b([A-Z]+P)(\d+)", name)}
        return cls(**sizes, sequence_parallel="+SP" in name)

    @property
    def num_chunks(self) -> int:
        return self.pipeline * (self.virtual_pipeline or 1)

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        parts = [
            f"{axis}{size}{'+SP' * (axis == 'TP' and self.sequence_parallel)}"
            for axis, field in AXES.items()
            if (size := getattr(self, field) or 1) > 1
        ]
        return " ".join(parts) or "one process"


@dataclass(frozen=True)
class ModelOptions:
    """What of Megatron's model and DDP settings the tests vary."""

    mixture_of_experts: bool = False
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    balancing: str | tuple[str, ...] = "aux_loss"
    """The load-balancing losses that `moe_aux_loss_coeff` is of."""
    moe_z_loss_coeff: float | None = None
    expert_bias: bool = False
    tied_embeddings: bool = False
    calculate_per_token_loss: bool = False
    average_in_collective: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    dtype: torch.dtype = torch.float32
    output_bias: bool = False
    """Of the output layer, as `ColumnParallelLinear(bias=True)` makes one; the models themselves
    never ask for it."""
    hybrid: bool = False
    """HybridModel, the successor that 0.19 names for GPTModel, of attention and MLP layers."""
    value_head: bool = False
    """A critic: a value head in the place of the output layer."""
    mtp_num_layers: int | None = None
    """Depths of multi-token prediction beside the policy's loss."""
    num_layers: int = 2
    """At least one for each model chunk."""
    moe_layer_freq: tuple[int, ...] | None = None
    """1 for each layer with experts, 0 for each other; None: all have them."""
    recompute: str | None = None
    """Layers whose forward runs again in backward: `full`, or `moe` for the experts alone."""

    @property
    def layers_of_experts(self) -> list[int]:
        if self.hybrid:
            return list(range(1, self.num_layers, 2))  # between layers of attention
        pattern = self.moe_layer_freq or (1,) * self.num_layers
        return [layer for layer, has_experts in enumerate(pattern) if has_experts]

    @property
    def unsharded(self) -> Self:
        """What of the model an unsharded reference shares: all that changes the function."""
        shared = (
            *("mixture_of_experts", "tied_embeddings", "hybrid", "value_head"),
            *("mtp_num_layers", "num_layers", "moe_layer_freq"),
        )
        return ModelOptions(**{name: getattr(self, name) for name in shared})


def check_options(sharding: Sharding, options: ModelOptions) -> CheckOptions:
    """The same in the words of the package's builder of tiny models."""
    return CheckOptions(
        tensor_model_parallel_size=sharding.tensor,
        pipeline_model_parallel_size=sharding.pipeline,
        virtual_pipeline_model_parallel_size=sharding.virtual_pipeline,
        context_parallel_size=sharding.context,
        expert_model_parallel_size=sharding.expert,
        expert_tensor_parallel_size=sharding.expert_tensor,
        sequence_parallel=sharding.sequence_parallel,
        num_experts=NUM_EXPERTS if options.mixture_of_experts else None,
        use_distributed_optimizer=options.distributed_optimizer,
        average_in_collective=options.average_in_collective,
        overlap_grad_reduce=options.overlap_grad_reduce,
        mtp_num_layers=options.mtp_num_layers,
    )


def initialize_groups(sharding: Sharding) -> None:
    """Make Megatron's process groups anew; every rank of the world calls it."""
    builder.initialize_groups(check_options(sharding, ModelOptions()))


def transformer_config(sharding: Sharding, options: ModelOptions) -> TransformerConfig:
    """No dropout, no fused kernels; grouped queries, so that heads and groups differ."""
    experts: dict[str, Any] = {}
    if options.mixture_of_experts:
        kinds, coefficients = options.balancing, options.moe_aux_loss_coeff
        if isinstance(kinds, tuple):
            kinds, coefficients = list(kinds), list(coefficients)  # type: ignore[assignment, arg-type]
        experts = {
            "moe_router_topk": TOPK,
            "moe_router_load_balancing_type": kinds if coefficients else "none",
            "moe_aux_loss_coeff": coefficients,
            "moe_z_loss_coeff": options.moe_z_loss_coeff,
            "moe_router_enable_expert_bias": options.expert_bias,
            "moe_router_score_function": "sigmoid" if options.expert_bias else "softmax",
        }
    if options.moe_layer_freq is not None:
        experts["moe_layer_freq"] = list(options.moe_layer_freq)
    if options.recompute == "full":
        uniform = {"recompute_method": "uniform", "recompute_num_layers": 1}
        experts |= {"recompute_granularity": "full", **uniform}
    elif options.recompute is not None:
        experts |= {"recompute_granularity": "selective", "recompute_modules": [options.recompute]}
    return model_config(
        check_options(sharding, options),
        calculate_per_token_loss=options.calculate_per_token_loss,
        dtype=options.dtype,
        num_layers=options.num_layers,
        **SHAPE,
        **experts,
    )


def build_model(
    sharding: Sharding, options: ModelOptions | None = None
) -> list[DistributedDataParallel]:
    """This rank's chunks under Megatron's DDP, with the parameters that every sharding has."""
    options = options or ModelOptions()
    new_model: Any = builder.hybrid_model if options.hybrid else GPTModel
    if options.mtp_num_layers is not None:
        new_model = builder.multi_token_model

    def whole_model(**keywords: Any) -> torch.nn.Module:
        model = new_model(**keywords)
        if options.output_bias and model.post_process:
            add_output_bias(model.output_layer)
        # Megatron makes learned positions float32, whatever the other parameters are.
        model = model.to(options.dtype)
        return add_value_head(model) if options.value_head else model

    return builder.build_model(
        check_options(sharding, options),
        transformer_config(sharding, options),
        whole_model,
        vocab_size=-(-VOCAB_SIZE // sharding.tensor) * sharding.tensor,
        max_sequence_length=256,
        share_embeddings_and_output_weights=options.tied_embeddings,
    )


def add_output_bias(layer: Any) -> None:
    """Adds what `ColumnParallelLinear.__init__` adds for `bias=True`."""
    zeros = torch.zeros(layer.output_size_per_partition, dtype=layer.config.params_dtype)
    layer.bias = torch.nn.Parameter(zeros)
    set_tensor_model_parallel_attributes(layer.bias, True, 0, 1)
    layer.bias.allreduce = True


def gather_gradients(chunks: list[DistributedDataParallel]) -> dict[str, Tensor] | None:
    """Whole gradients by whole names, on rank 0; every rank of the world calls it.

    Raises:
        AssertionError: two ranks that hold the same slice hold different gradients.
    """
    # As arrays: a tensor takes a millisecond to pickle and to load.
    mine = [(piece, gradient.numpy()) for piece, gradient in gradient_parts(chunks)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, gathered if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return None
    blocks: dict[tuple[str, tuple[int, ...]], tuple[Piece, Tensor]] = {}
    for piece, array in (entry for entries in gathered for entry in entries):
        gradient = torch.from_numpy(array)
        _, known = blocks.setdefault((piece.name, piece.offset), (piece, gradient))
        assert relative_error(gradient, known) < 1e-6, f"replicas of {piece.name} differ"
    wholes = {piece.name: gradient.new_empty(piece.shape) for piece, gradient in blocks.values()}
    for piece, gradient in blocks.values():
        piece.cut(wholes[piece.name]).copy_(gradient)
    return wholes


def relative_error(found: Tensor, expected: Tensor) -> float:
    """max|found - expected| / max|expected|, in float64."""
    difference = (found.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale
