"""Checkpoints that hold the whole state of a run, with the random state of every rank."""

from __future__ import annotations

import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_pg import Sample
from megatron_pg.rollout_files import RewardedSample, RolloutPosition
from megatron_pg.step import CollectorState

from .checkpoint_folder import NAME, PARTIAL, CheckpointFolder
from .errors import agreed, alone
from .model import Policy
from .model_checkpoint import load_model, save_model
from .training_step import SampleStream

RUN, MODEL = "run.pt", "model"
STORED_TYPES = (CollectorState, RewardedSample, RolloutPosition, Sample, frozenset)
"""What torch.load may build of a checkpoint beside tensors and plain values."""


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
        folder: where they are.
        identity: settings that a resumed run must share; compared by name when a checkpoint is read.
    """

    def __init__(self, folder: CheckpointFolder, identity: dict[str, Any]) -> None:
        self.folder, self.identity = folder, identity
        self._last: str | None = None  # the same on all ranks, whatever they see of a shared folder

    def save(self, progress: Progress, policy: Policy, stream: SampleStream) -> None:
        """Write a checkpoint, and remove all but the last few; every rank must call it.

        Raises:
            RunError: a rank cannot write its part. The checkpoints that are there stay.
        """
        name = NAME.format(progress.warm_start_step, progress.step)
        if name == self._last:
            return
        partial = self.folder.path / (PARTIAL + name)
        with agreed(f"{partial} cannot be written"):
            if dist.get_rank() == 0:
                (self.folder.begin(name) / MODEL).mkdir()
                run = {"identity": self.identity, "world_size": dist.get_world_size()}
                _write({**run, "progress": asdict(progress)}, partial / RUN)
        with agreed(f"{partial} cannot be written"):
            rank_state = {"random": _random_state(policy.device), "stream": stream.rank_state()}
            _write(rank_state, partial / _rank_name(dist.get_rank()))
        with alone(f"{partial} cannot be written"):
            save_model(partial / MODEL, policy, stream.reference)
        with agreed(f"{partial} cannot be completed"):
            if dist.get_rank() == 0:
                self.folder.complete(name)
        self._last = name

    def read(self, path: Path) -> Progress:
        """Where the run was; its state is put in place by `restore`.

        Raises:
            ValueError: the checkpoint is of a run with other settings.
        """
        state = _read(path / RUN)
        for name, value in self.identity.items():
            if state["identity"].get(name) != value:
                raise ValueError(
                    f"{path} was made with {name} {state['identity'].get(name)!r} and this run has {value!r}: a resumed "
                    "run repeats what the first would have done, so give the same, or start anew without --resume"
                )
        return Progress(**state["progress"])

    def restore(self, path: Path, policy: Policy, stream: SampleStream) -> None:
        """Put the models, the optimizer, the scheduler, the stream and the random state in place."""
        self._last = path.name
        load_model(path / MODEL, policy, stream.reference)
        ranks = [_read(path / _rank_name(rank)) for rank in range(_read(path / RUN)["world_size"])]
        stream.restore([rank["stream"] for rank in ranks])
        if len(ranks) == dist.get_world_size():
            _set_random_state(ranks[dist.get_rank()]["random"], policy.device)


def _random_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
        state["megatron"] = get_cuda_rng_tracker().get_states()
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])
        get_cuda_rng_tracker().set_states(state["megatron"])


def _rank_name(rank: int) -> str:
    return f"rank_{rank}.pt"


def _write(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Any:
    with torch.serialization.safe_globals(list(STORED_TYPES)):
        return torch.load(path, map_location="cpu")
