"""Small models that compute the same function of the same parameters at every sharding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_pg.check.job import TIMEOUT_MINUTES
from megatron_pg.check.options import CheckOptions
from megatron_pg.check.weights import set_parameters
from megatron_pg.config import versions
from megatron_pg.megatron.cpu.layer_spec import TorchNorm, hybrid_stack_spec, torch_block_spec

NewModel = Callable[..., torch.nn.Module]
"""The maker of a chunk from GPTModel's keyword arguments."""
Provider = Callable[..., Any]
"""The maker of a chunk with Megatron's signature: `provider(pre_process, post_process,
vp_stage=None, config=None, pg_collection=None)`."""


def initialize_groups(options: CheckOptions, *, sharded: bool = True) -> None:
    """Destroy and create Megatron's process groups. Every rank of the world calls it."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    # Megatron keeps a number for each layer of the first mixture of experts that it sees.
    versions.router_metrics().clear()
    parallel_state.initialize_model_parallel(
        **options.parallel_sizes(sharded), distributed_timeout_minutes=TIMEOUT_MINUTES
    )
    if options.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1234)


def destroy_groups() -> None:
    """Destroy all process groups except the world's. `destroy_model_parallel` only forgets them,
    and leaves their threads and communicators.
    """
    for group in [*distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def tied_model(**keywords: Any) -> GPTModel:
    """Make a GPTModel with learned positions and a tied output layer."""
    keywords["position_embedding_type"] = "learned_absolute"
    return GPTModel(**keywords | {"share_embeddings_and_output_weights": True})


def hybrid_model(*, config: TransformerConfig, **keywords: Any) -> Any:
    """Make a HybridModel in plain torch with the config's number of layers: attention and MLP (or
    experts) in turn.
    """
    from megatron.core.models.hybrid.hybrid_model import HybridModel  # old versions lack it

    keywords["hybrid_stack_spec"] = hybrid_stack_spec(config)
    del keywords["transformer_layer_spec"]
    kinds = "*-" if config.num_moe_experts is None else "*E"
    pattern = (kinds * config.num_layers)[: config.num_layers]
    return HybridModel(config=config, hybrid_layer_pattern=pattern, **keywords)


def multi_token_model(**keywords: Any) -> GPTModel:
    """Make a GPTModel with its config's multi-token prediction."""
    config, spec = keywords["config"], keywords["transformer_layer_spec"]
    is_local = spec.layer_norm is TorchNorm
    options = {"use_transformer_engine": not is_local, "vp_stage": keywords["vp_stage"]}
    block = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, **options)
    for layer in block.layer_specs if block is not None and is_local else ():
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = TorchNorm
    return GPTModel(mtp_block_spec=block, **keywords)


class LogitTable(MegatronModule):  # type: ignore[misc]
    """A model that tests only the loss. Its parameters are logits, one row per token id.

    Its pipeline stages send a hidden state that changes no logit, so that every stage has a
    gradient to send.
    """

    def __init__(
        self, config: Any, vocab_size: int, pre_process: bool, post_process: bool, **_: Any
    ) -> None:
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = False
        self.model_type = ModelType.encoder_or_decoder
        self.input_tensor: Tensor | None = None
        self.untouched = torch.nn.Parameter(torch.zeros(config.hidden_size))
        if post_process:
            columns = vocab_size // config.tensor_model_parallel_size
            self.table = torch.nn.Parameter(torch.zeros(vocab_size, columns))
            tensor_parallel.set_tensor_model_parallel_attributes(self.table, True, 1, 1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the entries, with the table's columns divided."""
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), "", {"table": 1}
        )
        return entries

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Map input_ids [1, local_tokens] to logits [1, local_tokens, v/tp], or to an earlier
        stage's hidden state.
        """
        hidden = self.untouched.repeat(input_ids.shape[1], 1, 1)
        if self.input_tensor is not None:
            hidden = hidden + self.input_tensor
        return self.table[input_ids] + 0.0 * hidden.sum() if self.post_process else hidden


class Model(NamedTuple):
    """A kind of model and the options that it runs with."""

    new: NewModel
    changes: Mapping[str, Any]
    """The values that replace the user's options."""
    is_run: Callable[[CheckOptions], bool] = lambda options: True


ONE_TOKEN = {"mtp_num_layers": None}
DENSE = {"num_experts": None, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
PLAIN: dict[str, Any] = ONE_TOKEN | DENSE
LOCAL = {"transformer_impl": "local"}
FP32 = {"dtype": "fp32"}
MODELS = {
    "end to end": Model(GPTModel, ONE_TOKEN),
    "tied": Model(tied_model, PLAIN),
    "hybrid": Model(hybrid_model, PLAIN | LOCAL, lambda options: options.hybrid_model),
    "multi-token": Model(multi_token_model, DENSE, lambda options: bool(options.mtp_num_layers)),
    # Its parameters are float32 logits. It has no output layer to fuse.
    "loss only": Model(LogitTable, PLAIN | LOCAL | FP32, lambda options: not options.fused_lm_head),
}


def model_config(
    options: CheckOptions, *, sharded: bool = True, dtype: torch.dtype | None = None, **changes: Any
) -> TransformerConfig:
    """Make the config of a few thousand parameters, without dropout, and without fusions except
    attention. `changes` override fields.
    """
    dtype = dtype or (torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    sizes = options.parallel_sizes(sharded)
    # The sharding cannot split fewer heads and layers.
    num_query_groups = options.tensor_model_parallel_size
    if options.transformer_impl == "transformer_engine":
        num_query_groups *= options.context_parallel_size  # its a2a splits heads too
    num_query_groups = max(2, num_query_groups)
    # 32 is the smallest head size of fused attention.
    head_size = 32 if options.device == "cuda" else 8
    fields: dict[str, Any] = dict(
        **sizes,
        sequence_parallel=options.sequence_parallel and sharded,
        num_layers=options.num_layers or max(2, options.num_chunks),
        hidden_size=2 * num_query_groups * head_size,
        num_attention_heads=2 * num_query_groups,
        num_query_groups=num_query_groups,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        variable_seq_lengths=sizes["pipeline_model_parallel_size"] != 1,
        # Megatron requires it for variable lengths, also in dense models.
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=options.device == "cpu",
        mtp_num_layers=options.mtp_num_layers,
        gradient_accumulation_fusion=options.gradient_accumulation_fusion and sharded,
        finalize_model_grads_func=distributed.finalize_model_grads,
    )
    if options.cp_comm_type is not None and sharded:
        fields["cp_comm_type"] = options.cp_comm_type
    if options.num_experts is not None:
        # A token leaves out one of three or more experts, or the auxiliary loss would be constant.
        # In bf16 it leaves out none, because rounding would decide between experts.
        leaves_one_out = options.num_experts > 2 and dtype != torch.bfloat16
        fields |= {
            "num_moe_experts": options.num_experts,
            "moe_router_topk": options.num_experts - leaves_one_out,
            # The "auxiliary loss" row sets the coefficient.
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.0,
            # In float32, Transformer Engine's product would be in TF32 (error 1e-4 on an H200).
            "moe_router_dtype": "fp32" if dtype == torch.bfloat16 else "fp64",
            "add_bias_linear": False,
        }
    if sizes["virtual_pipeline_model_parallel_size"] is not None:
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        fields["deallocate_pipeline_outputs"] = not versions.needs_kept_pipeline_outputs()
    return TransformerConfig(**fields | changes)


def provider_of(options: CheckOptions, new_model: NewModel = GPTModel, **changes: Any) -> Provider:
    """Make the provider of a tiny model. `changes` override keyword arguments of `new_model`."""

    def provider(
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> torch.nn.Module:
        stage: dict[str, Any] = {"vp_stage": vp_stage}
        if options.transformer_impl == "transformer_engine":
            spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, True, **stage)
        else:
            spec = torch_block_spec(config, vp_stage)
        keywords: dict[str, Any] = dict(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=options.padded_vocab_size,
            max_sequence_length=max(256, options.longest),
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            **stage,
        )
        return new_model(**keywords | changes)

    return provider


def build_chunks(
    options: CheckOptions,
    config: Any,
    provider: Provider,
    prepare: Callable[[Any], None] | None = set_parameters,
) -> list[Any]:
    """Build this rank's chunks of a model without DDP, and call `prepare` with each."""
    num_stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for vp_stage in [None] if num_stages is None else range(num_stages):
        model = provider(
            pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(False, vp_stage=vp_stage),
            vp_stage=vp_stage,
            config=config,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        ).to(options.device)
        if prepare is not None:
            prepare(model)
        chunks.append(Float16Module(model.config, model) if config.bf16 else model)
    return chunks


def wrap_chunks(options: CheckOptions, chunks: Sequence[Any]) -> list[Any]:
    """Wrap the chunks in DDP, and prepare the first one's config as a trainer does."""
    config = chunks[0].config
    ddp_config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.params_dtype != torch.float64,
        overlap_grad_reduce=options.overlap_grad_reduce,
        use_distributed_optimizer=options.use_distributed_optimizer,
        average_in_collective=options.average_in_collective,
    )
    wrapped = [
        distributed.DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=place > 0)
        for place, chunk in enumerate(chunks)
    ]
    if options.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


def build_model(
    options: CheckOptions,
    config: TransformerConfig,
    new_model: NewModel = GPTModel,
    *,
    same_parameters: bool = True,
    **changes: Any,
) -> list[Any]:
    """Build a tiny model in DDP, with the parameters of `set_parameters` or Megatron's random ones.
    `changes` override keyword arguments of `new_model`.
    """
    provider = provider_of(options, new_model, **changes)
    prepare = set_parameters if same_parameters else None
    return wrap_chunks(options, build_chunks(options, config, provider, prepare))
