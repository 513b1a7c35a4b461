"""The policy: Megatron's DDP, optimizer and scheduler around the model, from the arguments."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime
from megatron_pg.megatron.groups import ParallelGroups

from .transformer import build_chunk, num_chunks, transformer_config


def start_megatron(args: argparse.Namespace) -> tuple[ParallelGroups, torch.device]:
    """Process groups and random state of this rank; every rank must call it."""
    # One line for each parameter and setting would bury the progress.
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    # It warns that GPTModel will get no new features.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    if args.device == "cpu":
        enable_cpu_runtime()
        device = torch.device("cpu")
        if not dist.is_initialized():
            dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    groups = ParallelGroups.from_parallel_state()
    # As Megatron does: stages hold different layers, which are not to begin alike.
    seed = args.seed + 100 * groups.pipeline_rank
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return groups, device


@dataclass
class Policy:
    """The model and what updates it.

    Attributes:
        chunks: DDP around this rank's chunks of the GPTModel, more than one in a virtual pipeline.
        vocabulary_size: without the columns that pad it.
        optimizer, scheduler: set by `start_optimizer`.
    """

    chunks: list[DistributedDataParallel]
    vocabulary_size: int
    groups: ParallelGroups
    device: torch.device
    optimizer: Any = None
    scheduler: Any = None

    @property
    def model(self) -> DistributedDataParallel:
        """The whole model, where no pipeline cuts it."""
        (chunk,) = self.chunks
        return chunk

    @property
    def config(self) -> TransformerConfig:
        return self.chunks[0].config

    @property
    def pad_to_multiple(self) -> int:
        """Of a packed micro-batch: sequence parallelism splits it once more."""
        if not self.config.sequence_parallel:
            return 1
        return self.groups.tensor_size * self.groups.context_size

    @property
    def microbatch_group_size(self) -> int:
        """An interleaved pipeline runs micro-batches in groups of this size."""
        is_interleaved = len(self.chunks) > 1
        return self.config.microbatch_group_size_per_vp_stage if is_interleaved else 1

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank's chunks."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def start_optimizer(
        self,
        args: argparse.Namespace,
        *,
        lr: float,
        num_steps: int,
        warmup_steps: int,
        decay_style: str,
    ) -> None:
        """A new optimizer at `lr`, as the arguments have it, and a scheduler over `num_steps`."""
        settings = _settings(OptimizerConfig, args) | {"lr": lr}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**settings), self.chunks)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=lr,
            min_lr=args.min_lr,
            lr_warmup_steps=warmup_steps,
            lr_decay_steps=num_steps,
            lr_decay_style=decay_style,
            start_wd=args.weight_decay,
            end_wd=args.weight_decay,
            wd_incr_steps=num_steps,
            wd_incr_style="constant",
        )

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self) -> float:
        """Clip, take the optimizer's and the scheduler's step; the gradient's norm before clipping."""
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return float(norm)


def build_policy(
    args: argparse.Namespace, groups: ParallelGroups, device: torch.device, vocabulary_size: int
) -> Policy:
    """A freshly initialised policy, the same on every rank of a data- and context-parallel group."""
    modules = build_chunks(args, device, vocabulary_size)
    settings = _settings(DistributedDataParallelConfig, args) | {
        "grad_reduce_in_fp32": True,
        "average_in_collective": getattr(args, "ddp_average_in_collective", False),
    }
    chunks = [
        DistributedDataParallel(
            module.config,
            DistributedDataParallelConfig(**settings),
            module,
            disable_bucketing=number > 0,
        )
        for number, module in enumerate(modules)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if settings.get("overlap_grad_reduce"):
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return Policy(chunks, vocabulary_size, groups, device)


def build_chunks(
    args: argparse.Namespace, device: torch.device, vocabulary_size: int
) -> list[torch.nn.Module]:
    """This rank's chunks of a GPTModel on `device`, in the precision of the arguments."""
    config = transformer_config(args)
    chunks: list[torch.nn.Module] = [
        build_chunk(args, config, vocabulary_size, number).to(device)
        for number in range(num_chunks(args))
    ]
    return [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks


def _settings(config_type: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a Megatron config that the arguments name, as Megatron's own training script reads them."""
    names = {field.name for field in dataclasses.fields(config_type) if field.init}
    return {name: value for name, value in vars(args).items() if name in names}
