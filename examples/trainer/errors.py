"""Errors that the user can mend: said once, in one line, and the end of every rank."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pg.step.agreement import OtherRankError, gather

KINDS = (ValueError, NotImplementedError, OSError, ImportError, OtherRankError)


class RunError(RuntimeError):
    """A run cannot begin or go on, for a reason that its user can mend."""


@contextlib.contextmanager
def mendable() -> Iterator[None]:
    """Make a refusal in the body a `RunError`."""
    try:
        yield
    except KINDS as error:
        missing = isinstance(error, ImportError)
        remedy = ": pip install -r examples/requirements.txt" if missing else ""
        raise RunError(f"{error}{remedy}") from error


@contextlib.contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Make an error of one rank in the body a `RunError` on all at its end: none waits for it.

    Every rank must enter it, and the body must not wait for another rank (see `alone`).
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
    """Make an error in the body, where ranks wait for each other, a `RunError` of this rank.

    Over gloo the others then find their connections closed; elsewhere the launcher ends them.
    """
    try:
        yield
    except RunError:
        raise
    except (OSError, RuntimeError, CheckpointException, CheckpointingException) as error:
        raise RunError(f"{doing} (rank {dist.get_rank()}): {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    """Give the last line of an error; of a distributed save, that of the first rank's."""
    if isinstance(error, CheckpointException):
        cause, *_ = error.failures.values()
        return _last_line(cause[0] if isinstance(cause, tuple) else cause)
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
