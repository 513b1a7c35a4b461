"""Checkpoints that are whole or absent, and hold the random state of every rank.

A checkpoint is written into a folder of another name, flushed to the disk, and renamed when every rank is done:
whatever kills the run, a folder named `step_...` is complete.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .generation import Sampler
from .model import Policy

KEPT = 2


@dataclass
class Progress:
    """Where a run is.

    Attributes:
        warm_start_step: supervised steps done.
        step: reinforcement-learning steps done, those without an active token included.
        seconds: time spent so far, over all starts.
        held_out_before: held-out score before reinforcement learning, once known.
    """

    warm_start_step: int = 0
    step: int = 0
    seconds: float = 0.0
    held_out_before: float | None = None


class Checkpoints:
    """The checkpoints of a run.

    Args:
        directory: their folder; need not exist.
        identity: settings that a resumed run must share; compared by name when a checkpoint is read.
    """

    def __init__(self, directory: Path, identity: dict[str, Any]) -> None:
        self.directory, self.identity = directory, identity

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        return max(self.directory.glob("step_*"), default=None)

    def save(
        self,
        progress: Progress,
        policy: Policy,
        sampler: Sampler,
        reference: nn.Module | None,
    ) -> None:
        """Write a checkpoint, and remove all but the last few; every rank must call it."""
        final = self.directory / f"step_{progress.warm_start_step:06d}_{progress.step:06d}"
        partial = self.directory / f"partial_{final.name}"
        if final.exists():
            return
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        if dist.get_rank(policy.groups.data_with_context) == 0:
            state = {
                "identity": self.identity,
                "progress": asdict(progress),
                "model": policy.model.state_dict(),
                "optimizer": policy.optimizer.state_dict(),
                "scheduler": policy.scheduler.state_dict(),
                "reference": None if reference is None else reference.state_dict(),
            }
            _write(state, partial / _shard_name(policy))
        _write(_random_state(sampler), partial / _rank_name())
        dist.barrier()
        if dist.get_rank() == 0:
            _flush_folder(partial)
            partial.rename(final)
            _flush_folder(self.directory)
            for old in sorted(self.directory.glob("step_*"))[:-KEPT]:
                shutil.rmtree(old)
            for abandoned in self.directory.glob("partial_*"):
                shutil.rmtree(abandoned)
        dist.barrier()

    def read(self, path: Path, policy: Policy) -> tuple[Progress, dict[str, Any]]:
        """This rank's state and where the run was; it is put in place by `restore`.

        Raises:
            ValueError: the checkpoint is of a run with other settings.
        """
        state = torch.load(path / _shard_name(policy), map_location=policy.device)
        for name, value in self.identity.items():
            if state["identity"].get(name) != value:
                raise ValueError(
                    f"{path} was made with {name} {state['identity'].get(name)!r} and this run has {value!r}: a resumed "
                    "run repeats what the first would have done, so give the same, or start anew without --resume"
                )
        return Progress(**state["progress"]), state

    def restore(
        self,
        path: Path,
        state: dict[str, Any],
        policy: Policy,
        sampler: Sampler,
        reference: nn.Module | None,
    ) -> None:
        """Put the models, the optimizer, the scheduler and this rank's random state in place."""
        if reference is not None:
            reference.load_state_dict(state["reference"])
        policy.model.load_state_dict(state["model"])
        policy.optimizer.load_state_dict(state["optimizer"])
        policy.optimizer.reload_model_params()
        policy.scheduler.load_state_dict(state["scheduler"])
        random_state = torch.load(path / _rank_name())
        random.setstate(random_state["python"])
        torch.set_rng_state(random_state["torch"])
        sampler.generator.set_state(random_state["sampler"])
        if policy.device.type == "cuda":
            torch.cuda.set_rng_state(random_state["cuda"])


def _random_state(sampler: Sampler) -> dict[str, Any]:
    state = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "sampler": sampler.generator.get_state(),
    }
    if sampler.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _shard_name(policy: Policy) -> str:
    return f"model_tensor_parallel_{policy.groups.tensor_rank}.pt"


def _rank_name() -> str:
    return f"random_state_rank_{dist.get_rank()}.pt"


def _write(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
