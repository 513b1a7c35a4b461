"""Two tiny models that are the same function of the same parameters at every sharding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_pg.check.job import TIMEOUT_MINUTES
from megatron_pg.check.options import CheckOptions
from megatron_pg.check.sharded_parameters import set_parameters
from megatron_pg.check.steps import VOCAB_SIZE
from megatron_pg.config.versions import needs_kept_pipeline_outputs
from megatron_pg.megatron.cpu.layer_spec import torch_block_spec

MAX_SEQUENCE_LENGTH = 256


def initialize_groups(options: CheckOptions) -> None:
    """Makes Megatron's process groups anew; every rank of the world calls it."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=TIMEOUT_MINUTES,
    )
    if options.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1234)


def unsharded(options: CheckOptions) -> CheckOptions:
    """The same model, whole on every rank."""
    return replace(
        options,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
    )


class LogitTable(torch.nn.Module):
    """Logits that are parameters, one row a token id: what is left of a model when only the loss is to be judged.

    Its pipeline stages pass a hidden state on that touches no logit, so that every stage has a gradient to send.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        pre_process: bool,
        post_process: bool,
        device: str,
    ) -> None:
        super().__init__()
        self.config = config
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = False
        self.model_type = ModelType.encoder_or_decoder
        self.input_tensor: Tensor | None = None
        self.untouched = torch.nn.Parameter(torch.zeros(config.hidden_size, device=device))
        if post_process:
            columns = vocab_size // config.tensor_model_parallel_size
            self.table = torch.nn.Parameter(torch.zeros(vocab_size, columns, device=device))
            tensor_parallel.set_tensor_model_parallel_attributes(self.table, True, 1, 1)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """The schedule's hook: what the stage before has sent."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        """tokens [1, local_tokens] -> logits [1, local_tokens, v/tp], or the hidden state of an earlier stage."""
        hidden = self.untouched.repeat(tokens.shape[1], 1, 1)
        if self.input_tensor is not None:
            hidden = hidden + self.input_tensor
        if not self.post_process:
            return hidden
        return self.table[tokens] + 0.0 * hidden.sum()


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the whole model: as few layers and heads as the sharding can split."""

    num_layers: int
    num_query_groups: int
    head_size: int
    vocab_size: int
    ffn_hidden_size: int | None = None
    """None: four times the hidden size."""

    @property
    def hidden_size(self) -> int:
        """Two heads to a query group."""
        return 2 * self.num_query_groups * self.head_size

    @classmethod
    def of(cls, options: CheckOptions) -> ModelShape:
        """Of the sharded model; the unsharded one has the same."""
        return cls(
            num_layers=options.num_layers
            or max(2, options.pipeline_model_parallel_size * options.num_chunks),
            num_query_groups=max(2, options.tensor_model_parallel_size),
            # The least that fused attention takes, and less where everything is slow.
            head_size=32 if options.device == "cuda" else 8,
            # Each tensor-parallel rank has as many columns; the samples' tokens are below the number in steps.
            vocab_size=-(-VOCAB_SIZE // options.tensor_model_parallel_size)
            * options.tensor_model_parallel_size,
        )


def model_config(
    options: CheckOptions, shape: ModelShape, *, calculate_per_token_loss: bool, **changes: Any
) -> TransformerConfig:
    """A few thousand parameters, no dropout, no fusions but the attention's.

    Args:
        options: the sharding and the dtype.
        shape: the sizes.
        calculate_per_token_loss: the loss mode.
        changes: fields of TransformerConfig that override all of it.
    """
    is_cuda = options.device == "cuda"
    settings: dict[str, Any] = {}
    if options.num_experts is not None:
        settings |= {
            "num_moe_experts": options.num_experts,
            # All of them: where rounding decides between two experts, no gradient is close to another.
            "moe_router_topk": options.num_experts,
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": False,
            "moe_router_dtype": "fp64" if options.dtype == "fp64" else "fp32",
            "add_bias_linear": False,
        }
    if options.virtual_pipeline_model_parallel_size is not None:
        settings |= {
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
            "deallocate_pipeline_outputs": not needs_kept_pipeline_outputs(),
        }
    fields: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=2 * shape.num_query_groups,
        num_query_groups=shape.num_query_groups,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        sequence_parallel=options.sequence_parallel,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        bf16=options.dtype == "bf16",
        params_dtype=options.torch_dtype,
        pipeline_dtype=options.torch_dtype,
        variable_seq_lengths=options.pipeline_model_parallel_size > 1,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=not is_cuda,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=calculate_per_token_loss,
        finalize_model_grads_func=finalize_model_grads,
    )
    return TransformerConfig(**fields | settings | changes)


def build_gpt(
    options: CheckOptions,
    shape: ModelShape,
    config: TransformerConfig,
    *,
    new_model: Callable[..., torch.nn.Module] | None = None,
    tied_embeddings: bool = False,
) -> list[torch.nn.Module]:
    """This rank's chunks of the end-to-end model, without DDP.

    Args:
        options: the sharding, the dtype and the device.
        shape: the sizes.
        config: of `model_config`.
        new_model: makes a chunk from GPTModel's keyword arguments; None takes GPTModel.
        tied_embeddings: whether the output layer's weight is the embedding's.
    """
    chunks = []
    for vp_stage, pre_process, post_process in _stages(options):
        if options.transformer_impl == "transformer_engine":
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=True, vp_stage=vp_stage
            )
        else:
            spec = torch_block_spec(config, vp_stage)
        model = (new_model or GPTModel)(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=shape.vocab_size,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=tied_embeddings,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        ).to(options.device)
        set_parameters(model)
        chunks.append(Float16Module(config, model) if options.dtype == "bf16" else model)
    return chunks


def build_logit_table(
    options: CheckOptions, shape: ModelShape, config: TransformerConfig
) -> list[torch.nn.Module]:
    """This rank's chunks of the model that is nothing but logits, in float32, without DDP."""
    chunks: list[torch.nn.Module] = []
    for _, pre_process, post_process in _stages(options):
        chunks.append(
            LogitTable(
                config,
                shape.vocab_size,
                pre_process=pre_process,
                post_process=post_process,
                device=options.device,
            )
        )
        set_parameters(chunks[-1])
    return chunks


def _stages(options: CheckOptions) -> list[tuple[int | None, bool, bool]]:
    """(virtual stage, is the pipeline's first, is its last) of each chunk of this rank."""
    if options.virtual_pipeline_model_parallel_size is None:
        return [
            (
                None,
                parallel_state.is_pipeline_first_stage(),
                parallel_state.is_pipeline_last_stage(),
            )
        ]
    return [
        (
            stage,
            parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        )
        for stage in range(options.num_chunks)
    ]


def under_ddp(
    options: CheckOptions,
    config: TransformerConfig,
    chunks: list[torch.nn.Module],
    *,
    overlap_grad_reduce: bool = False,
) -> list[DistributedDataParallel]:
    """The chunks under Megatron's DDP, gradients reduced in float32, or in float64 where the model is."""
    return [
        DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=options.dtype != "fp64",
                overlap_grad_reduce=overlap_grad_reduce,
                use_distributed_optimizer=options.use_distributed_optimizer,
                average_in_collective=options.average_in_collective,
            ),
            module=chunk,
            disable_bucketing=place > 0,
        )
        for place, chunk in enumerate(chunks)
    ]
