"""What a step costs at scale stays right: counts by columns, any order of answers, the next step planned in a thread."""

import hashlib
import pickle
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pg import Sample, StepCollector, StepPlan, pack, plan_step, step_totals
from megatron_pg.rollout_files import collector as collector_module
from megatron_pg.step import absent as absent_module
from megatron_pg.step import agreement as agreement_module
from megatron_pg.step import ahead as ahead_module
from megatron_pg.step import assign_to_data_parallel_ranks, plan_ahead, plan_hybrid_cp_step
from megatron_pg.step import hybrid_context as hybrid_module
from megatron_pg.step import ids as ids_module
from megatron_pg.step import plan as plan_module
from megatron_pg.step.absent import naming_absent_ranks
from megatron_pg.step.agreement import gather_rows, is_on_host
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
    active_coefficients=st.sampled_from((0.25, 1.5)),
    accepted_size=st.sampled_from((0.0, 0.75, 3.0)),
)
counted_steps = st.lists(st.lists(counted, max_size=4), min_size=1, max_size=3)
"""Of each data-parallel rank its samples."""


def may_stand_together(step: Sequence[Sequence[BareSample]]) -> bool:
    """The rule of ids by plain loops: each rollout is of one group, source and prompt, each group has a prompt in common."""
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
def test_a_rule_left_out_is_noticed(monkeypatch, case, rule):
    check_counts(WRONG[case])
    monkeypatch.setattr(ids_module, rule, lambda *_: None)
    with pytest.raises(AssertionError):
        check_counts(WRONG[case])


def test_a_sample_travels_in_at_most_64_bytes():
    assert ROW.itemsize <= 64


class Threads:
    """Ranks that are threads: every collective waits for all, whatever the order in which they come."""

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

    def gather_tensors(self, padded: torch.Tensor, mine: torch.Tensor, group: Any = None) -> None:
        padded.copy_(torch.cat(self.exchange(mine)))

    def all_reduce(self, table: torch.Tensor, group: Any = None) -> None:
        table.copy_(sum(self.exchange(table.clone())))

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
            "all_gather_into_tensor": self.gather_tensors,
            "all_reduce": self.all_reduce,
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


@pytest.mark.parametrize("count", ["plan", "totals"])
def test_an_error_of_one_rank_in_counting_ends_all(count):
    """An id that the wire cannot carry is found before the exchange in which the others would wait."""

    def on_rank(rank: int) -> str:
        group: Any = object()
        samples = [Sample([1, 2], 1, [1], 1.0, group_index=0, id_source="file")]
        vars(samples[0])["id_source"] = 7 if rank == 1 else "file"
        try:
            if count == "totals":
                step_totals(samples, data_parallel_group=group)
            else:
                plan_step(samples, max_tokens_per_microbatch=20, data_parallel_group=group)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "went on"

    first, second, third = Threads(3).run(on_rank, range(3))
    assert second.startswith("AttributeError")
    assert first == third == f"OtherRankError: data-parallel rank 1: {second}"


def test_an_exchange_goes_on_in_a_group_that_a_trainer_has_wrapped():
    """slime's wrapper of a process group has no name, and answers to the patched functions of torch.distributed alone."""
    wrapped = dist.ProcessGroup(0, 2)
    with pytest.raises(RuntimeError, match="name"):
        print(wrapped.group_name)
    played = {"is_initialized": lambda: True, "get_world_size": lambda group=None: 2}
    with mock.patch.multiple(dist, **played), naming_absent_ranks(wrapped):
        came = True
    assert came
    with mock.patch.object(dist, "get_backend", lambda group: "nccl"):
        assert not is_on_host(wrapped)


def test_lengths_are_dealt_as_their_samples_are_and_evenly_at_heavy_tails():
    samples = samples_of(0) + samples_of(1)
    lengths = np.array([sample.total_length for sample in samples])
    for cp_size in (1, 2):
        dealt = assign_to_data_parallel_ranks(lengths, 4, cp_size=cp_size)
        assert dealt == assign_to_data_parallel_ranks(samples, 4, cp_size=cp_size)
    drawn = np.random.default_rng(0).lognormal(np.log(16384) - 0.5, 1.0, 64 * 61)
    lengths = np.clip(drawn, 16, 262144).astype(np.int64)
    loads = [lengths[members].sum() for members in assign_to_data_parallel_ranks(lengths, 64)]
    assert max(loads) <= 1.02 * np.mean(loads)


TASK: dict[str, Any] = {"max_tokens_per_microbatch": 30, "pad_to_multiple": 4}


def test_a_step_planned_ahead_is_the_step_bit_for_bit():
    samples = samples_of(0) + samples_of(1)
    plan = plan_step(samples, **TASK, cp_size=2, allow_different_prompts=True)
    packed = plan_ahead(samples, **TASK, cp_rank=1, cp_size=2, allow_different_prompts=True).wait()
    assert packed.plan == plan and len(packed.batches) == plan.num_microbatches
    for indices, batch in zip(plan.microbatches, packed.batches, strict=True):
        expected = pack([samples[i] for i in indices], cp_rank=1, cp_size=2, pad_to_multiple=4)
        for name, value in vars(expected).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(batch, name), value), name


def test_an_error_of_the_thread_reaches_the_caller_in_the_same_words():
    with pytest.raises(ValueError) as wanted:
        plan_step(samples_of(0), max_tokens_per_microbatch=8)
    with pytest.raises(ValueError) as found:
        plan_ahead(samples_of(0), max_tokens_per_microbatch=8).wait()
    assert str(found.value) == str(wanted.value)


def returns_before_the_plan(monkeypatch: pytest.MonkeyPatch, patience: float) -> bool:
    """Whether `plan_ahead` comes back while its plan still waits for the step that runs."""
    step_is_over, waited = threading.Event(), []

    def waiting_plan(*arguments: Any, **keywords: Any) -> StepPlan:
        waited.append(step_is_over.wait(patience))
        return plan_step(*arguments, **keywords)

    monkeypatch.setattr(ahead_module, "plan_step", waiting_plan)
    upcoming = plan_ahead(samples_of(0), **TASK)
    step_is_over.set()
    upcoming.wait()
    return waited == [True]


def test_the_step_that_runs_does_not_wait_for_the_next_plan(monkeypatch):
    assert returns_before_the_plan(monkeypatch, 60)
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)
    assert not returns_before_the_plan(monkeypatch, 0.01)


def test_a_group_of_the_device_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    group: Any = object()
    with pytest.raises(ValueError, match=r'exchanges by nccl.*backend="gloo"'):
        plan_ahead(samples_of(0), **TASK, data_parallel_group=group)


def warning_of_absent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    """The first warning where rank 1 comes long after rank 0, yet before the warning, and rank 2 never comes."""
    store = dist.HashStore()
    monkeypatch.setattr(absent_module, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(absent_module, "WAIT_SECONDS", 0.4)
    monkeypatch.setattr(absent_module.distributed_c10d, "_get_default_store", lambda: store)
    played = {
        "get_rank": lambda group=None: group.rank,
        "get_world_size": lambda group=None: 3,
        "get_global_rank": lambda group, rank: rank,
    }
    caplog.clear()
    with mock.patch.multiple(dist, **played), caplog.at_level("WARNING"):
        exchanges, threads = [], []
        for rank in range(2):
            group: Any = SimpleNamespace(rank=rank, group_name="data")
            exchanges.append(absent_module._Exchange(group, 1))
            threads.append(threading.Thread(target=exchanges[-1].watch))
            threads[-1].start()
            time.sleep(0.3)
        until = time.monotonic() + 30
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.05)
        for exchange, thread in zip(exchanges, threads, strict=True):
            exchange.has_ended.set()
            thread.join()
    return caplog.messages[0]


def test_a_warning_names_no_rank_that_waits_already(monkeypatch, caplog):
    named = "waiting for rank 2 of the 3"
    assert named in warning_of_absent(monkeypatch, caplog)
    right = absent_module._Exchange._key

    # As if each wrote after its own wait alone.
    def alone(self: Any, *names: object) -> str:
        return right(self, *names, *[self._rank] * (names[0] == "first"))

    monkeypatch.setattr(absent_module._Exchange, "_key", alone)
    assert named not in warning_of_absent(monkeypatch, caplog)


@pytest.mark.parametrize("sizes", [(2, 3, 2), (9, 0, 0, 1), (1, 0, 7), (0, 0)])
def test_rows_of_ranks_with_few_and_with_many_are_gathered_in_order(sizes):
    ranks = [np.arange(10 * rank, 10 * rank + size) for rank, size in enumerate(sizes)]

    def gathered(rank: int) -> list[int]:
        group: Any = object()
        return gather_rows(ranks[rank], sizes, group).tolist()

    expected = [[row for rows in ranks for row in rows.tolist()]] * len(sizes)
    assert Threads(len(sizes)).run(gathered, range(len(sizes))) == expected
    if len(sizes) * max(sizes) > 2 * sum(sizes):
        # Every rank puts its rows where rank 0 does.
        with mock.patch.object(
            agreement_module, "sum", lambda rows: sum(rows) * (len(rows) == len(sizes)), create=True
        ):
            found = Threads(len(sizes)).run(gathered, range(len(sizes)))
        assert found != expected


def told_of_hybrid_plan(order: Sequence[int]) -> list[str]:
    """What two ranks are told of whom the second has the samples in this order."""
    samples = samples_of(0)

    def on_rank(rank: int) -> str:
        group: Any = object()
        mine = [samples[i] for i in order] if rank else samples
        try:
            plan_hybrid_cp_step(
                mine,
                max_tokens_per_rank=20,
                data_with_context_group=group,
                allow_different_prompts=True,
            )
        except ValueError as error:
            return str(error)
        return "planned"

    return Threads(2).run(on_rank, range(2))


def test_ranks_that_would_plan_other_samples_are_refused(monkeypatch):
    assert told_of_hybrid_plan([0, 1, 2]) == ["planned"] * 2
    for told in told_of_hybrid_plan([0, 2, 1]):
        assert told.startswith(
            "rank 1 of the data-parallel group with context parallelism has 3 samples"
        )
    # With a hash of nothing, two ranks go on with two plans.
    empty = SimpleNamespace(blake2b=lambda _, digest_size: hashlib.blake2b(digest_size=digest_size))
    monkeypatch.setattr(hybrid_module, "hashlib", empty)
    assert told_of_hybrid_plan([0, 2, 1]) == ["planned"] * 2


def told_of_collectors(*starts: Any) -> tuple[list[str], int]:
    """What ranks are told whose sources begin at these positions, and the bytes of the longest object that they exchanged."""
    lengths, ranks = [], Threads(len(starts))

    def counted(gathered: list[Any], mine: Any, group: Any = None) -> None:
        lengths.append(len(pickle.dumps(mine)))
        gathered[:] = ranks.exchange(mine)

    def on_rank(rank: int) -> str:
        mine = samples_of(rank)
        source: Any = SimpleNamespace(
            can_reshard=True, position=starts[rank], pull=lambda count: mine[:count]
        )
        group: Any = object()
        try:
            StepCollector(source, docs_per_step=len(starts), data_parallel_group=group).collect()
        except ValueError as error:
            return str(error)
        return "collected"

    ranks.gather_objects = counted  # type: ignore[method-assign]
    return ranks.run(on_rank, range(len(starts))), max(lengths)


def test_collectors_exchange_a_digest_of_a_long_position_and_name_who_differs(monkeypatch):
    accounts = [(f"rollouts_{number}.jsonl", number, "0" * 16) for number in range(1000)]
    told, longest = told_of_collectors(*[[*accounts] for _ in range(3)])
    assert told == ["collected"] * 3
    assert longest < 200 < len(pickle.dumps(accounts)) / 100
    other = [*accounts[:-1], ("rollouts_999.jsonl", 998, "0" * 16)]
    told, _ = told_of_collectors(accounts, accounts, other)
    assert all(
        words.startswith("data-parallel rank 2 reads other samples than rank 0") for words in told
    )
    # With a digest of nothing, ranks go on with two lists.
    empty = SimpleNamespace(blake2b=lambda _, digest_size: hashlib.blake2b(digest_size=digest_size))
    monkeypatch.setattr(collector_module, "hashlib", empty)
    assert told_of_collectors(accounts, accounts, other)[0] == ["collected"] * 3


def test_equal_positions_that_are_pickled_in_two_ways_are_one_place():
    name = "".join(["rollouts", ".jsonl"])
    once, twice = (name, name), (name, "".join(["rollouts", ".jsonl"]))
    assert once == twice and pickle.dumps(once) != pickle.dumps(twice)
    assert told_of_collectors(once, twice)[0] == ["collected"] * 2


def is_dealt_once(lengths: np.ndarray[Any, Any], size: int) -> bool:
    dealt = assign_to_data_parallel_ranks(lengths, size)
    return len(dealt) == size and sorted(sum(dealt, [])) == list(range(len(lengths)))


def test_each_sample_is_dealt_to_one_rank(monkeypatch):
    lengths = np.random.default_rng(1).integers(1, 50, 23)
    assert all(is_dealt_once(lengths, size) for size in (1, 2, 7, 23, 40))
    right = plan_module.plan_bins

    def twice(*arguments: Any, **keywords: Any) -> list[Any]:
        return [np.union1d(members, [0]) for members in right(*arguments, **keywords)]

    monkeypatch.setattr(plan_module, "plan_bins", twice)
    assert not is_dealt_once(lengths, 7)
