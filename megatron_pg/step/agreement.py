"""Gathers over the data-parallel group. An error on one rank is raised on all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")
Shared = TypeVar("Shared")


def gather(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Gather every rank's picklable value, in rank order. Every rank of the group must call it.

    With `group` None the only rank is this one.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


class OtherRankError(RuntimeError):
    """Error for an exception on a different rank, except ValueError. The message names the rank,
    the type and the text.
    """


def compute_and_gather(
    compute: Callable[[], Value], share: Callable[[Value], Shared], group: dist.ProcessGroup | None
) -> tuple[Value, list[Shared]]:
    """Compute a value on this rank, and gather its picklable part `share(value)` from every rank,
    in rank order.

    Every rank of the group must call it. If `compute` or `share` raises, the error is sent instead
    of the value, so that no rank waits in the collective: a file may be unreadable on only one
    node.

    Raises:
        ValueError: a different rank, named in the message, raised a ValueError.
        OtherRankError: a different rank raised any other error.
        Exception: the error raised on this rank, unchanged.
    """
    mine: Shared | Exception
    try:
        value = compute()
        mine = share(value)
    except Exception as error:
        # A ValueError's message is enough for the user. Other messages need the error's type.
        other = OtherRankError(f"{type(error).__name__}: {error}")
        gather(ValueError(str(error)) if isinstance(error, ValueError) else other, group)
        raise
    shared = []
    for rank, part in enumerate(gather(mine, group)):
        if isinstance(part, Exception):
            raise type(part)(f"data-parallel rank {rank}: {part}")
        shared.append(part)
    return value, shared
