"""The process groups that a loss needs, from a model or Megatron's `parallel_state`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's group along each axis of parallelism."""

    tensor: ProcessGroup
    """Ranks that share one vocabulary (tensor parallel)."""
    context: ProcessGroup
    """Ranks that share one packed micro-batch (context parallel)."""
    data: ProcessGroup
    """Ranks that hold different samples, at the same context-parallel rank."""
    data_with_context: ProcessGroup
    """`data` and `context` together, over which gradients are reduced."""
    pipeline: ProcessGroup
    """The stages of one pipeline."""

    @classmethod
    def from_parallel_state(cls) -> ParallelGroups:
        """Return the groups of `parallel_state.initialize_model_parallel`, without communication,
        or raise RuntimeError.
        """
        return cls.from_model(None)

    @classmethod
    def from_model(cls, model: Any) -> ParallelGroups:
        """Return the groups that `model` was built with, and take missing ones from
        `parallel_state`.

        Args:
            model: a Megatron model, wrapped or not, or a virtual pipeline's list of chunks. None:
                all groups from `parallel_state`.

        Raises:
            RuntimeError: the model lacks a group and model parallelism is not initialized.
        """
        own, module = None, chunks_of(model)[0]
        while module is not None:
            # The innermost collection wins: in 0.19.2 DDP has its own, but attention and rotary
            # embeddings follow the model's.
            own = getattr(module, "pg_collection", None) or own
            module = getattr(module, "module", None)
        groups: Any = {axis: getattr(own, name, None) for axis, (name, _) in _SOURCES.items()}
        missing = [axis for axis, group in groups.items() if group is None]
        if missing and not parallel_state.model_parallel_is_initialized():
            raise RuntimeError(
                "Megatron's process groups do not exist: call "
                "megatron.core.parallel_state.initialize_model_parallel(...) first"
            )
        return cls(**groups | {axis: _SOURCES[axis][1]() for axis in missing})

    @property
    def tensor_rank(self) -> int:
        return dist.get_rank(self.tensor)

    @property
    def tensor_size(self) -> int:
        return dist.get_world_size(self.tensor)

    @property
    def context_rank(self) -> int:
        return dist.get_rank(self.context)

    @property
    def context_size(self) -> int:
        return dist.get_world_size(self.context)

    @property
    def data_rank(self) -> int:
        return dist.get_rank(self.data)

    @property
    def data_size(self) -> int:
        return dist.get_world_size(self.data)

    @property
    def pipeline_rank(self) -> int:
        return dist.get_rank(self.pipeline)

    @property
    def is_last_pipeline_stage(self) -> bool:
        """Tell whether this rank computes the loss."""
        return self.pipeline_rank == dist.get_world_size(self.pipeline) - 1

    @property
    def contributes(self) -> bool:
        """Tell whether this rank's metrics count. Tensor-parallel ranks of the last stage have
        equal metrics.
        """
        return self.is_last_pipeline_stage and self.tensor_rank == 0


_SOURCES: dict[str, tuple[str, Callable[[], Any]]] = {
    "tensor": ("tp", parallel_state.get_tensor_model_parallel_group),
    "context": ("cp", parallel_state.get_context_parallel_group),
    "data": ("dp", parallel_state.get_data_parallel_group),
    "data_with_context": ("dp_cp", partial(parallel_state.get_data_parallel_group, True)),
    "pipeline": ("pp", parallel_state.get_pipeline_model_parallel_group),
}
"""Each axis's group name in a model's `pg_collection`, and its getter in `parallel_state`."""


def chunks_of(model: Any) -> list[Any]:
    """List the chunks of a model, which is one chunk or a virtual pipeline's list."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def unwrapped(chunk: Any) -> Any:
    """Return the model inside DDP and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
