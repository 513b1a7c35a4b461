"""Megatron-Core's GPTModel, DDP, optimizer and scheduler, from the arguments."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
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
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_pg.megatron.cpu_runtime import enable_cpu_runtime
from megatron_pg.megatron.layer_spec import torch_block_spec
from megatron_pg.megatron.process_groups import ParallelGroups
from megatron_pg.megatron.versions import has_megatron_training


def start_megatron(args: argparse.Namespace) -> tuple[ParallelGroups, torch.device]:
    """Process groups and random state of this rank; every rank must call it."""
    # One line for each parameter and setting would bury the progress.
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
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
        context_parallel_size=args.context_parallel_size,
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)
    return ParallelGroups.from_parallel_state(), device


@dataclass
class Policy:
    """The model and what updates it.

    Attributes:
        model: DDP around GPTModel.
        vocabulary_size: without the columns that pad it.
        optimizer, scheduler: set by `start_optimizer`.
    """

    model: DistributedDataParallel
    vocabulary_size: int
    groups: ParallelGroups
    device: torch.device
    optimizer: Any = None
    scheduler: Any = None

    def start_optimizer(
        self,
        args: argparse.Namespace,
        *,
        lr: float,
        num_steps: int,
        warmup_steps: int,
        decay_style: str,
    ) -> None:
        """A new Adam at `lr` and a scheduler over `num_steps`."""
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            params_dtype=args.params_dtype,
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model])
        self.model.config.grad_scale_func = self.optimizer.scale_loss
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
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self) -> float:
        """Clip, take the optimizer's and the scheduler's step; the gradient's norm before clipping."""
        if self.device.type == "cuda":
            _, norm, _ = self.optimizer.step()
        else:
            norm = self._clipped_step()
        self.scheduler.step(increment=1)
        return float(norm)

    def _clipped_step(self) -> float:
        """`optimizer.step` with its clipping, which in Megatron accepts CUDA gradients only."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        scale = self.optimizer.config.clip_grad / (norm + 1e-6)
        if 0.0 < scale < 1.0:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(scale)
        self.optimizer.step_with_ready_grads()
        return norm


def build_policy(
    args: argparse.Namespace, groups: ParallelGroups, device: torch.device, vocabulary_size: int
) -> Policy:
    """A freshly initialised policy, the same on every rank of a data- and context-parallel group."""
    module = build_model(args, device, vocabulary_size)
    model = DistributedDataParallel(
        module.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
    )
    model.broadcast_params()
    model.config.finalize_model_grads_func = finalize_model_grads
    return Policy(model, vocabulary_size, groups, device)


def build_model(args: argparse.Namespace, device: torch.device, vocabulary_size: int) -> Any:
    """A GPTModel on `device`, in the precision of the arguments."""
    config = _transformer_config(args)
    tensor_parallel_size = args.tensor_model_parallel_size
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(args, config),
        vocab_size=-(-vocabulary_size // tensor_parallel_size) * tensor_parallel_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
    ).to(device)
    return Float16Module(config, model) if config.bf16 else model


def _transformer_config(args: argparse.Namespace) -> TransformerConfig:
    if has_megatron_training():
        from megatron.training.arguments import core_transformer_config_from_args

        return core_transformer_config_from_args(args)
    fields = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    return TransformerConfig(
        **{name: value for name, value in vars(args).items() if name in fields}
    )


def _layer_spec(args: argparse.Namespace, config: TransformerConfig) -> Any:
    if args.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec()
    return torch_block_spec(config)
