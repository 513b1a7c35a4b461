"""The launcher of these tests: results in rank order, the first error, and no hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.lanes import in_one_lane

from .launch import RankError, run_ranks

pytestmark = in_one_lane


def sum_of_ranks(offset: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def one_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def one_rank_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def one_rank_never_arrives() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def test_results_come_in_rank_order() -> None:
    assert run_ranks(sum_of_ranks, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def test_an_exception_in_one_rank_ends_all_with_its_message() -> None:
    with pytest.raises(RankError, match="only here"):
        run_ranks(one_rank_raises, 3)


def test_the_death_of_one_rank_ends_all() -> None:
    with pytest.raises(RankError, match="rank 1: the process died"):
        run_ranks(one_rank_dies, 2)


def test_ranks_that_hang_are_ended() -> None:
    """One sleeps, the other waits for it in gloo."""
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]: processes .* hang: 0.* in the last 5"):
        run_ranks(one_rank_never_arrives, 2, patience=5)
