"""Steps of n documents on one rank: which samples they hold, where they end, what is carried
over.
"""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pg import Sample
from megatron_pg.rollout_files import IteratorSource, StepCollector, StepSamples
from tests.fast.refusals import assert_refused

MODES = ("at_least", "exact")


def stream(groups: list[int | None], rollouts: list[int | None] | None = None) -> list[Sample]:
    """One sample per entry; its first token is its place in the stream."""
    rollouts = rollouts or [None] * len(groups)
    return [
        Sample([i, 0], 1, [1], group_index=group, rollout_id=rollout, name=f"row {i}")
        for i, (group, rollout) in enumerate(zip(groups, rollouts, strict=True))
    ]


def places(step: StepSamples) -> list[int]:
    return [int(sample.tokens[0]) for sample in step.samples]


def all_steps(collector: StepCollector) -> list[StepSamples]:
    return list(iter(collector.collect, None))


def all_places(collector: StepCollector) -> list[list[int]]:
    return [places(step) for step in all_steps(collector)]


def collected(samples: list[Sample], docs_per_step: int, **keywords: object) -> list[list[int]]:
    source = IteratorSource(samples)
    return all_places(StepCollector(source, docs_per_step=docs_per_step, **keywords))


@pytest.mark.parametrize("mode", MODES)
def test_single_samples_make_steps_of_n(mode):
    assert collected(stream([None] * 8), 3, mode=mode) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert collected([], 3, mode=mode) == []


def test_at_least_keeps_the_overshoot_and_exact_carries_it():
    """A rollout of four samples, which lets the next window ask for more than single samples
    need.
    """
    samples = stream([0] * 20, [7, 7, 7, 7, *[None] * 16])
    exact = collected(samples, 3, mode="exact")
    assert exact == [[0, 1, 2, 3, 4, 5], *[list(range(i, min(i + 3, 20))) for i in range(6, 20, 3)]]
    at_least = collected(samples, 3, mode="at_least")
    assert len(at_least[0]) > 6
    for steps in (exact, at_least):
        assert [place for step in steps for place in step] == list(range(20))


@pytest.mark.parametrize("mode", MODES)
def test_groups_are_kept_whole(mode):
    samples = stream([5, 5, 5, 6, 6, 6, 7, 7, 7])
    steps = collected(samples, 4, mode=mode, keep_prompt_groups=True)
    assert steps == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]


def test_a_cut_group_is_refused_by_name_before_the_step():
    samples, words = (
        stream([5, 5, 5, -6, -6, -6]),
        "prompt group -6 | --docs-per-step 4 | --keep-prompt-gr",
    )
    assert_refused(words, collected, samples, 4, mode="exact", refuse_cut_groups=True)
    assert collected(samples, 3, mode="exact", refuse_cut_groups=True) == [[0, 1, 2], [3, 4, 5]]
    # Only the prompt mean divides by a group.
    assert collected(samples, 4, mode="exact") == [[0, 1, 2, 3], [4, 5]]


def test_at_least_without_a_cut_ends_between_groups_by_itself():
    samples = stream([5, 5, 5, 6, 6, 6])
    assert collected(samples, 2, refuse_cut_groups=True) == [[0, 1, 2], [3, 4, 5]]


BACK = stream([5, 5, 6, 6, 5, 5])


@pytest.mark.parametrize(("samples", "docs_per_step", "settings", "words"), [
    (BACK, 2, {"mode": "exact", "keep_prompt_groups": True}, "prompt group 5"),
    (BACK, 2, {"mode": "exact", "refuse_cut_groups": True}, "prompt group 5"),
    (stream([0] * 5, [1, 1, 2, 3, 1]), 2, {"mode": "exact"}, "rollout_id 1 is split"),
    (stream([3, None]), 2, {"keep_prompt_groups": True}, "row 1 has no group_index"),
    (stream([3, None]), 2, {"refuse_cut_groups": True}, "row 1 has no group_index"),
    ([], 0, {}, "--docs-per-step |  0"),
    ([], 1, {"mode": "most"}, "--docs-per-step-mode"),
])  # fmt: skip
def test_what_makes_no_step_is_refused(samples, docs_per_step, settings, words):
    assert_refused(words, collected, samples, docs_per_step, **settings)


def plain_steps(groups: list[list[int]], docs_per_step: int, keep: bool) -> list[list[int]]:
    """`groups`: the number of samples of each rollout of each group, in the order of the stream."""
    steps: list[list[int]] = [[]]
    place = documents = 0
    for rollouts in groups:
        for size in rollouts:
            if documents >= docs_per_step and not keep:
                steps.append([])
                documents = 0
            steps[-1] += range(place, place + size)
            place += size
            documents += 1
        if documents >= docs_per_step and keep:
            steps.append([])
            documents = 0
    return [step for step in steps if step]


@settings(max_examples=80, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), max_size=12),
    docs_per_step=st.integers(1, 6),
    keep=st.booleans(),
    stop=st.integers(0, 5),
)
def test_exact_steps_are_those_of_a_plain_loop_resumed_or_not(groups, docs_per_step, keep, stop):
    sizes = [(group, size) for group, rollouts in enumerate(groups) for size in rollouts]
    group_of = [group for group, size in sizes for _ in range(size)]
    rollout_of = [rollout for rollout, (_, size) in enumerate(sizes) for _ in range(size)]

    def collector() -> StepCollector:
        source = IteratorSource(stream(group_of, rollout_of))
        settings = {"docs_per_step": docs_per_step, "keep_prompt_groups": keep}
        return StepCollector(source, mode="exact", **settings)

    expected = plain_steps(groups, docs_per_step, keep)
    steps = all_steps(collector())
    assert list(map(places, steps)) == expected
    documents = [len({rollout_of[place] for place in step}) for step in expected]
    assert [step.num_documents for step in steps] == documents
    first, second = collector(), collector()
    found = [places(step) for _ in range(stop) if (step := first.collect()) is not None]
    second.load_state(pickle.loads(pickle.dumps(first.state())))
    assert found + all_places(second) == expected


def test_a_checkpoint_of_another_size_is_refused_where_ranks_have_their_own_streams():
    collector = StepCollector(IteratorSource(stream([0] * 4)), docs_per_step=1)
    words = "2 data-parallel ranks and this run has 1"
    state = collector.state()._replace(num_ranks=2)
    assert_refused(words, collector.load_state, state)


class ListSource:
    """Slots of a list, some without a sample; it can go back."""

    is_shared = True

    def __init__(self, slots: list[Sample | None]) -> None:
        self._slots = slots
        self.position = 0

    def seek(self, num_slots: int) -> None:
        self.position = num_slots

    def pull(self, count: int) -> list[Sample | None]:
        pulled = self._slots[self.position : self.position + count]
        self.position += len(pulled)
        return pulled


@pytest.mark.parametrize("mode", MODES)
def test_bad_rows_are_counted_once_in_the_step_that_passed_them(mode):
    slots: list[Sample | None] = [*stream([None] * 9)]
    for bad in (0, 2, 3, 8):
        slots[bad] = None
    steps = all_steps(StepCollector(ListSource(slots), docs_per_step=2, mode=mode))
    assert [place for step in steps for place in places(step)] == [1, 4, 5, 6, 7]
    assert [step.num_skipped for step in steps] == [3, 0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_collector_that_is_at_its_end_can_go_back(mode):
    samples = stream([0, 0, 1, 2, 2, 3, 3])
    collector = StepCollector(ListSource([*samples]), docs_per_step=3, mode=mode)
    start = collector.state()
    expected = all_places(collector)
    collector.load_state(start)
    assert all_places(collector) == expected
    assert sorted(place for step in expected for place in step) == list(range(len(samples)))


def test_a_group_that_comes_back_after_resuming_is_refused():
    samples = stream([0, 0, 1, 1, 0, 0])
    first = StepCollector(ListSource([*samples]), docs_per_step=2, keep_prompt_groups=True)
    step = first.collect()
    assert step is not None and places(step) == [0, 1]
    again = [*samples[: first.state().start], *samples[4:]]
    second = StepCollector(ListSource(again), docs_per_step=2, keep_prompt_groups=True)
    second.load_state(pickle.loads(pickle.dumps(first.state())))
    assert_refused("prompt group 0", all_steps, second)


def test_an_iterator_cannot_go_back():
    source = IteratorSource(stream([0] * 4))
    source.pull(3)
    assert_refused("has been passed", source.seek, 2)
