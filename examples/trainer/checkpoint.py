"""The frame of Megatron's checkpoints in which a run loses nothing wherever it is killed.

Megatron writes a checkpoint into a folder of its own and then names it in the tracker file. The
place in the rollouts travels in the arguments that Megatron stores with every checkpoint, so it is
whole or absent with the rest.
"""

import contextlib
import queue
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from filelock import FileLock, Timeout
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import checkpointing

from .arguments import refuse_other_settings
from .errors import RunError, agreed, alone, mendable
from .log import replace_text

LOCK_PATIENCE = 5.0
HAVE_ADAM = any(map(find_spec, ("transformer_engine", "apex")))
"""There is another Adam than torch's."""
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file that names the last checkpoint."""


def claim_save_folder(args: Namespace) -> FileLock | None:
    """Keep other runs out of `--save` while the lock lives; every rank must call it."""
    with agreed("--save"):
        if not args.save or args.rank > 0:
            return None
        folder = Path(args.save)
        folder.mkdir(parents=True, exist_ok=True)
        # The processes of a killed run may still be ending, and hold its lock.
        lock = FileLock(folder / "lock", timeout=LOCK_PATIENCE)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"another run is writing to {folder}: give another folder") from None
        _mend_tracker(folder)
        goes_on = args.load and Path(args.load).resolve() == folder.resolve() and not args.finetune
        if (folder / TRACKER).exists() and not goes_on:
            found = f"{folder} holds the checkpoints of another run"
            raise ValueError(f"{found}: go on with it (--load {folder}), or give another folder")
        return lock


def _mend_tracker(folder: Path) -> None:
    """Let the tracker file name a whole checkpoint: Megatron writes it in place, and a run that is
    killed leaves it empty.
    """
    tracker = folder / TRACKER
    named = tracker.read_text().strip() if tracker.exists() else "release"
    paths = folder.glob("iter_*/metadata.json")  # of a checkpoint, Megatron writes it last
    whole = sorted(int(path.parent.name.removeprefix("iter_")) for path in paths)
    if named and (not named.isdigit() or int(named) in whole):
        return
    if whole:
        replace_text(tracker, str(whole[-1]))
    elif not named:
        tracker.unlink()


def restore_rollouts(args: Namespace, rollouts: Any) -> float | None:
    """Give the rollouts the place of the checkpoint that the run goes on from, if any; every rank
    must call it.

    Returns the coefficient of the KL term that the run had reached, None where there is none. A
    RunError says that the checkpoint cannot be read, or is of another program or other settings.
    """
    if args.finetune or not checkpointing.checkpoint_exists(args.load):
        return None
    path = checkpointing.get_load_checkpoint_path_by_args(args)
    with alone(f"{path} cannot be read"):
        stored = dist_checkpointing.load_common_state_dict(path).get("args")
    with mendable():
        if not hasattr(stored, "rollout_state"):
            raise ValueError(
                "--load: the checkpoint is of another program and has no place in the rollouts; "
                "give --finetune to begin with its weights"
            )
        if args.use_distributed_optimizer and not HAVE_ADAM:
            raise ValueError(
                "--use-distributed-optimizer: Megatron (0.19.2) cannot load the moments of torch's "
                "Adam; install Transformer Engine, or drop the flag"
            )
        refuse_other_settings(args, stored)
        rollouts.restore(stored.rollout_state)
    return getattr(stored, "current_kl_loss_coef", None)


@contextlib.contextmanager
def saving(args: Namespace, state: Any, log: Any, iteration: int, optimizer: Any) -> Iterator[None]:
    """Have Megatron's `save_checkpoint` in the body store the place in the rollouts too, on every
    rank.
    """
    path = Path(args.save, f"iter_{iteration:07d}")
    with agreed(f"{path} cannot be written"):
        log.flush()  # a checkpoint must not be ahead of the metrics
        if args.rank == 0 and path.exists():
            shutil.rmtree(path)  # what a killed run has left half-written
    args.rollout_state = state
    _begin_moments(optimizer)
    # Megatron's writer starts a process, in seconds, to hand its results back to a waiting caller.
    name = "get_write_results_queue"
    make_queue = getattr(filesystem_async, name) if args.async_save else queue.Queue
    with alone(f"{path} cannot be written"), mock.patch.object(filesystem_async, name, make_queue):
        yield


def loading(load: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """Megatron's `load_checkpoint`, for the optimizers of torch too; every rank must call it."""

    def load_all(model: Any, optimizer: Any, *rest: Any, **named: Any) -> tuple[int, int]:
        _begin_moments(optimizer)
        with alone("--load cannot be read"):
            try:
                return load(model, optimizer, *rest, **named)
            except AssertionError as error:  # of a comparison, the same on all ranks
                told = "--override-opt-param-scheduler takes the schedules of this run"
                raise RunError(f"--load: {error} ({told})") from error

    return load_all


def _begin_moments(optimizer: Any) -> None:
    """Give torch's Adam, which Megatron takes where neither Transformer Engine nor Apex is there,
    the zeros that its first step would begin with: loading asks for moments.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam):
            if not part.optimizer.state and part.init_state_fn:
                part.init_state_fn(part.optimizer, part.config)
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros(()))
