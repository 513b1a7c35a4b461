"""Model, optimizer and scheduler by `megatron.core.dist_checkpointing`: whole parameters, whatever ranks hold what of them."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_pg.megatron.groups import unwrapped

from .model import Policy

# It warns that its own way of saving in the background is going to be replaced; nothing is saved in the background here.
logging.getLogger("megatron.core.dist_checkpointing.strategies.torch").setLevel(logging.ERROR)


def save_model(path: Path, policy: Policy, reference: Any | None) -> None:
    """Write the policy, and the reference model where there is one; every rank must call it.

    Args:
        path: an empty folder.
    """
    _begin_moments(policy.optimizer)
    state = _sharded_state(policy, reference, is_loading=False)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    with _results_stay_in_this_process():
        dist_checkpointing.save(state, str(path), strategy)


def load_model(path: Path, policy: Policy, reference: Any | None) -> None:
    """Put in place what `save_model` wrote, at any sharding; every rank must call it."""
    _begin_moments(policy.optimizer)
    with _steps_of_torch_adam(policy.optimizer):
        sharded = _sharded_state(policy, reference, is_loading=True)
        state = dist_checkpointing.load(sharded, str(path))
        _begin_loaded_steps(policy.optimizer, state["optimizer"])
        policy.optimizer.load_state_dict(state["optimizer"])
    for number, chunk in enumerate(policy.chunks):
        unwrapped(chunk).load_state_dict(state[_chunk_name(policy, number)])
    policy.scheduler.load_state_dict(state["scheduler"])
    if reference is not None:
        unwrapped(reference).load_state_dict(state["reference"])


def _sharded_state(policy: Policy, reference: Any | None, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        # By whole parameters and not by the buffers of a rank, so that any sharding can read it.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": policy.groups.data_with_context,
    }
    state: dict[str, Any] = {
        _chunk_name(policy, number): unwrapped(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(policy.chunks)
    }
    state["optimizer"] = policy.optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=metadata
    )
    state["scheduler"] = policy.scheduler.state_dict()
    if reference is not None:
        sharded = unwrapped(reference).sharded_state_dict(prefix="reference.", metadata=metadata)
        state["reference"] = {
            name.removeprefix("reference."): tensor for name, tensor in sharded.items()
        }
    return state


def _begin_moments(optimizer: Any) -> None:
    """Give optimizers that have taken no step the zeros that their first would begin with.

    A checkpoint before the first step would otherwise hold none, and loading asks for them.
    """
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None and not part.optimizer.state and part.init_state_fn:
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(
            part.optimizer, torch.optim.Adam
        ):  # which counts the steps of every parameter
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros(()))


def _begin_loaded_steps(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """A step of 0 that a checkpoint does not name."""
    parts = optimizer.chained_optimizers
    for number, part in enumerate(parts):
        if isinstance(part.optimizer, torch.optim.Adam) and not isinstance(
            part, DistributedOptimizer
        ):
            state = loaded if len(parts) == 1 else loaded[number]
            state = state.get(
                "optimizer", state
            )  # where there are float32 copies of parameters beside it
            state["state"].setdefault("common_step", torch.zeros(()))


@contextlib.contextmanager
def _steps_of_torch_adam(optimizer: Any) -> Iterator[None]:
    """Let Megatron's distributed optimizer load into torch's Adam, which keeps a step with every parameter.

    It looks for a step among a parameter's tensors, and leaves one step tensor to all parameters, which each of them
    would count on (optimizer/distrib_optimizer.py of megatron-core 0.16.1 and 0.19.2). The Adam of Transformer Engine
    and Apex keeps it elsewhere.
    """
    parts = [
        part
        for part in optimizer.chained_optimizers
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam)
    ]
    with contextlib.ExitStack() as stack:
        for part in parts:
            name = "_set_main_param_and_optimizer_states"
            put = functools.partial(_put_with_step, getattr(part, name), part.optimizer)
            stack.enter_context(mock.patch.object(part, name, put))
        yield
    for part in parts:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _put_with_step(
    put: Callable[..., None], adam: torch.optim.Adam, parameter: Any, tensors: dict[str, Any]
) -> None:
    """The step has been loaded before; it is put onto itself."""
    step = next(iter(adam.state.values()))["step"]
    put(parameter, {**tensors, "step": step})


def _chunk_name(policy: Policy, number: int) -> str:
    """The keys that Megatron's optimizers look for."""
    return "model" if len(policy.chunks) == 1 else f"model{number}"


@contextlib.contextmanager
def _results_stay_in_this_process() -> Iterator[None]:
    """Spare Megatron's writer the process that it starts to hand its results back.

    It is for writing in the background; here the writer's caller waits. A process costs the first checkpoint seconds,
    and outlives a run that is killed.
    """
    names = ("get_write_results_queue", "_get_write_results_queue")  # of 0.19.2, of 0.16.1
    with contextlib.ExitStack() as stack:
        for name in names:
            if hasattr(filesystem_async, name):
                stack.enter_context(mock.patch.object(filesystem_async, name, queue.Queue))
        yield
