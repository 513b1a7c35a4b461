"""Running sums along sequences against plain loops, with the ranks of a context-parallel group one after another."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_pg import PolicyLossConfig, Sample, pack
from megatron_pg.loss import scan
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.scan import SCANS, scan_names, scan_of_runs, scans_of_rank, whole_scans
from megatron_pg.loss.sequence import SequenceSums, sequence_units
from megatron_pg.loss.tokens import Tokens
from tests.fast.objectives_oracle import Sequence1, within_20
from tests.fast.refusals import assert_refused
from tests.fast.sequences import package_sample, random_sequence, random_sequences
from tests.random_steps import uneven_totals

HALF_LIFE = 2.5
LAYOUTS = [(1, "zigzag"), *itertools.product((2, 4), ("zigzag", "contiguous"))]
STEPS = {
    "ragged": [*random_sequences(3), random_sequence(9, 40)],
    "one token": [random_sequence(11, 1, active_rate=1.0)],
}


def by_loops(sequence: Sequence1, name: str, by_turn: bool) -> list[float]:
    values, is_suffix = [], name.endswith("to_come")
    for t in range(len(sequence.loss_mask)):
        total = 0.0
        for k in sequence.together(t, by_turn):
            if k >= t if is_suffix else k <= t:
                log_ratio = sequence.log_probs[k].item() - sequence.old_log_probs[k]
                value = 1.0 if name.startswith("active") else within_20(log_ratio)
                total += value * 0.5 ** (abs(k - t) / HALF_LIFE if is_suffix else 0.0)
        values.append(total)
    return values


def found(
    sequences: list[Sequence1], objective: str, unit: str, size: int, mode: str
) -> dict[str, Tensor]:
    """Every scan of the objective at the response tokens laid end to end."""
    settings = {"fipo_half_life": HALF_LIFE} if objective == "fipo" else {}
    config = PolicyLossConfig(policy_loss=objective, sequence_unit=unit, **settings)
    samples = [package_sample(s) for s in sequences]
    log_probs = torch.cat([s.log_probs.detach() for s in sequences])
    old = torch.tensor([value for s in sequences for value in s.old_log_probs])
    ranks, total = [], torch.zeros(())
    for rank in range(size):
        batch = pack(samples, cp_rank=rank, cp_size=size, cp_partition_mode=mode)
        here = batch.window.response_indices
        batch = replace(batch, old_log_probs=old[here])
        loss = MicroBatchLoss(config, batch, uneven_totals(samples))
        tensors = loss._tensors | {"log_probs": log_probs[here]}
        places = tensors["places"], tensors["borders"]
        local, totals = scans_of_rank(config, Tokens.masked(tensors), *places)
        ranks.append((here, local, places))
        total = total + totals
    scans = {name: torch.full_like(log_probs, math.nan) for name in scan_names(config)}
    for here, local, places in ranks:
        for name, values in whole_scans(config, local, total, *places).items():
            scans[name][here] = values
    return scans


def check(step: str, objective: str, unit: str, size: int, mode: str) -> None:
    sequences = STEPS[step]
    for name, values in found(sequences, objective, unit, size, mode).items():
        expected = [v for s in sequences for v in by_loops(s, name, unit == "turn")]
        wanted = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(values, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "mode"), LAYOUTS)
@pytest.mark.parametrize("unit", ["sequence", "turn"])
@pytest.mark.parametrize("objective", ["fipo", "ctpo"])
@pytest.mark.parametrize("step", STEPS)
def test_scans_equal_plain_loops(step, objective, unit, size, mode) -> None:
    check(step, objective, unit, size, mode)


RIGHT_WHOLE, RIGHT_RUNS = whole_scans, scan_of_runs


def without_carries(config, scans, totals, *places):
    return RIGHT_WHOLE(config, scans, 0 * totals, *places)


def in_order_of_ranks(config, scans, totals, places, borders):
    """A rank's two chunks follow each other, as they lie in its memory."""
    chunks = len(borders) - 1
    order = [c for r in range(chunks // 2) for c in (r, chunks - 1 - r)]
    by_rank = totals.view(-1, chunks, totals.shape[1])[:, order].reshape(totals.shape)
    return RIGHT_WHOLE(config, scans, by_rank, places, borders)


def one_position_further(values, runs, half_life, from_end):
    return RIGHT_RUNS(values, runs, half_life, from_end) * 0.5 ** (1 / half_life)


def by_active_tokens(values, runs, half_life, from_end):
    """The distance counts active tokens, as if the others were not there."""
    result, is_active = torch.zeros_like(values), values != 0
    result[is_active] = RIGHT_RUNS(values[is_active], runs[is_active], half_life, from_end)
    return result


def across_sequences(values, runs, half_life, from_end):
    return RIGHT_RUNS(values, torch.zeros_like(runs), half_life, from_end)


MUTANTS: list[tuple[str, Callable[..., object], str]] = [
    ("whole_scans", without_carries, "ctpo"),
    ("whole_scans", in_order_of_ranks, "fipo"),
    ("whole_scans", in_order_of_ranks, "ctpo"),
    ("scan_of_runs", one_position_further, "fipo"),
    ("scan_of_runs", by_active_tokens, "fipo"),
    ("scan_of_runs", across_sequences, "ctpo"),
]


@pytest.mark.parametrize(("name", "mutant", "objective"), MUTANTS)
def test_mistakes_are_seen(name, mutant, objective, monkeypatch) -> None:
    monkeypatch.setattr(scan, name, mutant)
    monkeypatch.setitem(globals(), name, mutant)
    with pytest.raises(AssertionError):
        check("ragged", objective, "sequence", 2, "zigzag")


def test_a_mask_that_is_ignored_would_be_seen(monkeypatch) -> None:
    everywhere = replace(
        SCANS["active_so_far"], summand=lambda config, tokens: torch.ones_like(tokens.log_probs)
    )
    monkeypatch.setitem(SCANS, "active_so_far", everywhere)
    with pytest.raises(AssertionError):
        check("ragged", "ctpo", "sequence", 2, "zigzag")


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("half_life", [32.0, math.inf])
def test_the_precision_of_long_sequences(half_life: float, from_end: bool) -> None:
    """Two sequences of 32,768 tokens, the log-ratios of one around a drift; exactly rounded sums at some of the tokens."""
    length = 32768
    values = torch.randn(
        2 * length, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    values[length:] += 3.0
    runs = torch.arange(2).repeat_interleave(length)
    scanned = scan_of_runs(values, runs, half_life, from_end)
    for t in (0, 1, 63, 64, 4095, 20000, length - 1, length, length + 77, 2 * length - 1):
        first, end = t // length * length, (t // length + 1) * length
        read = values[t:end] if from_end else values[first : t + 1].flip(0)
        terms = [x * 0.5 ** (d / half_life) for d, x in enumerate(read.tolist())]
        size = math.fsum(map(abs, terms))
        assert abs(scanned[t].item() - math.fsum(terms)) <= 1e-15 * size, t


BORDERS = ([0, 64, 128, 4096, 4100, 12288], [0, 1, 8191, 8193, 12289], [0, 12350])


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("half_life", [200.0, math.inf])
@pytest.mark.parametrize("borders", BORDERS)
def test_runs_over_blocks_of_blocks(borders: list[int], half_life: float, from_end: bool) -> None:
    lengths = torch.tensor(borders).diff()
    values = torch.randn(borders[-1], dtype=torch.float64)
    runs = torch.arange(len(lengths)).repeat_interleave(lengths)
    wanted = []
    for part in values.split(lengths.tolist()):
        total, sums = 0.0, []
        for value in reversed(part.tolist()) if from_end else part.tolist():
            total = total * 0.5 ** (1 / half_life) + value
            sums.append(total)
        wanted += reversed(sums) if from_end else sums
    scanned = scan_of_runs(values, runs, half_life, from_end)
    expected = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(scanned, expected, rtol=1e-12, atol=1e-12)


def test_blocks_of_blocks_that_carry_nothing_would_be_seen(monkeypatch) -> None:
    right = scan._direct_scan
    monkeypatch.setattr(
        scan,
        "_direct_scan",
        lambda values, *run: values if values.dim() == 1 else right(values, *run),
    )
    with pytest.raises(AssertionError):
        test_runs_over_blocks_of_blocks(BORDERS[2], math.inf, False)


def test_a_nan_stays_in_its_sequence_and_behind_itself() -> None:
    values, runs = torch.ones(200, dtype=torch.float64), torch.arange(4).repeat_interleave(50)
    values[70] = torch.nan
    for from_end, first, end in ((False, 70, 100), (True, 50, 71)):
        is_nan = scan_of_runs(values, runs, 32.0, from_end).isnan().nonzero().flatten().tolist()
        assert is_nan == list(range(first, end))


def test_a_scan_that_was_not_made_is_named() -> None:
    sums = SequenceSums(torch.zeros(1, dtype=torch.int64), {})
    assert_refused("the scan of 'policy_to_come' was not made", sums.scan, "policy_to_come")


def test_turns_are_numbered_over_samples_and_refused_out_of_order() -> None:
    def sample(turns: object) -> Sample:
        return Sample([1] * 5, 4, [1] * 4, turn_ids=turns, name="a")

    config = PolicyLossConfig(policy_loss="gspo", sequence_unit="turn")
    ids, owners = sequence_units(config, [sample([-1, -1, 3, 3]), sample([3, 3, 3, 9])])
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 2, 3] and owners.tolist() == [0, 0, 1, 1]
    assert_refused("a: turn_ids[2] is 0, less than before it", sample, [0, 1, 0, 1])
    assert_refused("a: turn_ids is of 3 values", sample, [0, 1, 2])
    assert_refused(
        "a: turn_ids has dtype torch.float64, expected integers", sample, [0.0, 1.0, 1.0, 2.0]
    )
    assert_refused(
        "a has no turn_ids, which --sequence-unit turn needs",
        MicroBatchLoss,
        config,
        pack([replace(sample(None), old_log_probs=[-1.0] * 4)]),
        None,
    )
    assert_refused("--sequence-unit turn is about sums", PolicyLossConfig, sequence_unit="turn")
