"""`megatron-pg check` against ways of breaking Megatron: each is seen, and named for what it is."""

from __future__ import annotations

import pytest

from tests.lanes import in_one_lane

from .break_check import problems_of_group
from .breakage import GROUPS
from .launch import run_ranks

pytestmark = in_one_lane

SOUND = {
    "PP2 DP2": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
    "DP2 average in collective": (2, "--average-in-collective"),
}
"""Shardings that are right, beside those of the groups, which are run unbroken too, and of test_check.py."""


@pytest.mark.parametrize("group", GROUPS)
def test_breakages_are_seen_and_named(group: str) -> None:
    processes, flags = GROUPS[group]
    ranks = run_ranks(problems_of_group, processes, ["--device", "cpu", *flags.split()], group)
    assert all(rank == ranks[0] for rank in ranks), "the ranks find different things"
    count, problems = ranks[0]
    assert count > 0 and problems == []


@pytest.mark.parametrize("sharding", SOUND)
def test_sound_shardings_pass(sharding: str) -> None:
    processes, flags = SOUND[sharding]
    ranks = run_ranks(problems_of_group, processes, ["--device", "cpu", *flags.split()], None)
    assert ranks[0] == (0, [])
