"""The token window against the oracle's literal simulation of its layout."""

import itertools
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pg import Sample, TokenWindow, pack
from megatron_pg.step import token_window
from megatron_pg.step.token_window import Layout
from tests.random_steps import lengths, package_samples, random_step
from tests.token_layout import segment_lengths, token_layout

CP_SIZES = (1, 2, 4, 8)

# (total_lengths, response_lengths) of one micro-batch, by what is special about it.
MICRO_BATCHES = {
    "one_sample": ([7], [4]),
    "ragged": ([13, 5, 21, 8], [6, 4, 20, 1]),
    "shorter_than_two_chunks_per_rank": ([2, 3, 2], [1, 2, 1]),
    "response_of_length_zero": ([4, 6, 3], [0, 5, 0]),
    "all_responses_empty": ([4, 1], [0, 0]),
    "exactly_divisible": ([16, 32], [8, 31]),
    "one_token": ([1], [0]),
    "empty": ([], []),
}


def ids(values: torch.Tensor) -> list[int]:
    assert values.dtype == torch.int64
    return values.tolist()


def or_minus_one(values: Iterable[int | None]) -> list[int]:
    return [-1 if value is None else value for value in values]


def windows_of(totals, responses, cp_size: int, multiple=1) -> list[TokenWindow]:
    """The window of every rank."""
    layout = {"cp_size": cp_size, "pad_to_multiple": multiple}
    return [TokenWindow.build(totals, responses, cp_rank=r, **layout) for r in range(cp_size)]


def check_window(totals, responses, cp_size: int, pad_to_multiple: int) -> None:
    """Every field of every rank's window equals the oracle's."""
    layout = token_layout(totals, responses, cp_size, pad_to_multiple)
    segments = segment_lengths(totals, cp_size, pad_to_multiple)
    windows = windows_of(totals, responses, cp_size, pad_to_multiple)
    for cp_rank, (rows, window) in enumerate(zip(layout, windows, strict=True)):
        scored = [(index, row) for index, row in enumerate(rows) if row.response is not None]
        assert window.total_lengths == tuple(totals)
        assert window.response_lengths == tuple(responses)
        assert (window.cp_rank, window.cp_size) == (cp_rank, cp_size)
        assert window.cu_seqlens.dtype == torch.int32 and window.cu_seqlens[0] == 0
        assert window.cu_seqlens.diff().tolist() == segments
        assert (window.max_seqlen, window.num_tokens) == (max(segments), sum(segments))
        assert window.local_tokens == len(rows) == sum(segments) // cp_size
        assert ids(window.segment_ids) == [row.segment for row in rows]
        assert ids(window.position_ids) == [row.position for row in rows]
        assert ids(window.token_indices) == or_minus_one(row.token for row in rows)
        assert ids(window.target_indices) == or_minus_one(row.target for row in rows)
        assert ids(window.logit_rows) == [index for index, _ in scored]
        assert ids(window.response_indices) == [row.response for _, row in scored]
        assert ids(window.window_segment_ids) == [row.segment for _, row in scored]
        assert len(window) == len(scored)


@pytest.mark.parametrize("size", [1, 4, 9, 1000])
@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_parts_of_whole_samples_fit_every_rank(name, cp_size, size) -> None:
    """By counting rows: no rank has more than `size` of a part unless it is one sample; one sample
    more may not fit.
    """
    totals, responses = MICRO_BATCHES[name]
    rng = random.Random(size)
    mask = [[rng.random() < 0.7 for _ in range(length)] for length in responses]
    flat = [value for each in mask for value in each]
    layout = token_layout(totals, responses, cp_size)
    active = []
    for rows in layout:
        segments = [row.segment for row in rows if row.response is not None and flat[row.response]]
        active.append([segments.count(sample) for sample in range(len(totals))])
    windows = windows_of(totals, responses, cp_size)
    found = [each.sample_borders(torch.tensor(flat, dtype=torch.bool), size) for each in windows]
    borders = found[0]
    assert all(each == borders for each in found), "ranks would wait for one another"
    assert borders[0] == 0 and borders[-1] == len(totals) and borders == sorted(set(borders))
    held = [2 * -(-total // (2 * cp_size)) if cp_size > 1 else total for total in totals]
    bounds = [min(sum(part), most) for part, most in zip(mask, held, strict=True)]
    for begin, end in itertools.pairwise(borders):
        assert end == begin + 1 or all(sum(rank[begin:end]) <= size for rank in active)
        assert end == len(totals) or sum(bounds[begin : end + 1]) > size


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_window_equals_simulation(name: str, cp_size: int) -> None:
    for pad_to_multiple in (1, 3, cp_size, 4 * cp_size, 64):
        check_window(*MICRO_BATCHES[name], cp_size, pad_to_multiple)


def micro_batches(longest: int, most: int) -> st.SearchStrategy:
    """(total lengths, response lengths) of any samples."""
    totals = st.lists(st.integers(1, longest), max_size=most)

    def with_responses(totals: list[int]) -> st.SearchStrategy:
        responses = st.tuples(*(st.integers(0, total - 1) for total in totals))
        return st.tuples(st.just(totals), responses.map(list))

    return totals.flatmap(with_responses)


@settings(max_examples=100)
@given(
    lengths=micro_batches(40, 6), cp_size=st.integers(1, 9), tp_size=st.sampled_from((1, 2, 3, 4))
)
def test_random_windows_equal_simulation(lengths, cp_size, tp_size) -> None:
    check_window(*lengths, cp_size, cp_size * tp_size)


def _a_token_late(segment: torch.Tensor, position: torch.Tensor, padded: torch.Tensor) -> tuple:
    place = (padded.cumsum(0) - padded)[segment] + position
    late = (place + 1).clamp(max=int(padded.sum()) - 1)
    segment = torch.searchsorted(padded.cumsum(0), late, right=True)
    return segment, late - (padded.cumsum(0) - padded)[segment]


WRONG_POSITIONS = {
    "a rank that begins a token late": _a_token_late,
    "positions from the rank's beginning": lambda s, p, padded: (s, p - p[:1]),
    "positions in the pack": lambda s, p, padded: (s, p + (padded.cumsum(0) - padded)[s]),
    "a sequence begins with its rank": lambda s, p, padded: (s, p - p[0] * (s == s[0])),
    "a sequence ends a token early": lambda s, p, padded: (s + (p + 1 == padded[s]), p),
}


@pytest.mark.parametrize("name", WRONG_POSITIONS)
def test_mutant_a_wrong_position_is_seen(name: str, monkeypatch) -> None:
    right = token_window._positions

    def wrong(layout: Layout, padded: Any) -> tuple:
        found = map(torch.from_numpy, right(layout, padded))
        segment, position = WRONG_POSITIONS[name](*found, torch.from_numpy(padded))
        return segment.clamp(max=len(padded) - 1).numpy(), position.numpy()

    monkeypatch.setattr(token_window, "_positions", wrong)
    with pytest.raises((AssertionError, IndexError)):
        check_window(*MICRO_BATCHES["ragged"], 2, 1)


def test_written_out_example_at_cp_2() -> None:
    """Total 7, response 4, by hand: chunks |0 1|2 3|4 5|6 .|, rank 0 holds the outer two."""
    outer, inner = windows_of([7], [4], 2)
    assert outer.position_ids.tolist() == [0, 1, 6, 7]
    assert inner.position_ids.tolist() == [2, 3, 4, 5]
    assert outer.token_indices.tolist() == [0, 1, 6, -1]
    # Tokens 3..6 are the response; they are scored at positions 2..5, all on the inner rank.
    assert outer.target_indices.tolist() == [-1, -1, -1, -1]
    assert inner.target_indices.tolist() == [3, 4, 5, 6]
    assert inner.logit_rows.tolist() == [0, 1, 2, 3]
    assert inner.response_indices.tolist() == [0, 1, 2, 3]
    assert len(outer) == 0


BAD_WINDOWS = {
    # A response that starts the sequence has no logit for its first token.
    "no_prompt": (([4, 3], [2, 3], {}), r"(?s)1.*prompt"),
    "response_longer_than_total": (([4], [5], {}), r"response_length|prompt"),
    "negative_response": (([4, 4], [2, -1], {}), r"response_length"),
    "total_length_zero": (([0], [0], {}), r"total_length"),
    "different_counts": (([4, 5], [2], {}), r"(?s)2.*1"),
    "rank_outside": (([4], [2], {"cp_rank": 2, "cp_size": 2}), r"cp_rank"),
    "negative_rank": (([4], [2], {"cp_rank": -1, "cp_size": 2}), r"cp_rank"),
    "size_zero": (([4], [2], {"cp_size": 0}), r"cp_size"),
    "multiple_zero": (([4], [2], {"pad_to_multiple": 0}), r"pad_to_multiple"),
}


@pytest.mark.parametrize("name", BAD_WINDOWS)
def test_impossible_windows_are_refused(name: str) -> None:
    (total_lengths, response_lengths, keywords), message = BAD_WINDOWS[name]
    with pytest.raises(ValueError, match=message):
        TokenWindow.build(total_lengths, response_lengths, **keywords)


@pytest.mark.parametrize("times", (1, 3))
@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_packed_batch_holds_the_windows_of_the_samples(cp_size: int, times: int) -> None:
    """Every tensor of every rank's packed micro-batch equals the oracle's rows, value by value."""
    plain = random_step(seed=cp_size)
    multiple = 1 if times == 1 else times * cp_size

    def flat(name: str) -> list:
        return [value for sample in plain for value in getattr(sample, name)]

    tokens, masks = flat("tokens"), flat("loss_mask")
    for cp_rank, rows in enumerate(token_layout(*lengths(plain), cp_size, multiple)):
        layout = {"cp_rank": cp_rank, "cp_size": cp_size, "pad_to_multiple": multiple}
        batch = pack(package_samples(plain), **layout)
        # Padding is fed to the model and to the head: it must hold legal token ids.
        assert ids(batch.tokens) == [0 if r.token is None else tokens[r.token] for r in rows]
        assert ids(batch.targets) == [0 if r.target is None else tokens[r.target] for r in rows]
        # Padding stays at position 0: it may lie past the model's last learned position.
        assert ids(batch.position_ids) == [0 if r.token is None else r.position for r in rows]

        scored = [row.response for row in rows if row.response is not None]
        assert batch.row_mask.dtype == batch.loss_mask.dtype == torch.bool
        active = [row.response is not None and bool(masks[row.response]) for row in rows]
        assert batch.row_mask.tolist() == active
        assert batch.loss_mask.tolist() == [bool(masks[index]) for index in scored]
        for name in ("advantages", "old_log_probs", "ref_log_probs"):
            values = getattr(batch, name)
            assert values.dtype == torch.float32
            assert values.tolist() == [flat(name)[index] for index in scored]
        assert batch.rollout_log_probs is None and len(batch.samples) == len(plain)
        assert batch.num_active_tokens == sum(masks[index] for index in scored)
        targets = [tokens[row.target] for row in rows if row.target is not None]
        assert batch.largest_target == max(targets, default=0)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_windows_back_among_the_responses_add_up_to_them(name: str, cp_size: int) -> None:
    totals, responses = MICRO_BATCHES[name]
    whole = torch.rand(2, sum(responses))
    found = torch.zeros_like(whole)
    for window in windows_of(totals, responses, cp_size):
        found += window.in_responses(whole[:, window.response_indices])
    assert torch.equal(found, whole)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("pad_to_multiple", (1, 16))
def test_empty_micro_batch_is_one_masked_dummy_segment(cp_size: int, pad_to_multiple: int) -> None:
    smallest = math.lcm(1 if cp_size == 1 else 2 * cp_size, pad_to_multiple)
    for cp_rank in range(cp_size):
        batch = pack([], cp_rank=cp_rank, cp_size=cp_size, pad_to_multiple=pad_to_multiple)
        assert batch.window.cu_seqlens.tolist() == [0, smallest]
        assert len(batch.tokens) == smallest // cp_size
        assert not batch.row_mask.any()
        assert batch.loss_mask.shape == batch.advantages.shape == (0,) and batch.samples == ()


def test_moving_a_batch_keeps_it_equal() -> None:
    batch = pack(package_samples(random_step(seed=0)), cp_rank=1, cp_size=2)
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.tokens, batch.tokens)
    assert torch.equal(moved.window.response_indices, batch.window.response_indices)
    assert torch.equal(moved.advantages, batch.advantages)
    elsewhere = batch.to("meta")
    assert elsewhere.window.cu_seqlens.device.type == elsewhere.tokens.device.type == "meta"
    assert elsewhere.window.response_indices.device.type == "cpu"


def test_number_for_advantages_is_one_per_response_token() -> None:
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 0, 1], advantages=0.5)
    assert sample.advantages.tolist() == [0.5, 0.5, 0.5]
    assert sample.advantages.dtype == torch.float32
    assert (sample.total_length, sample.prompt_length, sample.num_active_tokens) == (4, 1, 2)
