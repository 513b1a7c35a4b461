"""The checksum sees what the weights alone do not: a step of equal weights whose samples are not those that were counted."""

import itertools
import math
import struct
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
from megatron_pg.step import identity
from megatron_pg.step.counts import StepCounts
from megatron_pg.step.totals import BareSample, StepTotals, sample_counts, totals_of_counts
from tests.fast.one_step import loss_of
from tests.fast.refusals import assert_words
from tests.random_steps import package_samples, random_step

RESPONSE = 15
NUM_SAMPLES = 8
EVERY_MODE = pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "custom"])
EVERY_SIZE = pytest.mark.parametrize("cp_size", [1, 2])


def samples(first_token: int, name: str) -> list[Sample]:
    """Eight of equal weight under every aggregation: 14 active tokens, seven in either window at size 2.

    Each prompt group is on both data-parallel ranks.
    """
    mask = [int(token != 4) for token in range(RESPONSE)]
    return [
        Sample(
            tokens=[index % 4, *range(first_token + index, first_token + index + RESPONSE)],
            response_length=RESPONSE,
            loss_mask=mask,
            old_log_probs=[0.0] * RESPONSE,
            group_index=index % 4,
            name=f"{name} {index}",
        )
        for index in range(NUM_SAMPLES)
    ]


SAMPLES, STALE = samples(10, "sample"), samples(50, "yesterday's")


WHOLE = {
    (rank, number): SAMPLES[4 * rank + 2 * number :][:2] for rank in range(2) for number in range(2)
}
"""What is fed: the samples of each micro-batch of each data-parallel rank."""
OTHER_MASK = replace(SAMPLES[0], loss_mask=[int(token != 9) for token in range(RESPONSE)])
FAULTS: dict[str, dict[tuple[int, int], list[Sample]]] = {
    "fed twice": {(1, 1): SAMPLES[4:6]},
    "one for another": {(0, 1): [SAMPLES[0], SAMPLES[3]]},
    "exchanged": {(0, 0): SAMPLES[4:6], (1, 0): SAMPLES[:2]},
    "stale": {(1, 0): STALE[4:6]},
    "other mask": {(0, 0): [OTHER_MASK, SAMPLES[1]]},
    "other window": {},
    "dropped": {(0, 1): SAMPLES[2:3]},
    "duplicated": {(1, 0): [*SAMPLES[4:6], SAMPLES[5]]},
    "none": {},
}
"""The micro-batches that are others. In one fault both context-parallel ranks run the same window of one."""
EXCHANGES = {
    "fed twice": "twice and another never | twice: sample 4, sample 5; never | sample 6, sample 7",
    "one for another": "twice and another never | twice: sample 0; never trained on: sample 2.",
    "exchanged": "exchanged between ranks | counted on another rank: sample 4 (rank 1), sample 5 (rank 1)"
    " | never trained on: sample 0, sample 1",
    "stale": "of another step | not of this step: yesterday's 4, yesterday's 5 | never trained on: sample 4, sample 5",
    "other mask": "its masks, advantages or log-probs have changed | not of this step: sample 0",
    "other window": "another context-parallel rank than the one that ran it",
}
"""The faults that leave the sum of the weights at 1, and words that stand in the message of some rank."""


def totals_of_rank(rank: int) -> StepTotals:
    """As the exchange gives them: rank 0 has the first half of the samples."""
    return totals_of_counts([sample_counts(SAMPLES[:4]), sample_counts(SAMPLES[4:])], rank)


def metrics_of_batch(
    config: PolicyLossConfig, batch: PackedBatch, **step: Any
) -> MicroBatchMetrics:
    return loss_of(config, batch, torch.zeros(len(batch.window)), **step)[1]


def metrics_of(
    fault: str,
    aggregation: str,
    cp_size: int,
    totals_of: Callable[[int], StepTotals] = totals_of_rank,
) -> list[list[MicroBatchMetrics]]:
    """Of every process, a data- and a context-parallel rank, those of its micro-batches."""
    config, fed = config_of(aggregation), {**WHOLE, **FAULTS[fault]}
    step_share = 1 / (len(fed) * cp_size)

    def of_micro_batch(rank: int, number: int, cp_rank: int) -> MicroBatchMetrics:
        window = 0 if (fault, rank, number) == ("other window", 0, 1) else cp_rank
        batch = pack(fed[rank, number], cp_rank=window, cp_size=cp_size)
        return metrics_of_batch(config, batch, totals=totals_of(rank), step_share=step_share)

    processes = itertools.product(range(2), range(cp_size))
    return [[of_micro_batch(rank, n, cp_rank) for n in range(2)] for rank, cp_rank in processes]


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
    """The three sums of the step, as its all-reduce gives them."""
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
def test_a_whole_step_is_one_in_all_three_sums(aggregation, cp_size):
    found = sums_of(metrics_of("none", aggregation, cp_size))
    assert found == pytest.approx(dict.fromkeys(CHECKSUMS, 1.0), abs=1e-13)


@EVERY_MODE
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("fault", EXCHANGES)
def test_an_exchange_of_equal_weights_is_seen_and_named(fault, aggregation, cp_size):
    if (fault, cp_size) == ("other window", 1):
        return  # there is no other
    metrics = metrics_of(fault, aggregation, cp_size)
    found = sums_of(metrics)
    assert found[CHECKSUM] == pytest.approx(1.0, abs=1e-12)  # nothing for the weights to see
    by_sample, by_rank = (abs(found[name] - 1) > 1e-4 for name in CHECKSUMS[1:])
    assert (by_sample, by_rank) == (fault != "exchanged", True)
    assert_words(EXCHANGES[fault], messages(metrics))
    config = config_of(aggregation)
    reported = reduce_metrics(config, sum(metrics, []), contributes=True, device="cpu")
    assert set(reported) == {"loss", "pg_loss", CHECKSUM}
    assert abs(reported[CHECKSUM] - 1) > 1e-4


@EVERY_SIZE
@EVERY_MODE
@pytest.mark.parametrize(("fault", "sign", "words"), [
    ("dropped", -1, "never trained on: sample 3"),
    ("duplicated", 1, "trained on twice: sample 5"),
])  # fmt: skip
def test_a_loss_keeps_its_number_and_is_named(fault, sign, words, aggregation, cp_size):
    metrics = metrics_of(fault, aggregation, cp_size)
    assert_words(f"samples were dropped | {words}", messages(metrics))
    assert sums_of(metrics)[CHECKSUM] == pytest.approx(1 + sign / NUM_SAMPLES)


# Mutants: what each part of the coefficients is for.


def missed(fault: str, cp_size: int) -> bool:
    found = sums_of(metrics_of(fault, "sample_mean", cp_size))
    return all(abs(value - 1) < 1e-9 for value in found.values())


def test_of_weights_alone_no_exchange_is_seen():
    def without_identity(rank: int) -> StepTotals:
        totals = totals_of_rank(rank)
        counts = (
            [count._replace(active_coefficients=None) for count in counts_of_rank]
            for counts_of_rank in totals.counts.here.values()
        )
        return replace(totals, counts=StepCounts.of(counts))

    for fault in EXCHANGES:
        found = sums_of(metrics_of(fault, "sample_mean", 2, without_identity))
        assert found == pytest.approx(dict.fromkeys(CHECKSUMS, 1.0), abs=1e-12)


@pytest.mark.parametrize(
    ("part", "mutant", "passing"),
    [
        (
            "coefficient_of",
            lambda hashes: np.ones_like(hashes, dtype=float),
            {"one for another", "fed twice", "stale", "exchanged"},
        ),
        ("_position_coefficients", np.ones, {"other window"}),
        ("coefficient_of_rank", lambda rank: 1.0, {"exchanged"}),
    ],
    ids=["sample", "position", "rank"],
)
def test_without_a_part_of_the_coefficients_some_pass(part, mutant, passing, monkeypatch):
    """The part says nothing then."""
    for sample in (*SAMPLES, *STALE):
        vars(sample).pop("hashed_fields", None)
    for module in ("step.identity", "step.batch", "step.totals", "loss.aggregation"):
        monkeypatch.setattr(f"megatron_pg.{module}.{part}", mutant, raising=False)
    assert {fault for fault in EXCHANGES if missed(fault, 2)} == passing
    for sample in (*SAMPLES, *STALE):
        vars(sample).pop("hashed_fields", None)


# The hashes, against plain integers.

WORD = 2**64
VALUES = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "old_values", "returns")  # fmt: skip


def plain_mixed(number: int) -> int:
    number %= WORD
    number = (number ^ number // 2**30) * 0xBF58476D1CE4E5B9 % WORD
    number = (number ^ number // 2**27) * 0x94D049BB133111EB % WORD
    return number ^ number // 2**31


def plain_identity(
    tokens: list[int], mask: list[int] | None, values: dict[str, list[float]] | None = None
) -> int:
    """sum_i k_i (x_i + golden m_i + sum_f factor_f bits_fi) and the two lengths, mixed."""
    golden = 0x9E3779B97F4A7C15
    keys = [plain_mixed(place * golden) | 1 for place in range(1, len(tokens) + 1)]
    total = sum(key * token for key, token in zip(keys, tokens, strict=True))
    total += golden * len(tokens)
    if mask is not None:
        total += golden * sum(key * bit for key, bit in zip(keys, mask, strict=False))
        total += plain_mixed(len(mask))
    for name, numbers in (values or {}).items():
        factor = plain_mixed(VALUES.index(name) + 1) | 1
        bits = struct.unpack(f"{len(numbers)}i", struct.pack(f"{len(numbers)}f", *numbers))
        total += factor * sum(key * each for key, each in zip(keys, bits, strict=False))
    return plain_mixed(total)


token_lists = st.lists(st.integers(-3, 200_000), min_size=1, max_size=40)


@settings(max_examples=50)
@given(tokens=token_lists, data=st.data())
def test_the_hash_is_that_of_plain_integers(tokens, data):
    assert identity.hash_of(torch.tensor(tokens)) == plain_identity(tokens, None)
    mask = data.draw(st.lists(st.integers(0, 1), max_size=len(tokens) - 1))
    tokens = list(map(abs, tokens))  # a response has no placeholders
    assert Sample(tokens, len(mask), mask).identity == plain_identity(tokens, mask)


def test_many_samples_are_hashed_as_each_alone(monkeypatch):
    """Against plain integers and floats, in chunks of three; without response, and with loss weights and kept sets."""
    monkeypatch.setattr(identity, "CHUNK", 3)
    samples = package_samples(random_step(3, num_samples=11))
    kept_tokens = [[token] for token in samples[6].tokens[samples[6].prompt_length :].tolist()]
    samples += [replace(samples[4]), replace(samples[5], loss_weights=samples[5].loss_mask * 0.5)]
    samples.append(replace(samples[6], kept_tokens=kept_tokens))
    identity.store_hashes(samples)
    for sample in samples:
        tokens, mask = sample.tokens.tolist(), sample.loss_mask.tolist()
        if sample.loss_weights is None and sample.kept_tokens is None:
            assert sample.hashed_fields == VALUES[:3]
            values = {name: getattr(sample, name).tolist() for name in VALUES[:3]}
            assert sample.identity == plain_identity(tokens, mask, values)
        assert vars(sample)["prompt_hash"] == plain_identity(tokens[: sample.prompt_length], None)
        assert sample.num_active_tokens == sum(mask)
        weights = mask if sample.loss_weights is None else sample.loss_weights.tolist()
        table = identity.coefficients_of_positions(len(mask)).tolist()
        expected = sum(t * w for t, w in zip(table, weights, strict=True))
        expected *= 0.5 + sample.identity / WORD
        assert sample.active_coefficients == pytest.approx(expected, rel=1e-14)
    assert len({sample.identity for sample in samples}) == len(samples) - 1


@pytest.mark.parametrize("count", [1023, 1024, 1025, 5000])
def test_longer_tables_begin_with_shorter_ones(count):
    tokens = list(range(count))
    assert identity.hash_of(torch.tensor(tokens)) == plain_identity(tokens, None)
    table = identity.coefficients_of_positions(count)
    assert torch.equal(table[:1000], identity.coefficients_of_positions(1000))
    assert 0.5 <= table.min() < table.max() < 1.5
    assert table.unique().numel() == count


def test_a_sample_is_another_where_anything_of_it_is():
    tokens, mask = list(range(12)), [1, 0, 1, 1]
    changes = [(tokens[:i] + [99] + tokens[i + 1 :], mask) for i in range(12)]
    changes += [(tokens, mask[:i] + [1 - mask[i]] + mask[i + 1 :]) for i in range(4)]
    changes += [
        (tokens, [*mask, 0]),
        (tokens, [0, *mask]),
        (tokens, mask[:3]),
        ([*tokens, 0], mask),
    ]
    changes += [(tokens, mask)]
    found = {Sample(ids, len(bits), bits).identity for ids, bits in changes}
    assert len(found) == len(changes)


def test_kept_sets_of_the_same_ids_cut_elsewhere_make_another_sample():
    """Both have the ids 3, 8, 3 in this order; the second token of the one, the first of the other has two."""
    found = {
        Sample([5, 3, 3], 2, [1, 1], kept_tokens=kept_tokens).identity
        for kept_tokens in ([[3], [8, 3]], [[3, 8], [3]])
    }
    assert len(found) == 2


def test_ranks_are_far_apart():
    """Three gaps: of n multiples of the golden ratio no two are nearer than 0.38 / n."""
    for count in (2, 8, 100, 1000):
        values = sorted(identity.coefficient_of_rank(rank) for rank in range(count))
        gaps = [after - before for before, after in itertools.pairwise(values)]
        assert min(gaps) > 0.38 / count and 0.5 <= values[0] and values[-1] < 1.5


# Values: advantages, log-probs, what the critic is trained to.


def answers(**values: float) -> list[Sample]:
    """Four equal answers to one prompt, with advantages 3, -1, -1, -1; a value given is that of the first token of the first."""
    equal = {name: [-1.0] * 3 for name in VALUES[1:]}
    samples = [
        Sample([5, 6, 7, 8], 3, [1, 1, 1], 3.0 if n == 0 else -1.0, group_index=0, **equal)
        for n in range(4)
    ]
    changed = {name: [value, -1.0, -1.0] for name, value in values.items()}
    return [replace(samples[0], name="the first", **changed), *samples[1:]]


def sums_of_batch(
    step: list[Sample], fed: list[Sample], aggregation: str = "sample_mean"
) -> list[float]:
    """The sum of weights and that of samples, of one micro-batch of those that are fed; the step is counted before."""
    totals = totals_of_counts([sample_counts(step)], 0)
    metrics = metrics_of_batch(config_of(aggregation), pack(fed), totals=totals)
    return list(sums_of([[metrics]]).values())[:2]


@EVERY_MODE
def test_of_equal_answers_one_lost_and_another_twice_is_seen(aggregation):
    step = answers()
    assert sums_of_batch(step, step, aggregation) == pytest.approx([1.0, 1.0], abs=1e-13)
    weights, samples = sums_of_batch(step, [*step[1:], step[1]], aggregation)
    assert weights == pytest.approx(1.0, abs=1e-12) and abs(samples - 1) > 1e-4


@pytest.mark.parametrize("name", VALUES)
def test_a_sample_is_another_where_a_value_of_it_is(name):
    """Also where it is overwritten after the step was counted; with the old value again, it is itself."""
    step, other = answers(advantages=3.0), answers(**{"advantages": 3.0, name: -2.5})
    assert step[0].identity != other[0].identity
    assert abs(sums_of_batch(step, other)[1] - 1) > 1e-4
    assert sums_of_batch(step, answers(advantages=3.0))[1] == pytest.approx(1, abs=1e-13)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("where", ["all", "one"])
def test_a_value_filled_after_the_step_was_counted_does_not_disturb(name, where):
    """Of every sample, or of the one that lacks it; what the others have from the beginning is still told apart."""
    if name == "advantages" and where == "one":
        return  # an advantage of 0 is one
    step, empty = answers(), 0.0 if name == "advantages" else None
    counted = [replace(s, **{name: empty}) if where == "all" or s is step[0] else s for s in step]
    assert sums_of_batch(counted, step) == pytest.approx([1.0, 1.0], abs=1e-13)
    if name != "advantages":
        assert abs(sums_of_batch(counted, [*step[:3], step[0]])[1] - 1) > 1e-4


def test_values_that_a_sample_loses_are_seen():
    step = answers()
    without = [replace(sample, ref_log_probs=None) for sample in step]
    assert abs(sums_of_batch(step, without)[1] - 1) > 1e-4


def test_a_masked_value_may_be_anything():
    """Log-probs of tool tokens: NaN and infinity are bits as others are."""
    numbers = [-1.0, math.nan, -math.inf]
    step = [Sample([1, 2, 3, 4], 3, [1, 0, 0], 1.0, old_log_probs=numbers) for _ in range(2)]
    assert sums_of_batch(step, step, "token_mean") == pytest.approx([1.0, 1.0])
    assert step[0].identity == step[1].identity


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


def test_a_miss_is_as_rare_as_the_docs_say():
    """Of pairs of n samples of equal weight, those within the tolerance; the bound is 1e-8 n."""
    hashes = identity.mixed(np.arange(20_000, dtype=np.uint64)).tolist()
    coefficients = torch.tensor(list(map(identity.coefficient_of, hashes)), dtype=torch.float64)
    coefficients = coefficients.sort()[0]
    tolerance = 1e-9 * coefficients.sum()
    above = torch.searchsorted(coefficients, coefficients + tolerance, right=True)
    near = int((above - torch.arange(1, 20_001)).sum())
    pairs = 20_000 * 19_999 / 2
    assert 0 < near / pairs < 1e-8 * 20_000


def test_totals_of_bare_samples_compare_weights_alone():
    bare = [BareSample(sample.num_active_tokens, sample.group_index) for sample in SAMPLES]
    totals = totals_of_counts([sample_counts(bare[:4]), sample_counts(bare[4:])], 0)
    assert not totals.knows_identities
    found = metrics_of("dropped", "token_mean", 1, lambda rank: totals)
    assert sums_of(found) == pytest.approx(dict.fromkeys(CHECKSUMS, 7 / 8))
    assert "On data-parallel rank" not in messages(found)
    for fault in EXCHANGES:
        found = metrics_of(fault, "token_mean", 2, lambda rank: totals)
        assert math.isclose(sums_of(found)[CHECKSUMS[2]], 1.0)
