"""Totals of a step, and worked numbers of the four aggregations."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from megatron_pg import AGGREGATIONS, Sample, StepTotals, padded_totals, whiten
from tests import oracle
from tests.cut_steps import Package, whole
from tests.distributed.launch import run_ranks
from tests.fast.refusals import assert_refused
from tests.random_steps import (
    package_sample,
    package_samples,
    plain_sample,
    random_step,
    uneven_totals,
)


def constant_losses(*samples: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(losses, dtype=torch.float64, requires_grad=True) for losses in samples]


WORKED_STEP = [
    plain_sample([1, 1], group=7),
    plain_sample([1, 1, 1, 1], group=7),
    plain_sample([1], group=8),
    plain_sample([1, 1, 1], group=8),
]
WORKED_VALUES = {"sample_mean": 8.75, "prompt_mean": 7.625, "token_mean": 6.8, "constant": 4.25}


@pytest.mark.parametrize("aggregation", WORKED_VALUES)
def test_worked_numbers(aggregation):
    """[(1,2), (3,4,5,6)], [(20), (8,9,10)], groups in brackets; constant with L = 4."""
    losses = constant_losses([1, 2], [3, 4, 5, 6], [20], [8, 9, 10])
    found = Package().objective(WORKED_STEP, losses, whole(4), aggregation)
    assert found.item() == pytest.approx(WORKED_VALUES[aggregation], abs=1e-12)
    of_oracle = oracle.aggregate(WORKED_STEP, losses, aggregation, 4.0)
    assert of_oracle.item() == WORKED_VALUES[aggregation]


COUNTED_STEP = [
    plain_sample([1, 1, 0], group=10),
    plain_sample([1], group=10, rollout=100),
    plain_sample([1, 1], group=10, rollout=100),
    plain_sample([0, 0], group=11),
    plain_sample([0], group=11, rollout=101),
    plain_sample([], group=12, rollout=102),
    plain_sample([1, 1, 1, 1], group=13, rollout=103),
]


def check_counts(totals: StepTotals) -> None:
    assert totals.num_rollouts == 6  # two alone, four shared
    assert totals.num_prompt_groups == 4
    assert totals.num_active_tokens == 9
    for aggregation, active in (("sample_mean", 3), ("prompt_mean", 2)):
        assert AGGREGATIONS[aggregation].expected_sums(totals)[0] == pytest.approx(active)


def test_totals_count_rollouts_groups_and_tokens():
    totals = uneven_totals(package_samples(COUNTED_STEP))
    check_counts(totals)
    assert totals.rollout_active_tokens == {100: 3, 101: 0, 102: 0, 103: 4}
    assert totals.group_active_tokens == {10: 5, 11: 0, 12: 0, 13: 4}


DENOMINATORS = {"sample_mean": [2, 3, 3, 0, 0, 0, 4], "prompt_mean": [5, 5, 5, 0, 0, 0, 4]}


def check_denominators(totals: StepTotals, indices: Sequence[int]) -> None:
    samples = [package_sample(COUNTED_STEP[index]) for index in indices]
    for aggregation, expected in DENOMINATORS.items():
        found = AGGREGATIONS[aggregation].denominators(totals, samples)
        assert found.dtype == torch.float64
        assert found.tolist() == [expected[index] for index in indices]


def test_denominators_are_those_of_the_step():
    samples = package_samples(COUNTED_STEP)
    totals = uneven_totals(samples)
    check_denominators(totals, range(7))
    check_denominators(totals, [1])
    for aggregation in ("token_mean", "constant"):
        assert AGGREGATIONS[aggregation].denominators(totals, samples) is None


def test_sample_that_the_totals_do_not_know_is_refused_by_name():
    totals = uneven_totals(package_samples([plain_sample([1], rollout=1, group=1)]))
    stranger = Sample([0, 1], 1, [1], 0.0, group_index=2, rollout_id=2, name="task-9")
    for aggregation, field in (("sample_mean", "rollout_id"), ("prompt_mean", "group_index")):
        words = f"task-9 | {field} 2 | step_totals"
        assert_refused(words, AGGREGATIONS[aggregation].denominators, totals, [stranger])


@pytest.mark.parametrize("groups", ((1, 0), (0, None), (None, 0), (7, None)))
def test_a_rollout_of_two_groups_or_of_one_and_none_is_refused(groups):
    """The group 0 is a group, and none is not: a rollout between them is in neither."""
    first, second = (plain_sample([1], group=group, rollout=-3) for group in groups)
    step = [plain_sample([1], rollout=8), first, plain_sample([1]), second]
    words = f"rollout_id -3 has samples of group_index {groups[0]} and {groups[1]},"
    assert_refused(words, uneven_totals, package_samples(step))


RANK_SAMPLES = ([0, 2, 5], [1, 3, 4, 6])
"""Which of COUNTED_STEP each rank holds: groups 10 and 11 and rollout 100 are on both."""


def count_on_rank() -> None:
    """One data-parallel rank: totals over the group equal those of the whole step."""
    rank = dist.get_rank()
    step = package_samples(COUNTED_STEP)
    local = [step[index] for index in RANK_SAMPLES[rank]]
    totals = uneven_totals(local, data_parallel_group=dist.group.WORLD)
    check_counts(totals)
    check_denominators(totals, RANK_SAMPLES[rank])
    assert totals == uneven_totals(step)

    # A rank without samples joins all the same.
    totals = uneven_totals(step if rank == 0 else [], data_parallel_group=dist.group.WORLD)
    check_counts(totals)

    # A group missing on one rank is missing for all.
    first = step if rank == 0 else package_samples([plain_sample([1], group=None)])
    assert uneven_totals(first, data_parallel_group=dist.group.WORLD).num_prompt_groups is None

    # An error of one rank leaves no other waiting.
    mask = torch.tensor([[1.0, 1.0 + rank]])
    where = "" if rank == 1 else "data-parallel rank 1: "
    with pytest.raises(ValueError, match=rf"^{where}mask\[0, 1\] is 2"):
        padded_totals(mask, data_parallel_group=dist.group.WORLD, allow_different_group_sizes=True)
    with pytest.raises(ValueError, match=rf"^{where}advantages has 1 rows and loss_mask 2"):
        whiten([torch.ones(1)], [[1]] * (1 + rank), data_parallel_group=dist.group.WORLD)


def test_totals_span_data_parallel_ranks():
    run_ranks(count_on_rank, 2)


def test_random_step_has_what_the_tests_rely_on():
    """A random step that lost its awkward samples would make every test above easier."""
    step = random_step(seed=0)
    assert sum(step[0].loss_mask) == 0 and step[0].response_length > 0
    assert step[1].response_length == 1
    assert step[3].response_length == 0
    assert step[6].rollout_id == step[7].rollout_id != step[2].rollout_id
    assert len(oracle.prompt_groups(step)) == 3
