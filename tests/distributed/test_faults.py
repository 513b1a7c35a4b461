"""A rank of four has no samples or raises: all ranks get the same totals, or the same error at
once.
"""

from typing import Any

import pytest
import torch.distributed as dist

from megatron_pg import Sample, plan_step

from .launch import run_ranks

TOLD = {
    # Four samples on each rank, of one prompt.
    "has no samples": "N = 12, P = 3, T = 12",
    "has a long sample": "ValueError: data-parallel rank 2: the long sample takes 65 tokens",
    "has a bad id": "OtherRankError: data-parallel rank 2: AttributeError: ",
}


def told(case: str) -> str:
    """Return what this rank is told when rank 2 has the fault."""
    rank = dist.get_rank()
    samples = [Sample([rank, i], 1, [1], 1.0, group_index=rank) for i in range(4)]
    if rank == 2 and case == "has no samples":
        samples = []
    elif rank == 2 and case == "has a long sample":
        samples[1] = Sample([0] * 65, 1, [1], name="the long sample")
    elif rank == 2:
        vars(samples[1])["id_source"] = 7
    group: Any = dist.group.WORLD
    try:
        totals = plan_step(samples, max_tokens_per_microbatch=64, data_parallel_group=group).totals
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    counts = totals.num_rollouts, totals.num_prompt_groups, totals.num_active_tokens
    return "N = {}, P = {}, T = {}".format(*counts)


@pytest.mark.parametrize("case", TOLD)
def test_all_ranks_are_told(case: str) -> None:
    ranks = run_ranks(told, 4, case)
    faulty = ranks.pop(2)
    assert ranks[0].startswith(TOLD[case]) and len(set(ranks)) == 1
    if case == "has no samples":
        assert faulty == ranks[0]
    else:
        assert faulty.split(": ", 1)[1] in ranks[0]
