"""The launcher of these tests: results in rank order, the first error, and no hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from .launch import RankError, run_ranks


def sum_of_ranks(offset: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def rank_1_fails(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("only here")
        if how == "dies":
            os._exit(3)
        time.sleep(600)
    dist.barrier()


def test_results_come_in_rank_order() -> None:
    assert run_ranks(sum_of_ranks, 3, 10) == [(0, 33), (1, 33), (2, 33)]


@pytest.mark.parametrize(
    ("how", "words"), [("raises", "only here"), ("dies", "rank 1: the process died")]
)
def test_the_end_of_one_rank_ends_all_with_its_message(how, words) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(rank_1_fails, 3, how)


def test_ranks_that_hang_are_ended() -> None:
    """One sleeps, the other waits for it in gloo."""
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]: processes .* hang: 0.* in the last 5"):
        run_ranks(rank_1_fails, 2, "hangs", patience=5)
