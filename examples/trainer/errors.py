"""Errors that the user can mend: said once, in one line, and the end of every rank."""

import contextlib
import sys
from collections.abc import Iterator

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pg.config.program import exit_refused
from megatron_pg.step.agreement import OtherRankError, gather

REMEDY = "pip install -r examples/trainer/requirements.txt"


class RunError(RuntimeError):
    """A run cannot begin or go on, for a reason that its user can mend; raised on all ranks."""


class RankError(RunError):
    """A `RunError` of one rank, while others may be waiting for it: it says so itself, and its end ends them."""


@contextlib.contextmanager
def mendable() -> Iterator[None]:
    """Make a refusal in the body, on all ranks alike, a `RunError`. A disk may fail on one node alone: a `RankError`."""
    try:
        yield
    except (ValueError, NotImplementedError, FileNotFoundError, OtherRankError) as error:
        raise RunError(str(error)) from error
    except OSError as error:
        raise RankError(str(error)) from error
    except ImportError as error:
        raise RunError(f"{error}: {REMEDY}") from error


@contextlib.contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Make an error of one rank in the body a `RunError` on all at its end, after `doing`: none waits for the failed one.

    Every rank must enter it, and the body must not wait for another rank (see `alone`).
    """
    mine = None
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        mine = _in_a_line(error)
    except ImportError as error:
        mine = f"{error}: {REMEDY}"
    for rank, message in enumerate(gather(mine, dist.group.WORLD)):
        if message is not None:
            raise RunError(f"{doing} (rank {rank}): {message}")


@contextlib.contextmanager
def alone(doing: str) -> Iterator[None]:
    """Make an error in the body a `RankError`: the ranks exchange something in it, so they cannot agree on it.

    Over gloo the others then find their connections closed; elsewhere the launcher ends them.
    """
    try:
        yield
    except RunError:
        raise
    except (OSError, RuntimeError, CheckpointException, CheckpointingException) as error:
        raise RankError(f"{doing} (rank {dist.get_rank()}): {_in_a_line(error)}") from error


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """End the process with the message of a `RunError`, said by one rank; any other error is a fault, and is traced."""
    try:
        yield
    except RankError as error:
        sys.exit(f"error: {error}")
    except RunError as error:
        exit_refused(f"error: {error}")


def _in_a_line(error: BaseException) -> str:
    """Give the last line of an error; of a distributed save, a traceback of many layers, that of the first rank's."""
    if isinstance(error, CheckpointException):
        cause, *_ = error.failures.values()
        return _in_a_line(cause[0] if isinstance(cause, tuple) else cause)
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
