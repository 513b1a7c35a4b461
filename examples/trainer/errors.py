"""Errors that the user can mend: said once, in one line, and the end of every rank."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pg.step.agreement import OtherRankError, gather

REMEDY = "pip install -r examples/requirements.txt"


class RunError(RuntimeError):
    """A run cannot begin or go on, for a reason that its user can mend; raised on all ranks, or
    where others may wait.
    """


@contextlib.contextmanager
def mendable() -> Iterator[None]:
    """Make a refusal in the body a `RunError`."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError, OtherRankError) as error:
        raise RunError(str(error)) from error
    except ImportError as error:
        raise RunError(_in_a_line(error)) from error


@contextlib.contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Make an error of one rank in the body a `RunError` on all at its end, after `doing`: none
    waits for the failed one.

    Every rank must enter it, and the body must not wait for another rank (see `alone`).
    """
    mine = None
    try:
        yield
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        mine = _in_a_line(error)
    for rank, message in enumerate(gather(mine, dist.group.WORLD)):
        if message is not None:
            raise RunError(f"{doing} (rank {rank}): {message}")


@contextlib.contextmanager
def alone(doing: str) -> Iterator[None]:
    """Make an error in the body a `RunError` of this rank: the ranks exchange something in it, so
    they cannot agree on it.

    Over gloo the others then find their connections closed; elsewhere the launcher ends them.
    """
    try:
        yield
    except RunError:
        raise
    except (OSError, RuntimeError, CheckpointException, CheckpointingException) as error:
        raise RunError(f"{doing} (rank {dist.get_rank()}): {_in_a_line(error)}") from error


def _in_a_line(error: BaseException) -> str:
    """Give the last line of an error; of a distributed save, a traceback of many layers, that of
    the first rank's.
    """
    if isinstance(error, CheckpointException):
        cause, *_ = error.failures.values()
        return _in_a_line(cause[0] if isinstance(cause, tuple) else cause)
    if isinstance(error, ImportError):
        return f"{error}: {REMEDY}"
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
