"""Megatron's globals as set by a running trainer, read without importing Megatron."""

import argparse
import sys
from typing import Any

import torch.distributed as dist


def context_parallel_place() -> tuple[int, int]:
    """Return this process's (rank, size) in Megatron's context-parallel group, (0, 1) without
    groups.
    """
    state = _parallel_state()
    if state is None:
        return 0, 1
    return state.get_context_parallel_rank(), state.get_context_parallel_world_size()


def data_parallel_group() -> dist.ProcessGroup | None:
    """Return Megatron's data-parallel group without context parallelism, None without groups."""
    state = _parallel_state()
    return None if state is None else state.get_data_parallel_group(with_context_parallel=False)


def _parallel_state() -> Any | None:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def global_args() -> argparse.Namespace | None:
    """Return the arguments that the trainer gave `megatron.training.global_vars.set_args`, or
    None.
    """
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is None:
        return None
    try:
        args: argparse.Namespace = global_vars.get_args()
    except AssertionError:  # Megatron asserts that they are set
        return None
    return args
