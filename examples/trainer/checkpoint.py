"""Megatron's checkpoints, extended so that a run can be killed at any time without loss.

Megatron writes a checkpoint to a new folder and then names it in the tracker file. The position in
the rollouts is saved in the arguments that Megatron stores with every checkpoint, so it is complete
exactly if the checkpoint is.
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
from .errors import RunError, agreed, alone, fixable
from .log import replace_text

LOCK_PATIENCE = 5.0
HAVE_ADAM = any(map(find_spec, ("transformer_engine", "apex")))
"""Whether there is an Adam other than torch's."""
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file with the last checkpoint's step."""


def claim_save_folder(args: Namespace) -> FileLock | None:
    """Lock `--save` against other runs while the lock exists. Every rank must call it."""
    with agreed("--save"):
        if not args.save or args.rank > 0:
            return None
        folder = Path(args.save)
        folder.mkdir(parents=True, exist_ok=True)
        # A killed run's processes may still be ending and hold its lock.
        lock = FileLock(folder / "lock", timeout=LOCK_PATIENCE)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"a different run is writing to {folder}: choose a different folder"
            ) from None
        _mend_tracker(folder)
        goes_on = args.load and Path(args.load).resolve() == folder.resolve() and not args.finetune
        if (folder / TRACKER).exists() and not goes_on:
            found = f"{folder} has checkpoints of a different run"
            raise ValueError(f"{found}: resume it (--load {folder}), or choose a different folder")
        return lock


def _mend_tracker(folder: Path) -> None:
    """Make the tracker file name a complete checkpoint. Megatron writes it in place, so a killed
    run may leave it empty.
    """
    tracker = folder / TRACKER
    named = tracker.read_text().strip() if tracker.exists() else "release"
    paths = folder.glob("iter_*/metadata.json")  # Megatron's last file of a checkpoint
    whole = sorted(int(path.parent.name.removeprefix("iter_")) for path in paths)
    if named and (not named.isdigit() or int(named) in whole):
        return
    if whole:
        replace_text(tracker, str(whole[-1]))
    elif not named:
        tracker.unlink()


def restore_rollouts(args: Namespace, rollouts: Any) -> float | None:
    """Restore the rollouts' position from the checkpoint that the run resumes, if any. Every rank
    must call it.

    Returns the checkpoint's KL coefficient, None without one. Raises RunError if the checkpoint
    cannot be read, or comes from a different program or different settings.
    """
    if args.finetune or not checkpointing.checkpoint_exists(args.load):
        return None
    path = checkpointing.get_load_checkpoint_path_by_args(args)
    with alone(f"{path} cannot be read"):
        stored = dist_checkpointing.load_common_state_dict(path).get("args")
    with fixable():
        if not hasattr(stored, "rollout_state"):
            raise ValueError(
                "--load: the checkpoint comes from a different program and has no position in the "
                "rollouts. Give --finetune to start with its weights"
            )
        if args.use_distributed_optimizer and not HAVE_ADAM:
            raise ValueError(
                "--use-distributed-optimizer: Megatron (0.19.2) cannot load the moments of torch's "
                "Adam. Install Transformer Engine, or drop the flag"
            )
        refuse_other_settings(args, stored)
        rollouts.restore(stored.rollout_state)
    return getattr(stored, "current_kl_loss_coef", None)


@contextlib.contextmanager
def saving(args: Namespace, state: Any, log: Any, iteration: int, optimizer: Any) -> Iterator[None]:
    """Let Megatron's `save_checkpoint` in the body also store the position in the rollouts. Every
    rank enters it.
    """
    path = Path(args.save, f"iter_{iteration:07d}")
    with agreed(f"{path} cannot be written"):
        log.flush()  # a checkpoint must not be ahead of the metrics
        if args.rank == 0 and path.exists():
            shutil.rmtree(path)  # a killed run's incomplete checkpoint
    args.rollout_state = state
    _begin_moments(optimizer)
    # Megatron's writer would take seconds to start a process that returns its results to a waiting
    # caller.
    name = "get_write_results_queue"
    make_queue = getattr(filesystem_async, name) if args.async_save else queue.Queue
    with alone(f"{path} cannot be written"), mock.patch.object(filesystem_async, name, make_queue):
        yield


def loading(load: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """Return a `load_checkpoint` that also supports torch's optimizers. Every rank must call it."""

    def load_all(model: Any, optimizer: Any, *rest: Any, **named: Any) -> tuple[int, int]:
        _begin_moments(optimizer)
        with alone("--load cannot be read"):
            try:
                return load(model, optimizer, *rest, **named)
            except AssertionError as error:  # a failed comparison, the same on all ranks
                told = "to use this run's schedules, add --override-opt-param-scheduler"
                raise RunError(f"--load: {error} ({told})") from error

    return load_all


def _begin_moments(optimizer: Any) -> None:
    """Initialize the moments of torch's Adam with zeros, because loading needs them. Megatron uses
    torch's Adam if neither Transformer Engine nor Apex is installed.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam):
            if not part.optimizer.state and part.init_state_fn:
                part.init_state_fn(part.optimizer, part.config)
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros(()))
