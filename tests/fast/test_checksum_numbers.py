"""The checksum sees what the weights alone do not: a step of equal weights whose samples are not
those that were counted.
"""

import itertools
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_pg import AGGREGATIONS, PackedBatch, PolicyLossConfig, Sample, pack, reduce_metrics
from megatron_pg.loss.checksum import CHECKSUM, CHECKSUMS, check_checksum
from megatron_pg.loss.metrics import MicroBatchMetrics
from megatron_pg.step.counts import StepCounts
from megatron_pg.step.sample import number_samples
from megatron_pg.step.totals import BareSample, StepTotals, sample_counts, totals_of_counts
from tests.fast.one_step import loss_of
from tests.fast.refusals import assert_words
from tests.random_steps import package_samples, random_step

RESPONSE = 15
NUM_SAMPLES = 8
EVERY_MODE = pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "custom"])
EVERY_SIZE = pytest.mark.parametrize("cp_size", [1, 2])


def samples(first_token: int, name: str) -> list[Sample]:
    """Eight of equal weight under every aggregation: 14 active tokens, six to eight per window at
    size 2.

    Each prompt group is on both data-parallel ranks.
    """
    return [
        Sample(
            tokens=[index % 4, *range(first_token + index, first_token + index + RESPONSE)],
            response_length=RESPONSE,
            loss_mask=[int(token != index) for token in range(RESPONSE)],
            old_log_probs=[0.0] * RESPONSE,
            group_index=index % 4,
            name=f"{name} {index}",
        )
        for index in range(NUM_SAMPLES)
    ]


SAMPLES = [samples(10, "sample") for _ in range(2)]
"""By context-parallel rank: processes that hold the same samples number them differently."""
STALE = samples(50, "yesterday's")
number_samples(STALE)

Fed = dict[tuple[int, int], list[int]]
WHOLE: Fed = {
    (rank, number): [4 * rank + 2 * number, 4 * rank + 2 * number + 1]
    for rank in range(2)
    for number in range(2)
}
"""What is fed: the samples of each micro-batch of each data-parallel rank; from 8 on, stale
ones."""
FAULTS: dict[str, Fed] = {
    "fed twice": {(1, 1): [4, 5]},
    "one for another": {(0, 1): [0, 3]},
    "one of another rank": {(1, 0): [0, 5]},
    "stale": {(1, 0): [12, 13]},
    "dropped": {(0, 1): [2]},
    "duplicated": {(1, 0): [4, 5, 5]},
    "micro-batch lost": {},
    "one fewer run than told": {(0, 0): [0, 1, 2, 3]},
    "exchanged": {(0, 0): [4, 5], (1, 0): [0, 1]},
    "none": {},
}
"""The micro-batches that differ. In two faults the second of data-parallel rank 0 is not run."""
NOT_RUN = ("micro-batch lost", "one fewer run than told")
RIGHT = ("none", "exchanged")
UNSEEN_BY_WEIGHTS = {
    "fed twice": "a different one never | twice: sample 4, sample 5; never | sample 6, sample 7",
    "one for another": "a different one never | twice: sample 0; never trained on: sample 2.",
    "one of another rank": "rank 1, counted on another rank: sample 0 (rank 0); never trained on: "
    "sample 4.",
    "stale": "from a different step | not of this step: yesterday's 4, yesterday's 5 | never "
    "trained on: sample 4, sample 5",
    "micro-batch lost": "never trained on: sample 2, sample 3.",
}
"""The faults that leave the sum of the weights at 1, and words that stand in the message of some
rank."""


def totals_of_rank(rank: int, cp_rank: int = 0) -> StepTotals:
    """As the exchange gives them: rank 0 has the first half of the samples."""
    step = SAMPLES[cp_rank]
    return totals_of_counts([sample_counts(step[:4]), sample_counts(step[4:])], rank)


def metrics_of_batch(
    config: PolicyLossConfig, batch: PackedBatch, **step: Any
) -> MicroBatchMetrics:
    return loss_of(config, batch, torch.zeros(len(batch.window)), **step)[1]


def metrics_of(
    fault: str,
    aggregation: str,
    cp_size: int,
    totals_of: Callable[[int, int], StepTotals] = totals_of_rank,
) -> list[list[MicroBatchMetrics]]:
    """Of every process, a data- and a context-parallel rank, those of its micro-batches."""
    config, fed = config_of(aggregation), {**WHOLE, **FAULTS[fault]}
    step_share = 1 / (len(fed) * cp_size)
    if fault in NOT_RUN:
        del fed[0, 1]

    def of_micro_batch(rank: int, number: int, cp_rank: int) -> MicroBatchMetrics:
        samples = [[*SAMPLES[cp_rank], *STALE][index] for index in fed[rank, number]]
        batch = pack(samples, cp_rank=cp_rank, cp_size=cp_size)
        totals = totals_of(rank, cp_rank)
        return metrics_of_batch(config, batch, totals=totals, step_share=step_share)

    processes = itertools.product(range(2), range(cp_size))
    return [
        [of_micro_batch(rank, n, cp_rank) for n in range(2) if (rank, n) in fed]
        for rank, cp_rank in processes
    ]


def uneven(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """A reducer whose weights are its own, and nothing that the totals could know."""
    return lambda x: (x * torch.arange(len(x))).sum()


def config_of(aggregation: str, *, check_aggregation: bool = False) -> PolicyLossConfig:
    settings: dict[str, Any] = {"loss_aggregation": aggregation}
    if aggregation == "custom":
        settings = {"custom_pg_loss_reducer_function_path": f"{__name__}:uneven"}
    if aggregation == "constant":
        settings["loss_aggregation_divisor"] = 16.0
    return PolicyLossConfig(pg_metrics="none", check_aggregation=check_aggregation, **settings)


def sums_of(metrics: list[list[MicroBatchMetrics]]) -> dict[str, float]:
    """The two sums of the step, as its all-reduce gives them."""
    pairs = [torch.stack([batch[name] for name in CHECKSUMS]) for batch in sum(metrics, [])]
    sums = torch.stack(pairs).sum(0)
    return dict(zip(CHECKSUMS, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))


def messages(metrics: list[list[MicroBatchMetrics]]) -> str:
    config, said = config_of("sample_mean", check_aggregation=True), []
    for of_process in metrics:
        with pytest.raises(RuntimeError, match="expected 1") as error:
            check_checksum(config, sums_of(metrics), of_process)
        said.append(str(error.value))
    return "\n".join(said)


@EVERY_SIZE
@EVERY_MODE
@pytest.mark.parametrize("order", RIGHT)
def test_a_whole_step_is_one_in_both_sums_and_on_any_rank(order, aggregation, cp_size):
    found = sums_of(metrics_of(order, aggregation, cp_size))
    assert found == pytest.approx(dict.fromkeys(CHECKSUMS, 1.0), abs=1e-13)


@EVERY_MODE
@EVERY_SIZE
@pytest.mark.parametrize("fault", UNSEEN_BY_WEIGHTS)
def test_an_exchange_of_equal_weights_is_seen_and_named(fault, aggregation, cp_size):
    metrics = metrics_of(fault, aggregation, cp_size)
    found = sums_of(metrics)
    assert found[CHECKSUM] == pytest.approx(1.0, abs=1e-12)  # nothing for the weights to see
    assert abs(found[CHECKSUMS[1]] - 1) > 1e-4
    assert_words(UNSEEN_BY_WEIGHTS[fault], messages(metrics))
    config = config_of(aggregation)
    reported = reduce_metrics(config, sum(metrics, []), contributes=True, device="cpu")
    assert set(reported) == {"loss", "pg_loss", CHECKSUM}
    assert abs(reported[CHECKSUM] - 1) > 1e-4


@EVERY_SIZE
@EVERY_MODE
@pytest.mark.parametrize(("fault", "expected", "words"), [
    ("dropped", 7 / 8, "samples were dropped | never trained on: sample 3"),
    ("duplicated", 9 / 8, "trained on twice | trained on twice: sample 5"),
    ("one fewer run than told", 4 / 3, "num_microbatches differs"),
])  # fmt: skip
def test_a_loss_keeps_its_number_and_is_named(fault, expected, words, aggregation, cp_size):
    metrics = metrics_of(fault, aggregation, cp_size)
    assert_words(words, messages(metrics))
    assert sums_of(metrics)[CHECKSUM] == pytest.approx(expected)


# Mutants: what each part of the coefficients is for.

RIGHT_COEFFICIENTS = StepCounts.coefficients_of


def of_one_value(counts: StepCounts, samples: Any) -> Any:
    return np.sign(RIGHT_COEFFICIENTS(counts, samples))


def of_places_on_a_rank(counts: StepCounts, samples: Any) -> Any:
    """The second rank's samples have the coefficients of the first's."""
    numbers = counts.rows["number"].tolist()
    first = [numbers[place % 4] for place in range(NUM_SAMPLES)]
    if samples is not counts:
        first = [first[numbers.index(s.number)] if s.number in numbers else 0 for s in samples]
    return RIGHT_COEFFICIENTS(counts, [BareSample(1, number=number) for number in first])


def of_numbers(counts: StepCounts, samples: Any) -> Any:
    numbers = [sample.number for sample in samples]
    return 0.5 + np.array([np.random.default_rng(number).random() for number in numbers])


@pytest.mark.parametrize(
    ("mutant", "wrong"),
    [
        (lambda counts, samples: np.ones(len(samples)), set(UNSEEN_BY_WEIGHTS)),
        (of_one_value, set(UNSEEN_BY_WEIGHTS) - {"stale"}),
        (of_places_on_a_rank, {"one of another rank"}),
        (of_numbers, set(RIGHT)),
    ],
    ids=["none", "one value", "places on a rank", "numbers"],
)
def test_mutant_other_coefficients_pass_faults_or_refuse_a_whole_step(mutant, wrong, monkeypatch):
    monkeypatch.setattr(StepCounts, "coefficients_of", mutant)

    def passes(fault: str) -> bool:
        found = sums_of(metrics_of(fault, "sample_mean", 2))
        return all(abs(value - 1) < 1e-9 for value in found.values())

    assert {fault for fault in FAULTS if passes(fault) != (fault in RIGHT)} == wrong


# Numbers.


def answers() -> list[Sample]:
    """Four equal answers to one prompt."""
    values = dict.fromkeys(("old_log_probs", "ref_log_probs"), [-1.0] * 3)
    return [Sample([5, 6, 7, 8], 3, [1, 1, 1], -1.0, group_index=0, **values) for _ in range(4)]


def sums_of_batch(
    step: list[Sample], fed: list[Sample], aggregation: str = "sample_mean"
) -> list[float]:
    """The two sums of one micro-batch of samples that are fed; the step is counted before."""
    totals = totals_of_counts([sample_counts(step)], 0)
    metrics = metrics_of_batch(config_of(aggregation), pack(fed), totals=totals)
    return list(sums_of([[metrics]]).values())


@EVERY_MODE
def test_of_equal_answers_one_lost_and_another_twice_is_seen(aggregation):
    step = answers()
    assert sums_of_batch(step, step, aggregation) == pytest.approx([1.0, 1.0], abs=1e-13)
    weights, samples = sums_of_batch(step, [*step[1:], step[1]], aggregation)
    assert weights == pytest.approx(1.0, abs=1e-12) and abs(samples - 1) > 1e-4


def test_a_sample_keeps_its_number_on_its_way():
    """Through values that are filled later, before or after the step was counted, and through
    another process.
    """
    step = answers()
    for made in (
        [replace(sample, advantages=2.0, old_log_probs=[-3.0] * 3) for sample in step],
        pickle.loads(pickle.dumps(step)),
    ):
        assert sums_of_batch(step, made) == pytest.approx([1.0, 1.0], abs=1e-13)
        assert sums_of_batch(made, step) == pytest.approx([1.0, 1.0], abs=1e-13)


def test_copies_of_one_sample_in_a_step_are_told_apart():
    original = answers()[0]
    step = [replace(original) for _ in range(4)]
    assert sums_of_batch(step, step) == pytest.approx([1.0, 1.0], abs=1e-13)
    assert abs(sums_of_batch(step, [*step[1:], step[1]])[1] - 1) > 1e-4
    # The same one twice is wanted twice.
    assert sums_of_batch([original] * 2, [original] * 2) == pytest.approx([1.0, 1.0], abs=1e-13)


def test_a_step_counted_ahead_leaves_the_one_before_whole():
    """Of the same samples in another order, as epochs over one set of samples have it."""
    step = answers()
    totals = totals_of_counts([sample_counts(step)], 0)
    totals_of_counts([sample_counts(step[::-1])], 0)
    metrics = metrics_of_batch(config_of("sample_mean"), pack(step), totals=totals)
    assert list(sums_of([[metrics]]).values()) == pytest.approx([1.0, 1.0], abs=1e-13)


def test_samples_that_were_made_anew_are_of_no_step():
    step, anew = answers(), [replace(sample, name="anew", number=None) for sample in answers()]
    metrics = metrics_of_batch(
        config_of("sample_mean"), pack(anew), totals=totals_of_counts([sample_counts(step)], 0)
    )
    words = "Pack the counted samples, or copies of them by dataclasses.replace()"
    assert_words(f"{words} | not of this step: anew, anew, anew, anew;", messages([[metrics]]))


def test_processes_number_their_samples_differently(monkeypatch):
    """Forks too, which share the count."""
    first = answers()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    other = answers()
    offsets = {b.number - a.number for a, b in zip(first, other, strict=True)}  # type: ignore[operator]
    assert len(offsets) == 1 and offsets.pop() != 4
    assert len({sample.number for sample in first + other}) == 8


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    kept=st.integers(0, 8),
    lost=st.integers(0, 8),
    aggregation=st.sampled_from(tuple(AGGREGATIONS)),
)
def test_one_sample_in_the_place_of_another_is_seen(seed, kept, lost, aggregation):
    step = package_samples(random_step(seed))
    assume(kept != lost and step[kept].num_active_tokens and step[lost].num_active_tokens)
    totals = totals_of_counts([sample_counts(step)], 0, allow_different_group_sizes=True)
    wrong = [*step[:lost], step[kept], *step[lost + 1 :]]
    right, other = (
        sums_of([[metrics_of_batch(config_of(aggregation), pack(fed), totals=totals)]])
        for fed in (step, wrong)
    )
    assert right == pytest.approx(dict.fromkeys(CHECKSUMS, 1.0), abs=1e-12)
    assert abs(other[CHECKSUMS[1]] - 1) > 1e-9


def test_a_miss_is_rare():
    """Of pairs of n samples of equal weight, those within the tolerance; the bound is 1e-8 n."""
    counts = StepCounts.of([[BareSample(1, number=number) for number in range(20_000)]])
    coefficients = torch.from_numpy(counts.coefficients_of(counts)).sort()[0]
    assert 0.5 <= coefficients[0] and coefficients[-1] < 1.5
    tolerance = 1e-9 * coefficients.sum()
    above = torch.searchsorted(coefficients, coefficients + tolerance, right=True)
    near = int((above - torch.arange(1, 20_001)).sum())
    pairs = 20_000 * 19_999 / 2
    assert 0 < near / pairs < 1e-8 * 20_000


def test_totals_of_bare_samples_compare_weights_alone():
    bare = [BareSample(s.num_active_tokens, s.group_index) for s in SAMPLES[0]]
    totals = totals_of_counts([bare[:4], bare[4:]], 0)
    assert not totals.counts.are_numbered
    found = metrics_of("dropped", "token_mean", 1, lambda *_: totals)
    assert sums_of(found) == pytest.approx(dict.fromkeys(CHECKSUMS, 7 / 8))
    assert "On data-parallel rank" not in messages(found)
    for fault in UNSEEN_BY_WEIGHTS:
        found = metrics_of(fault, "token_mean", 2, lambda *_: totals)
        assert math.isclose(sums_of(found)[CHECKSUMS[1]], 1.0)
