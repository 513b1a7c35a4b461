"""What a running trainer has set in Megatron's globals, read without importing Megatron.

A trainer that uses Megatron has imported it by the time a loss is computed; where it has not, there is nothing to
read. So these work, and answer "nothing", where Megatron is not installed.
"""

from __future__ import annotations

import argparse
import sys

import torch.distributed as dist


def context_parallel_place() -> tuple[int, int]:
    """The place (rank, size) of this process in Megatron's context-parallel group; (0, 1) where there are no groups."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return 0, 1
    return (
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
    )


def data_parallel_group() -> dist.ProcessGroup | None:
    """Megatron's data-parallel group of this process, without context parallelism; None where there are no groups."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return None
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=False)
    return group


def global_args() -> argparse.Namespace | None:
    """The arguments that the trainer gave `megatron.training.global_vars.set_args`, or None."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is None:
        return None
    try:
        args: argparse.Namespace = global_vars.get_args()
    except AssertionError:  # Megatron's way to say that they are not set
        return None
    return args
