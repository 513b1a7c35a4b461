"""Exchanges over the data-parallel group: an error of one rank is an error on all, and rows travel once."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_pg.step.absent import naming_absent_ranks

Value = TypeVar("Value")
Shared = TypeVar("Shared")


def gather(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Gather a picklable value of every rank, in rank order; every rank of the group must call it. None: this rank alone.

    Raises:
        AbsentRankError: a rank did not come until the group's timeout, or has ended.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with naming_absent_ranks(group):
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def is_on_host(group: dist.ProcessGroup) -> bool:
    """Tell whether the group exchanges tensors of the host, as that of gloo does and that of NCCL does not."""
    # A wrapper of a trainer's own, as slime's, answers to `get_backend` alone.
    return "nccl" not in str(dist.get_backend(group))


def gather_rows(
    mine: NDArray[Any], sizes: Sequence[int], group: dist.ProcessGroup | None
) -> NDArray[Any]:
    """Gather rows of a dtype of whole 8 bytes from every rank, in rank order; `sizes` are the rows of each, known to all.

    Every rank of the group must call it. A gather pads every rank to the longest, and an all-reduce of all rows, where each
    rank has put its own, moves them twice: the cheaper of the two. What is moved grows with the rows and not with ranks.
    """
    if group is None or dist.get_world_size(group) == 1 or not any(sizes):
        return mine
    rank, longest, total = dist.get_rank(group), max(sizes), sum(sizes)
    is_even = len(sizes) * longest <= 2 * total
    device = "cpu" if is_on_host(group) else "cuda"
    words = mine.dtype.itemsize // 8
    start = 0 if is_even else sum(sizes[:rank])
    rows = np.zeros((longest if is_even else total, words), dtype=np.int64)
    rows[start : start + len(mine)] = mine.view(np.int64).reshape(-1, words)
    table = torch.from_numpy(rows).to(device)
    if is_even:
        padded = table.new_empty(len(sizes) * longest, words)
        with naming_absent_ranks(group):
            dist.all_gather_into_tensor(padded, table, group=group)
        is_row = np.arange(longest) < np.array(sizes)[:, None]
        table = padded.cpu()[torch.from_numpy(is_row.flatten())]
    else:
        # Other ranks have zeros there, so that the sum is exact whatever the bits stand for.
        with naming_absent_ranks(group):
            dist.all_reduce(table, group=group)
    return table.cpu().numpy().reshape(-1).view(mine.dtype)


def deal(parts: Sequence[bytes], group: dist.ProcessGroup) -> list[bytes]:
    """Send each rank of the group its part, and return those that every rank has sent to this one, in rank order.

    Every rank of the group must call it. Only what a rank sends and receives moves.
    """
    device = "cpu" if is_on_host(group) else "cuda"

    def exchanged(sent: Tensor, counts: list[int], of_others: list[int]) -> Tensor:
        received = sent.new_empty(sum(of_others), device=device)
        with naming_absent_ranks(group):
            dist.all_to_all_single(received, sent.to(device), of_others, counts, group=group)
        return received.cpu()

    sizes, ones = list(map(len, parts)), [1] * len(parts)
    of_others = exchanged(torch.from_numpy(np.array(sizes)), ones, ones).tolist()
    sent = torch.from_numpy(np.frombuffer(bytearray(b"".join(parts)), dtype=np.uint8))
    received = exchanged(sent, sizes, of_others).numpy()
    return [part.tobytes() for part in np.split(received, np.cumsum(of_others)[:-1])]


class OtherRankError(RuntimeError):
    """Another rank raised an error that is no ValueError: the message names the rank, the kind and what it said."""


def compute_and_gather(
    compute: Callable[[], Value],
    share: Callable[[Value], Shared],
    group: dist.ProcessGroup | None,
    label: str = "data-parallel rank",
) -> tuple[Value, list[Shared]]:
    """Compute a value on this rank, and gather the picklable part of it that `share` returns from every rank, in rank order.

    Every rank of the group must call it. An error of `compute` or `share` travels in place of the value, so that no rank is
    left waiting in the collective: a file may be unreadable on one node alone. `label` says what the ranks of the group are.

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
            raise type(part)(f"{label} {rank}: {part}")
        shared.append(part)
    return value, shared
