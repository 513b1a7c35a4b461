"""What a step costs at scale stays right: counts by columns, any order of answers."""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pg import Sample, StepPlan, plan_step
from megatron_pg.step import assign_to_data_parallel_ranks
from megatron_pg.step import ids as ids_module
from megatron_pg.step.counts import ROW, BareSample, StepCounts
from megatron_pg.step.totals import totals_of_counts

optional = st.none() | st.integers(0, 2)
counted = st.builds(
    BareSample,
    num_active_tokens=st.integers(0, 9),
    group_index=optional,
    rollout_id=optional,
    prompt_hash=optional,
    id_source=st.none() | st.sampled_from(("a", "b")),
    loss_weight=st.none() | st.sampled_from((0.5, 2.0)),
    number=optional,
    accepted_size=st.sampled_from((0.0, 0.75, 3.0)),
)
counted_steps = st.lists(st.lists(counted, max_size=4), min_size=1, max_size=3)
"""Of each data-parallel rank its samples."""


def may_stand_together(step: Sequence[Sequence[BareSample]]) -> bool:
    """The rule of ids by plain loops: each rollout is of one group, source and prompt, each group
    has a prompt in common.
    """
    rollouts: dict[Any, list[tuple[Any, BareSample]]] = defaultdict(list)
    for rank, samples in enumerate(step):
        for number, sample in enumerate(samples):
            key = ("own", rank, number) if sample.rollout_id is None else sample.rollout_id
            rollouts[key].append((sample.id_source or rank, sample))
    prompts_of_groups: dict[int, list[set[int]]] = defaultdict(list)
    for members in rollouts.values():
        source, first = members[0]
        for other_source, other in members[1:]:
            if other.group_index != first.group_index or other_source != source:
                return False
            is_free = first.group_index is not None or first.id_source is not None
            known = first.prompt_hash is not None and other.prompt_hash is not None
            if known and not is_free and other.prompt_hash != first.prompt_hash:
                return False
        prompts = [sample.prompt_hash for _, sample in members]
        if first.group_index is not None and None not in prompts:
            prompts_of_groups[first.group_index].append({x for x in prompts if x is not None})
    return all(set.intersection(*each) for each in prompts_of_groups.values())


def plain_sums(
    step: Sequence[Sequence[BareSample]], field: str, counted: str = "num_active_tokens"
) -> dict[int, float]:
    sums: dict[int, float] = defaultdict(int)
    for samples in step:
        for sample in samples:
            if getattr(sample, field) is not None:
                sums[getattr(sample, field)] += getattr(sample, counted)
    return dict(sums)


def check_counts(step: Sequence[Sequence[BareSample]]) -> None:
    flat = [sample for samples in step for sample in samples]
    try:
        totals = totals_of_counts(step, 0, allow_different_group_sizes=True)
    except ValueError:
        assert not may_stand_together(step)
        return
    assert may_stand_together(step)
    assert totals.rollout_active_tokens == plain_sums(step, "rollout_id")
    assert totals.group_active_tokens == plain_sums(step, "group_index")
    assert totals.num_active_tokens == sum(sample.num_active_tokens for sample in flat)
    ids = {sample.rollout_id for sample in flat} - {None}
    assert totals.num_rollouts == len(ids) + sum(sample.rollout_id is None for sample in flat)
    accepted = totals.counted_in("mask", accepted=True)
    of_rollouts = plain_sums(step, "rollout_id", "accepted_size")
    assert accepted.rollout_active_tokens == of_rollouts
    # By columns as by a lookup for each sample.
    in_weights = []
    if any(x.loss_weight for x in flat):
        in_weights = [totals.counted_in("weights", accepted=x) for x in (False, True)]
    for counting in (totals, accepted, *in_weights):
        looked_up = counting.rollout_denominators(list(counting.counts))
        assert counting.rollout_denominators(counting.counts).tolist() == looked_up.tolist()


@settings(max_examples=200, deadline=None)
@given(step=counted_steps)
def test_columns_count_and_refuse_as_plain_loops_do(step):
    check_counts(step)


WRONG = {
    "a group of other prompts": [
        [BareSample(1, 0, prompt_hash=1)],
        [BareSample(1, 0, prompt_hash=2)],
    ],
    "a rollout on two ranks": [[BareSample(1, 0, 0)], [BareSample(1, 0, 0)]],
}


@pytest.mark.parametrize(
    ("case", "rule"), zip(WRONG, ("_check_prompts", "_check_rollouts"), strict=True)
)
def test_mutant_a_rule_left_out_is_noticed(monkeypatch, case, rule):
    check_counts(WRONG[case])
    monkeypatch.setattr(ids_module, rule, lambda *_: None)
    with pytest.raises(AssertionError):
        check_counts(WRONG[case])


def test_a_sample_travels_in_at_most_64_bytes():
    assert ROW.itemsize <= 64


class Threads:
    """Ranks that are threads: every collective waits for all, whatever the order in which they
    come.
    """

    def __init__(self, size: int) -> None:
        self.size, self.local, self.slots = size, threading.local(), [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, mine: Any) -> list[Any]:
        self.slots[self.local.rank] = mine
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone

    def gather_objects(self, gathered: list[Any], mine: Any, group: Any = None) -> None:
        gathered[:] = self.exchange(mine)

    def run(self, function: Callable[[int], Any], order: Sequence[int]) -> list[Any]:
        """What the function returns on each rank, started in that order."""

        def on_rank(rank: int) -> Any:
            self.local.rank = rank
            return function(rank)

        played = {
            "get_rank": lambda group=None: self.local.rank,
            "get_world_size": lambda group=None: self.size,
            "get_backend": lambda group=None: "gloo",
            "all_gather_object": self.gather_objects,
        }
        with mock.patch.multiple(dist, **played), ThreadPoolExecutor(self.size) as pool:
            futures = {rank: pool.submit(on_rank, rank) for rank in order}
            return [futures[rank].result() for rank in range(self.size)]


def samples_of(rank: int) -> list[Sample]:
    return [
        Sample(range(n), n - 1, [1] * (n - 1), float(n), group_index=2 * rank + n % 2)
        for n in (5 + rank % 3, 9, 12)
    ]


def test_64_ranks_have_one_plan_whatever_order_they_answer_in():
    def plan_of(rank: int) -> StepPlan:
        group: Any = object()
        return plan_step(
            samples_of(rank),
            max_tokens_per_microbatch=20,
            data_parallel_group=group,
            allow_different_prompts=True,
        )

    order = list(range(64))
    in_turn = Threads(64).run(plan_of, order)
    random.Random(0).shuffle(order)
    shuffled = Threads(64).run(plan_of, order)
    assert in_turn == shuffled
    whole = totals_of_counts(
        StepCounts.of([[*plan.totals.counts.here[rank]] for rank, plan in enumerate(in_turn)]),
        0,
        sum(s.total_length for rank in range(64) for s in samples_of(rank)),
        allow_different_prompts=True,
    )
    assert all(plan.totals == whole for plan in in_turn)


def test_lengths_are_dealt_as_their_samples_are_and_evenly_at_heavy_tails():
    samples = samples_of(0) + samples_of(1)
    lengths = np.array([sample.total_length for sample in samples])
    for cp_size in (1, 2):
        dealt = assign_to_data_parallel_ranks(lengths, 4, cp_size=cp_size)
        assert dealt == assign_to_data_parallel_ranks(samples, 4, cp_size=cp_size)
    drawn = np.random.default_rng(0).lognormal(np.log(16384) - 0.5, 1.0, 64 * 61)
    lengths = np.clip(drawn, 16, 262144).astype(np.int64)
    loads = [lengths[members].sum() for members in assign_to_data_parallel_ranks(lengths, 64)]
    assert len(loads) == 64 and max(loads) <= 1.02 * np.mean(loads)
