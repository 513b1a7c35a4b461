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
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_pg import Sample
from megatron_pg.rollout_files import RewardedSample, RolloutPosition
from megatron_pg.step import CollectorState

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
        directory: their folder; need not exist.
        identity: settings that a resumed run must share; compared by name when a checkpoint is read.
        num_kept: older checkpoints are removed once a new one is whole.
    """

    def __init__(self, directory: Path, identity: dict[str, Any], num_kept: int) -> None:
        self.directory, self.identity, self._num_kept = directory, identity, num_kept

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        return max(self.directory.glob("step_*"), default=None)

    def save(self, progress: Progress, policy: Policy, stream: SampleStream) -> None:
        """Write a checkpoint, and remove all but the last few; every rank must call it.

        Raises:
            RunError: a rank cannot write its part. The checkpoints that are there stay.
        """
        final = self.directory / f"step_{progress.warm_start_step:06d}_{progress.step:06d}"
        partial = self.directory / f"partial_{final.name}"
        if final.exists():
            return
        with agreed(f"{partial} cannot be written"):
            if dist.get_rank() == 0:
                self._remove_partial()
                (partial / MODEL).mkdir(parents=True)
                run = {"identity": self.identity, "world_size": dist.get_world_size()}
                _write({**run, "progress": asdict(progress)}, partial / RUN)
        with agreed(f"{partial} cannot be written"):
            rank_state = {"random": _random_state(policy.device), "stream": stream.rank_state()}
            _write(rank_state, partial / _rank_name(dist.get_rank()))
        with alone(f"{partial} cannot be written"):
            save_model(partial / MODEL, policy, stream.reference)
        with agreed(f"{partial} cannot be completed"):
            if dist.get_rank() == 0:
                _flush_all(partial)
                partial.rename(final)
                _flush(self.directory)
                for old in sorted(self.directory.glob("step_*"))[: -self._num_kept]:
                    shutil.rmtree(old)

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
        load_model(path / MODEL, policy, stream.reference)
        ranks = [_read(path / _rank_name(rank)) for rank in range(_read(path / RUN)["world_size"])]
        stream.restore([rank["stream"] for rank in ranks])
        if len(ranks) == dist.get_world_size():
            _set_random_state(ranks[dist.get_rank()]["random"], policy.device)

    def _remove_partial(self) -> None:
        """What a killed run has left half-written, or a full disk."""
        for abandoned in self.directory.glob("partial_*"):
            shutil.rmtree(abandoned)


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


def _flush_all(folder: Path) -> None:
    """Everything in the folder, then the folder: Megatron's writer flushes its tensors alone."""
    for path in folder.iterdir():
        if path.is_dir():
            _flush_all(path)
        else:
            _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
