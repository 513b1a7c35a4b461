"""Megatron's side of the command line: its own parser and checks where the wheel has them, the same names elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from megatron_pg.config.versions import has_megatron_training

FUSIONS = (
    "masked_softmax_fusion",
    "bias_gelu_fusion",
    "bias_swiglu_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "moe_permute_fusion",
)
"""Kernels of Transformer Engine or Apex, or compiled by torch for a GPU."""

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def parse(extra_args_provider: Provider) -> argparse.Namespace:
    """The command line, by Megatron's parser (0.17 and later have it in the wheel) or by a small one."""
    if has_megatron_training():
        from megatron.training.arguments import parse_args

        args: argparse.Namespace = parse_args(extra_args_provider=extra_args_provider)
        return args
    parser = argparse.ArgumentParser(allow_abbrev=False)
    args = extra_args_provider(_add_megatron_args(parser)).parse_args()
    args.rank = int(os.environ.get("RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return args


def adapt(args: argparse.Namespace) -> None:
    """What is no choice here: one pack a micro-batch, and what needs a device or a package that is not there."""
    args.micro_batch_size = 1
    # Of Apex, or of a Transformer Engine that is new enough.
    args.gradient_accumulation_fusion = _is_installed("fused_weight_gradient_mlp_cuda")
    if getattr(args, "moe_token_dispatcher_type", None) in (None, "allgather"):
        # Packs differ in length from rank to rank and from one micro-batch to the next.
        args.moe_token_dispatcher_type = "alltoall"
    if args.device == "cpu":
        args.distributed_backend = "gloo"
        args.use_cpu_initialization = True
    if args.device == "cpu" or not _is_installed("transformer_engine"):
        args.transformer_impl = "local"
        args.no_persist_layer_norm = True
        args.moe_grouped_gemm = False
        for fusion in FUSIONS:
            setattr(args, fusion, False)


def validate(args: argparse.Namespace) -> None:
    """Megatron's own checks, and the values that it derives.

    Raises:
        ValueError: with what Megatron says.
    """
    if has_megatron_training():
        _validate_as_megatron_does(args)
    else:
        _derive(args)
    # Packs differ in length from one micro-batch to the next; pipeline stages then tell each other how long they are.
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _validate_as_megatron_does(args: argparse.Namespace) -> None:
    from megatron.training import arguments

    with contextlib.ExitStack() as stack:
        # It prints every one of its arguments, 600 lines.
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if args.device == "cpu" or not torch.cuda.is_available():
            # Under model parallelism it asks for the architecture of a GPU: what it wants of Hopper's, a dry run of
            # --device cuda is to find where there is none.
            version = 10 if args.device == "cpu" else 9
            stack.enter_context(
                mock.patch.object(arguments, "get_device_arch_version", lambda: version)
            )
        try:
            arguments.validate_args(args)
        except AssertionError as error:
            raise ValueError(f"Megatron refuses these flags: {error}") from error


def _derive(args: argparse.Namespace) -> None:
    """What Megatron's checks would set."""
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    args.expert_tensor_parallel_size = (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    )
    args.sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1
    stages = args.pipeline_model_parallel_size
    if args.num_layers % stages:
        raise ValueError(
            f"--num-layers {args.num_layers} cannot be split over --pipeline-model-parallel-size {stages}"
        )
    chunks = args.num_virtual_stages_per_pipeline_rank
    if chunks is None and args.num_layers_per_virtual_pipeline_stage is not None:
        chunks = args.num_layers // stages // args.num_layers_per_virtual_pipeline_stage
    args.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks
    if chunks and chunks > 1 and (stages == 1 or args.num_layers % (stages * chunks)):
        raise ValueError(
            f"a virtual pipeline of {chunks} chunks a rank needs --pipeline-model-parallel-size above 1 and "
            f"--num-layers a multiple of {stages * chunks}; found {stages} and {args.num_layers}"
        )
    args.overlap_p2p_comm = args.virtual_pipeline_model_parallel_size is not None


def _add_megatron_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags of Megatron that this example knows, under their names, for wheels without its parser."""
    group = parser.add_argument_group("megatron")
    add = group.add_argument
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads"):
        add(flag, type=int, required=True)
    for flag in ("--seq-length", "--max-position-embeddings", "--train-iters"):
        add(flag, type=int, required=True)
    add("--global-batch-size", type=int, default=None, help="samples of an optimizer step")
    add("--vocab-size", type=int, default=None, help="token ids of --rollout-files are below it")
    _add_architecture(group)
    _add_parallelism(group)
    add("--attention-dropout", type=float, default=0.1)
    add("--hidden-dropout", type=float, default=0.1)
    add("--init-method-std", type=float, default=0.02)
    add("--lr", type=float, required=True)
    add("--min-lr", type=float, default=0.0)
    add("--lr-decay-style", choices=["constant", "linear", "cosine"], default="linear")
    add("--lr-warmup-iters", type=int, default=0)
    add("--weight-decay", type=float, default=0.01)
    add("--clip-grad", type=float, default=1.0)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.999)
    add("--adam-eps", type=float, default=1e-8)
    add("--bf16", action="store_true")
    add("--calculate-per-token-loss", action="store_true")
    add("--save-interval", type=int, default=None, help="steps between checkpoints; default: none")
    add("--tensorboard-dir", type=Path, default=None, help="default: a folder of --run-dir")
    add("--seed", type=int, default=1234)
    return parser


def _add_architecture(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    for flag in ("--ffn-hidden-size", "--kv-channels", "--num-experts", "--moe-ffn-hidden-size"):
        add(flag, type=int, default=None)
    add("--group-query-attention", action="store_true")
    add("--num-query-groups", type=int, default=1)
    add("--swiglu", action="store_true")
    add("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    add("--norm-epsilon", dest="layernorm_epsilon", type=float, default=1e-5)
    add("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    add("--add-qkv-bias", action="store_true")
    add("--qk-layernorm", action="store_true")
    add("--untie-embeddings-and-output-weights", action="store_true")
    types = ["learned_absolute", "rope", "none"]
    add("--position-embedding-type", choices=types, default="learned_absolute")
    add("--rotary-base", type=int, default=10000)
    add("--rotary-percent", type=float, default=1.0)
    add("--moe-router-topk", type=int, default=2)
    add("--moe-aux-loss-coeff", type=float, default=0.0)
    add("--moe-router-load-balancing-type", default="aux_loss")
    add("--transformer-impl", choices=["local", "transformer_engine"], default="local")


def _add_parallelism(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    for axis in ("tensor-model", "pipeline-model", "context", "expert-model"):
        add(f"--{axis}-parallel-size", type=int, default=1)
    add("--expert-tensor-parallel-size", type=int, default=None)
    add("--num-layers-per-virtual-pipeline-stage", type=int, default=None)
    add("--num-virtual-stages-per-pipeline-rank", type=int, default=None)
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--recompute-granularity", choices=["full", "selective"], default=None)
    add("--recompute-method", choices=["uniform", "block"], default=None)
    add("--recompute-num-layers", type=int, default=None)
