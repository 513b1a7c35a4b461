"""The one exchange behind a trainer's divisors: over two data-parallel ranks as on one, and errors on both."""

from __future__ import annotations

import torch.distributed as dist

from megatron_pg.integrations.rollout_mask_sums import Rollout, rollout_mask_sums
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.step.totals import BareSample
from tests import oracle

from .launch import run_ranks

NUM_STEPS = 2


def samples_of(step: int) -> list[BareSample]:
    """Two groups of four rollouts, of which one is three samples; the ranks hold every other sample."""
    rollouts = [0, 1, 1, 1, 2, 3, 4, 5, 6, 7]
    return [
        BareSample(
            (5 * n + step) % 7, 10 * step + rollout // 4, 100 * step + rollout, f"sample {n}"
        )
        for n, rollout in enumerate(rollouts)
    ]


def rollout_of(rank: int, ranks: int) -> Rollout:
    """The samples of the second step come first."""
    late, early = (samples_of(step)[rank::ranks] for step in range(NUM_STEPS))
    count = len(early)
    steps = [range(count, count + len(late)), range(count)]
    return Rollout([*early, *late], steps, [8] * NUM_STEPS)


def divisors(aggregation: str) -> list[list[float]]:
    """What a rank gets; where it stands alone, for all samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rollout = rollout_of(rank, ranks)
    sums = rollout_mask_sums(
        AGGREGATIONS[aggregation],
        6.0 if aggregation == "constant" else None,
        lambda: rollout,
        trainer="slime",
        data_parallel_group=dist.group.WORLD if ranks > 1 else None,
    )
    return [sums[list(step)].tolist() for step in rollout.steps]


def all_aggregations() -> dict[str, list[list[float]]]:
    return {aggregation: divisors(aggregation) for aggregation in oracle.AGGREGATIONS}


def what_is_raised() -> list[str]:
    """Of an error that one rank alone meets, and of a group whose samples lie on both ranks and meet the clamp."""

    def broken() -> Rollout:
        if dist.get_rank() == 1:
            raise ValueError("sample 3 has no group")
        return rollout_of(0, 2)

    few = [BareSample(int(dist.get_rank() == 0), 5, dist.get_rank()), BareSample(9, 6, 9)]
    few = few[: 1 + dist.get_rank()]
    raised = []
    for rollout in (broken, lambda: Rollout(few, [range(len(few))], [6])):
        try:
            rollout_mask_sums(
                AGGREGATIONS["prompt_mean"],
                None,
                rollout,
                trainer="slime",
                data_parallel_group=dist.group.WORLD,
            )
        except ValueError as error:
            raised.append(str(error))
    return raised


def test_two_ranks_divide_as_one() -> None:
    (alone,) = run_ranks(all_aggregations, 1)
    first, second = run_ranks(all_aggregations, 2)
    for aggregation in oracle.AGGREGATIONS:
        for step in range(NUM_STEPS):
            whole = [0.0] * len(samples_of(step))
            whole[0::2], whole[1::2] = first[aggregation][step], second[aggregation][step]
            assert whole == alone[aggregation][step]
    # In plain loops, one group and one step: G P / N.
    group = [sample for sample in samples_of(1) if sample.group_index == 10]
    assert alone["prompt_mean"][1][0] == sum(s.num_active_tokens for s in group) * 2 / 8


def test_an_error_of_one_rank_is_raised_on_both() -> None:
    mine, theirs = run_ranks(what_is_raised, 2)
    assert mine[0] == "data-parallel rank 1: sample 3 has no group"
    assert theirs[0] == "sample 3 has no group"
    assert mine[1] == theirs[1] and mine[1].startswith(
        "prompt_mean: prompt group 5 has 1 active tokens"
    )
