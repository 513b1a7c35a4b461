"""The one exchange behind a trainer's divisors: over two data-parallel ranks as on one, and errors
on both.
"""

from typing import Any

import torch.distributed as dist

from megatron_pg.integrations.rollout_mask_sums import Rollout, rollout_mask_sums
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.step.totals import BareSample

from .launch import refusal, run_ranks

NUM_STEPS = 2


def samples_of(step: int) -> list[BareSample]:
    """Two groups of four rollouts, of which one is three samples; the ranks hold every other
    sample.
    """
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


def sums_of(aggregation: str, rollout: Any, divisor: float = 6.0) -> Any:
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    named = {"trainer": "slime", "data_parallel_group": group}
    is_constant = aggregation == "constant"

    def with_divisor() -> Rollout:
        return rollout()._replace(divisor=divisor if is_constant else None)

    return rollout_mask_sums(AGGREGATIONS[aggregation], with_divisor, **named)


def divisors() -> dict[str, list[list[float]]]:
    """What a rank gets under every aggregation; where it stands alone, for all samples."""
    rollout = rollout_of(dist.get_rank(), dist.get_world_size())
    sums = {name: sums_of(name, lambda: rollout) for name in AGGREGATIONS}
    return {name: [sums[name][list(step)].tolist() for step in rollout.steps] for name in sums}


def messages() -> list[str]:
    """Of an error that one rank alone meets, and of a group whose samples lie on both ranks and
    meet the clamp.
    """

    def broken() -> Rollout:
        if dist.get_rank() == 1:
            raise ValueError("sample 3 has no group")
        return rollout_of(0, 2)

    few = [BareSample(int(dist.get_rank() == 0), 5, dist.get_rank()), BareSample(9, 6, 9)]
    few = few[: 1 + dist.get_rank()]
    rollouts = (broken, lambda: Rollout(few, [range(len(few))], [6]))
    found = [refusal(ValueError, sums_of, "prompt_mean", rollout) for rollout in rollouts]
    own = 6.0 + dist.get_rank()
    return [*found, refusal(ValueError, sums_of, "constant", lambda: rollout_of(0, 2), own)]


def test_two_ranks_divide_as_one() -> None:
    (alone,) = run_ranks(divisors, 1)
    first, second = run_ranks(divisors, 2)
    for aggregation in AGGREGATIONS:
        for step in range(NUM_STEPS):
            whole = [0.0] * len(samples_of(step))
            whole[0::2], whole[1::2] = first[aggregation][step], second[aggregation][step]
            assert whole == alone[aggregation][step]
    # In plain loops, one group and one step: G P / N.
    group = [sample for sample in samples_of(1) if sample.group_index == 10]
    assert alone["prompt_mean"][1][0] == sum(s.num_active_tokens for s in group) * 2 / 8


def test_an_error_of_one_rank_is_raised_on_both() -> None:
    (told, clamp, divisors), (own, same_clamp, same_divisors) = run_ranks(messages, 2)
    assert divisors == same_divisors
    assert divisors == "constant: the ranks have different divisors, [6.0, 7.0]"
    assert (told, own) == ("data-parallel rank 1: sample 3 has no group", "sample 3 has no group")
    assert clamp == same_clamp and clamp.startswith("prompt_mean: prompt group 5 has 1 active tok")
