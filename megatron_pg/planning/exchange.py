"""One exchange over the data-parallel group in which an error of one rank is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_pg.aggregation import gather

Value = TypeVar("Value")
Shared = TypeVar("Shared")


def compute_and_gather(
    compute: Callable[[], Value],
    share: Callable[[Value], Shared],
    group: dist.ProcessGroup | None,
) -> tuple[Value, list[Shared]]:
    """This rank's ``compute()``, and ``share()`` of it from every rank, in rank order.

    Every rank of the group must call it. A ValueError of ``compute`` travels in place of the value, so that no rank is
    left waiting in the collective.

    Args:
        compute: gives this rank's value.
        share: gives the picklable part of it that the other ranks need.
        group: the data-parallel group; None is this rank alone.

    Raises:
        ValueError: ``compute`` raised one, here or on another rank, which the message then names.
    """
    try:
        value = compute()
    except ValueError as error:
        gather((None, str(error)), group)
        raise
    everyone = gather((share(value), ""), group)
    shared = []
    for rank, (part, message) in enumerate(everyone):
        if part is None:
            raise ValueError(f"data-parallel rank {rank}: {message}")
        shared.append(part)
    return value, shared
