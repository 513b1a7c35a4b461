"""Gathers over the data-parallel group: an error of one rank is an error on all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")
Shared = TypeVar("Shared")


def gather(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Gather a picklable value of every rank, in rank order; every rank of the group must call it.

    None is only this rank.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


class OtherRankError(RuntimeError):
    """Another rank raised an error that is no ValueError: the message names the rank, the kind and
    what it said.
    """


def compute_and_gather(
    compute: Callable[[], Value], share: Callable[[Value], Shared], group: dist.ProcessGroup | None
) -> tuple[Value, list[Shared]]:
    """Compute a value on this rank, and gather the picklable part of it that `share` returns from
    every rank, in rank order.

    Every rank of the group must call it. An error of `compute` or `share` travels in place of the
    value, so that no rank is left waiting in the collective: a file may be unreadable on one node
    alone.

    Raises:
        ValueError: another rank raised one, which the message names.
        OtherRankError: another rank raised an error of another kind.
        Exception: an error that was raised here, as it is.
    """
    mine: Shared | Exception
    try:
        value = compute()
        mine = share(value)
    except Exception as error:
        # The message of a ValueError is written for the user; others say little without their kind.
        other = OtherRankError(f"{type(error).__name__}: {error}")
        gather(ValueError(str(error)) if isinstance(error, ValueError) else other, group)
        raise
    shared = []
    for rank, part in enumerate(gather(mine, group)):
        if isinstance(part, Exception):
            raise type(part)(f"data-parallel rank {rank}: {part}")
        shared.append(part)
    return value, shared
