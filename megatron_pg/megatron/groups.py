"""The process groups that a loss needs; the one place that reads Megatron's `parallel_state`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """Ranks that hold other samples, at the same context-parallel rank."""
    data_with_context: ProcessGroup
    """`data` and `context` together: the ranks that gradients are reduced over."""
    pipeline: ProcessGroup
    """The stages of one pipeline."""

    @classmethod
    def from_parallel_state(cls) -> ParallelGroups:
        """The groups of `parallel_state.initialize_model_parallel`; needs no communication.

        Raises:
            RuntimeError: model parallelism is not initialized.
        """
        return cls.from_model(None)

    @classmethod
    def from_model(cls, model: Any) -> ParallelGroups:
        """The groups that `model` was built with; those it does not name are the global ones.

        Args:
            model: a Megatron model, possibly wrapped (DDP, Float16Module), or the list of chunks of
                a virtual pipeline; None names no group.

        Raises:
            RuntimeError: a group is missing from the model and model parallelism is not initialized.
        """
        collection = _process_group_collection(model)
        names = {
            "tensor": "tp",
            "context": "cp",
            "data": "dp",
            "data_with_context": "dp_cp",
            "pipeline": "pp",
        }
        found: dict[str, Any] = {
            field: getattr(collection, name, None) for field, name in names.items()
        }
        missing = [field for field, group in found.items() if group is None]
        if missing and not parallel_state.model_parallel_is_initialized():
            raise RuntimeError(
                "Megatron's process groups do not exist yet: call "
                "megatron.core.parallel_state.initialize_model_parallel(...) first"
            )
        for field in missing:
            found[field] = _GLOBAL_GROUPS[field]()
        return cls(**found)

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
        """Whether this rank computes the loss."""
        return self.pipeline_rank == dist.get_world_size(self.pipeline) - 1

    @property
    def contributes(self) -> bool:
        """Whether this rank's metrics are counted: the other tensor-parallel ranks of the last stage hold the same."""
        return self.is_last_pipeline_stage and self.tensor_rank == 0


_GLOBAL_GROUPS: dict[str, Callable[[], Any]] = {
    "tensor": parallel_state.get_tensor_model_parallel_group,
    "context": parallel_state.get_context_parallel_group,
    "data": parallel_state.get_data_parallel_group,
    "data_with_context": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "pipeline": parallel_state.get_pipeline_model_parallel_group,
}


def _process_group_collection(model: Any) -> Any | None:
    """The innermost `pg_collection` of a wrapped model, or None.

    The innermost one, because a DDP wrapper keeps a collection of its own in 0.19.2 and the model's
    is the one that attention and rotary embeddings follow.
    """
    module = model[0] if isinstance(model, (list, tuple)) else model
    collection = None
    while module is not None:
        collection = getattr(module, "pg_collection", None) or collection
        module = getattr(module, "module", None)
    return collection


def unwrapped(chunk: Any) -> Any:
    """The model inside DDP and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
