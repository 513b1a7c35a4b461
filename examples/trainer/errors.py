"""Errors that the user can fix. They are printed once, in one line, and end every rank."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pg.step.agreement import OtherRankError, gather

KINDS = (ValueError, NotImplementedError, OSError, ImportError, OtherRankError)


class RunError(RuntimeError):
    """A run cannot start or continue, for a reason that the user can fix."""


@contextlib.contextmanager
def fixable() -> Iterator[None]:
    """Convert an error in the body to a `RunError`."""
    try:
        yield
    except KINDS as error:
        missing = isinstance(error, ImportError)
        remedy = ": pip install -r examples/requirements.txt" if missing else ""
        raise RunError(f"{error}{remedy}") from error


@contextlib.contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Convert an error of one rank in the body to a `RunError` on all ranks at its end, so that no
    rank waits for it.

    Every rank must enter it, and the body must not wait for other ranks (see `alone`).
    """
    mine = None
    try:
        yield
    except (RuntimeError, *KINDS) as error:
        mine = _last_line(error)
    for rank, message in enumerate(gather(mine, dist.group.WORLD)):
        if message is not None:
            raise RunError(f"{doing} (rank {rank}): {message}")


@contextlib.contextmanager
def alone(doing: str) -> Iterator[None]:
    """Convert an error in the body, where ranks wait for each other, to this rank's `RunError`.

    With gloo, the other ranks then find their connections closed. Otherwise the launcher ends them.
    """
    try:
        yield
    except RunError:
        raise
    except (OSError, RuntimeError, CheckpointException, CheckpointingException) as error:
        raise RunError(f"{doing} (rank {dist.get_rank()}): {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    """Return the last line of an error. For a distributed save, it is the first rank's error."""
    if isinstance(error, CheckpointException):
        cause, *_ = error.failures.values()
        return _last_line(cause[0] if isinstance(cause, tuple) else cause)
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
