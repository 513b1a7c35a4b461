"""The model, DDP and optimizer for `whole_step`."""

import argparse
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_pg.check.model import build_model, model_config
from megatron_pg.check.options import CheckOptions
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
from megatron_pg.megatron.groups import ParallelGroups


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    is_tied: bool = True


SHAPES = {
    "tiny": Shape(2, 256, 512, 4, 4, 512),
    "1b": Shape(16, 2048, 5632, 16, 8, 151936),
    # Llama 3 8B with 8 of its 32 layers, which fit one GPU with the optimizer.
    "8b": Shape(8, 4096, 14336, 32, 8, 128256, is_tied=False),
}


@dataclass
class Trainer:
    """The inputs of a step in addition to its batches."""

    model: DistributedDataParallel
    optimizer: Any
    groups: ParallelGroups
    device: torch.device
    vocab_size: int


def build_trainer(args: argparse.Namespace) -> Trainer:
    """Join the job, and build this rank's part of the model. Every rank calls it."""
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    device = _join(args)
    is_cuda = device.type == "cuda"
    shape = SHAPES[args.model]
    options = CheckOptions(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        sequence_parallel=args.tensor_model_parallel_size > 1,
        use_distributed_optimizer=is_cuda,
        device=args.device,
        dtype="bf16" if is_cuda else "fp32",
        transformer_impl="transformer_engine" if is_cuda else "local",
    )
    config = model_config(
        options,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=is_cuda,
        bias_dropout_fusion=is_cuda,
    )
    (model,) = build_model(
        options,
        config,
        same_parameters=False,
        vocab_size=shape.vocab_size,
        max_sequence_length=max(args.tokens),
        share_embeddings_and_output_weights=shape.is_tied,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"{count / 1e9:.2f} billion parameters per rank", flush=True)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        # Every head must have the same weights.
        lr=0.0,
        weight_decay=0.0,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=is_cuda,
        # Megatron clips gradients only on a GPU.
        clip_grad=1.0 if is_cuda else 0.0,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    config.grad_scale_func = optimizer.scale_loss
    groups = ParallelGroups.from_parallel_state()
    return Trainer(model, optimizer, groups, device, shape.vocab_size)


def _join(args: argparse.Namespace) -> torch.device:
    # Before Blackwell, Megatron requires it under tensor and context parallelism.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if args.device == "cpu":
        enable_cpu_runtime()
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    return device
