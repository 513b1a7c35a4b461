"""The token window against the oracle's literal simulation of its layouts."""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pg import PackedBatch, Sample, TokenWindow, pack
from megatron_pg.step import token_window
from megatron_pg.step.token_window import Layout
from tests import oracle
from tests.random_steps import package_samples, random_step
from tests.token_layout import segment_lengths, token_layout

CP_SIZES = (1, 2, 4, 8)
MODES = ("zigzag", "contiguous")

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


def or_minus_one(value: int | None) -> int:
    return -1 if value is None else value


def check_window(
    total_lengths: list[int],
    response_lengths: list[int],
    cp_size: int,
    pad_to_multiple: int,
    mode: str,
) -> None:
    """Every field of every rank's window equals the oracle's."""
    layout = token_layout(total_lengths, response_lengths, cp_size, pad_to_multiple, mode)
    segments = segment_lengths(total_lengths, cp_size, pad_to_multiple, mode)
    for cp_rank, rows in enumerate(layout):
        window = TokenWindow.build(
            total_lengths,
            response_lengths,
            cp_rank=cp_rank,
            cp_size=cp_size,
            pad_to_multiple=pad_to_multiple,
            cp_partition_mode=mode,
        )
        scored = [(index, row) for index, row in enumerate(rows) if row.response is not None]

        assert window.total_lengths == tuple(total_lengths)
        assert window.response_lengths == tuple(response_lengths)
        assert (window.cp_rank, window.cp_size) == (cp_rank, cp_size)
        assert window.cp_partition_mode == mode
        assert window.cu_seqlens.dtype == torch.int32
        assert window.cu_seqlens.diff().tolist() == segments
        assert window.cu_seqlens[0] == 0
        assert window.max_seqlen == max(segments)
        assert window.num_tokens == sum(segments)
        assert window.local_tokens == len(rows) == sum(segments) // cp_size
        assert ids(window.segment_ids) == [row.segment for row in rows]
        assert ids(window.position_ids) == [row.position for row in rows]
        assert ids(window.token_indices) == [or_minus_one(row.token) for row in rows]
        assert ids(window.target_indices) == [or_minus_one(row.target) for row in rows]
        assert ids(window.logit_rows) == [index for index, _ in scored]
        assert ids(window.response_indices) == [row.response for _, row in scored]
        assert ids(window.window_segment_ids) == [row.segment for _, row in scored]
        assert len(window) == len(scored)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 4, 9, 1000])
@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_parts_of_whole_samples_fit_every_rank(
    name: str, cp_size: int, size: int, mode: str
) -> None:
    """By counting rows: no rank has more than `size` of a part unless it is one sample; one sample more may not fit."""
    totals, responses = MICRO_BATCHES[name]
    rng = random.Random(size)
    mask = [[rng.random() < 0.7 for _ in range(length)] for length in responses]
    flat = [value for each in mask for value in each]
    layout = token_layout(totals, responses, cp_size, 1, mode)
    active = [
        [
            sum(row.segment == sample and row.response is not None and flat[row.response] for row in rows)
            for sample in range(len(totals))
        ]
        for rows in layout
    ]  # fmt: skip
    windows = [
        TokenWindow.build(totals, responses, cp_rank=rank, cp_size=cp_size, cp_partition_mode=mode)
        for rank in range(cp_size)
    ]
    found = [each.sample_borders(torch.tensor(flat, dtype=torch.bool), size) for each in windows]
    borders = found[0]
    assert all(each == borders for each in found), "ranks would wait for one another"
    assert borders[0] == 0 and borders[-1] == len(totals) and borders == sorted(set(borders))
    bounds = [
        min(
            sum(of_sample),
            2 * -(-total // (2 * cp_size)) if cp_size > 1 and mode == "zigzag" else total,
        )
        for of_sample, total in zip(mask, totals, strict=True)
    ]
    for begin, end in itertools.pairwise(borders):
        assert end == begin + 1 or all(sum(rank[begin:end]) <= size for rank in active)
        assert end == len(totals) or sum(bounds[begin : end + 1]) > size


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_window_equals_simulation(name: str, cp_size: int, mode: str) -> None:
    total_lengths, response_lengths = MICRO_BATCHES[name]
    for pad_to_multiple in (1, 3, cp_size, 4 * cp_size, 64):
        check_window(total_lengths, response_lengths, cp_size, pad_to_multiple, mode)


@settings(max_examples=100)
@given(
    lengths=st.lists(
        st.integers(1, 40).flatmap(
            lambda total: st.tuples(st.just(total), st.integers(0, total - 1))
        ),
        max_size=6,
    ),
    cp_size=st.sampled_from(CP_SIZES),
    tp_size=st.sampled_from((1, 2, 3, 4)),
    mode=st.sampled_from(MODES),
)
def test_random_windows_equal_simulation(
    lengths: list[tuple[int, int]], cp_size: int, tp_size: int, mode: str
) -> None:
    totals = [total for total, _ in lengths]
    responses = [response for _, response in lengths]
    check_window(totals, responses, cp_size, cp_size * tp_size, mode)


MICRO_BATCH = st.lists(
    st.integers(1, 30).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total - 1))),
    max_size=5,
)


@settings(max_examples=100)
@given(
    step=st.lists(
        st.tuples(MICRO_BATCH, st.integers(1, 9), st.sampled_from(MODES)), min_size=1, max_size=4
    )
)
def test_the_union_over_ranks_is_every_response_token_once(
    step: list[tuple[list[tuple[int, int]], int, str]],
) -> None:
    """Whatever the layout and the group size, and where every micro-batch has its own of both."""
    for lengths, cp_size, mode in step:
        totals, responses = [total for total, _ in lengths], [response for _, response in lengths]
        windows = [
            TokenWindow.build(
                totals, responses, cp_rank=rank, cp_size=cp_size, cp_partition_mode=mode
            )
            for rank in range(cp_size)
        ]
        scored = sorted(index for each in windows for index in each.response_indices.tolist())
        assert scored == list(range(sum(responses)))
        held = sorted(index for each in windows for index in each.token_indices.tolist())
        assert [index for index in held if index >= 0] == list(range(sum(totals)))
        assert len({each.local_tokens for each in windows}) == 1


def _a_token_late(segment: torch.Tensor, position: torch.Tensor, padded: torch.Tensor) -> tuple:
    place = (padded.cumsum(0) - padded)[segment] + position
    late = (place + 1).clamp(max=int(padded.sum()) - 1)
    segment = torch.searchsorted(padded.cumsum(0), late, right=True)
    return segment, late - (padded.cumsum(0) - padded)[segment]


WRONG_POSITIONS = {
    "a slice that begins a token late": _a_token_late,
    "positions from the slice's beginning": lambda s, p, padded: (s, p - p[:1]),
    "positions in the pack": lambda s, p, padded: (s, p + (padded.cumsum(0) - padded)[s]),
    "a sequence begins with its slice": lambda s, p, padded: (
        s,
        p - torch.where(s == s[0], p[0], 0),
    ),
    "a sequence ends a token early": lambda s, p, padded: ((s + (p + 1 == padded[s])), p),
}


@pytest.mark.parametrize("name", WRONG_POSITIONS)
def test_a_wrong_offset_of_a_contiguous_slice_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = token_window._positions

    def wrong(layout: Layout, padded: Any) -> tuple:
        found = map(torch.from_numpy, right(layout, padded))
        segment, position = WRONG_POSITIONS[name](*found, torch.from_numpy(padded))
        return segment.clamp(max=len(padded) - 1).numpy(), position.numpy()

    monkeypatch.setattr(token_window, "_positions", wrong)
    with pytest.raises((AssertionError, IndexError)):
        check_window(*MICRO_BATCHES["ragged"], 2, 1, "contiguous")


def test_written_out_example_of_contiguous_slices_at_cp_2() -> None:
    """Totals 5 and 2, a token of padding: |0 1 2 3|4 0 1 .|, the first sequence on both ranks."""
    build = functools.partial(
        TokenWindow.build, [5, 2], [3, 1], cp_size=2, cp_partition_mode="contiguous"
    )
    first, second = build(cp_rank=0), build(cp_rank=1)

    assert first.cu_seqlens.tolist() == second.cu_seqlens.tolist() == [0, 5, 7, 8]
    assert first.position_ids.tolist() == [0, 1, 2, 3]
    assert second.position_ids.tolist() == [4, 0, 1, 0]
    assert second.segment_ids.tolist() == [0, 1, 1, 2]
    # Tokens 2 to 4 are scored at positions 1 to 3, all on the first rank; of the second, token 1 at 0.
    assert first.target_indices.tolist() == [-1, 2, 3, 4]
    assert second.target_indices.tolist() == [-1, 6, -1, -1]
    assert second.response_indices.tolist() == [3]


def test_written_out_example_at_cp_2() -> None:
    """Total 7, response 4, by hand: chunks |0 1|2 3|4 5|6 .|, rank 0 holds the outer two."""
    outer = TokenWindow.build([7], [4], cp_rank=0, cp_size=2)
    inner = TokenWindow.build([7], [4], cp_rank=1, cp_size=2)

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
    "unknown_mode": (([4], [2], {"cp_partition_mode": "zig"}), r"cp_partition_mode.*contiguous"),
}


@pytest.mark.parametrize("name", BAD_WINDOWS)
def test_impossible_windows_are_refused(name: str) -> None:
    (total_lengths, response_lengths, keywords), message = BAD_WINDOWS[name]
    with pytest.raises(ValueError, match=message):
        TokenWindow.build(total_lengths, response_lengths, **keywords)


# --------------------------------------------------------------------------------------------------
# pack(): the window applied to samples
# --------------------------------------------------------------------------------------------------


def check_pack(
    plain: list[oracle.PlainSample], cp_size: int, pad_to_multiple: int
) -> list[PackedBatch]:
    """Every tensor of every rank's packed micro-batch equals the oracle's rows, value by value."""
    tokens = [token for sample in plain for token in sample.tokens]

    def flat(name: str) -> list:
        return [value for sample in plain for value in getattr(sample, name)]

    layout = token_layout(
        [len(sample.tokens) for sample in plain],
        [sample.response_length for sample in plain],
        cp_size,
        pad_to_multiple,
    )
    batches = []
    for cp_rank, rows in enumerate(layout):
        batch = pack(
            package_samples(plain),
            cp_rank=cp_rank,
            cp_size=cp_size,
            pad_to_multiple=pad_to_multiple,
        )
        for index, row in enumerate(rows):
            assert batch.tokens[index] == (0 if row.token is None else tokens[row.token])
            assert batch.targets[index] == (0 if row.target is None else tokens[row.target])
        # Padding stays at position 0: it may lie past the model's last learned position.
        assert ids(batch.position_ids) == [
            row.position if row.token is not None else 0 for row in rows
        ]
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        # Padding is fed to the model and to the head: it must hold legal token ids.
        assert (batch.tokens >= 0).all() and (batch.targets >= 0).all()

        masks = flat("loss_mask")
        scored = [row.response for row in rows if row.response is not None]
        assert batch.row_mask.dtype == batch.loss_mask.dtype == torch.bool
        assert batch.row_mask.tolist() == [
            row.response is not None and bool(masks[row.response]) for row in rows
        ]
        assert batch.loss_mask.tolist() == [bool(masks[index]) for index in scored]
        for name in ("advantages", "old_log_probs", "ref_log_probs"):
            values = getattr(batch, name)
            assert values.dtype == torch.float32
            assert values.tolist() == [flat(name)[index] for index in scored]
        assert batch.rollout_log_probs is None
        assert len(batch.samples) == len(plain)
        assert batch.num_active_tokens == sum(masks[index] for index in scored)
        assert batch.largest_target == max(
            (tokens[row.target] for row in rows if row.target is not None), default=0
        )
        batches.append(batch)
    return batches


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_packed_batch_holds_the_windows_of_the_samples(cp_size: int) -> None:
    for pad_to_multiple in (1, 3 * cp_size):
        check_pack(random_step(seed=cp_size), cp_size, pad_to_multiple)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_windows_back_among_the_responses_add_up_to_them(name: str, cp_size: int) -> None:
    totals, responses = MICRO_BATCHES[name]
    whole = torch.rand(2, sum(responses))
    found = torch.zeros_like(whole)
    for rank in range(cp_size):
        window = TokenWindow.build(totals, responses, cp_rank=rank, cp_size=cp_size)
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
        assert batch.loss_mask.shape == batch.advantages.shape == (0,)
        assert batch.samples == ()


def test_moving_a_batch_keeps_it_equal() -> None:
    batch = pack(package_samples(random_step(seed=0)), cp_rank=1, cp_size=2)
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.tokens, batch.tokens)
    assert torch.equal(moved.window.response_indices, batch.window.response_indices)
    assert torch.equal(moved.advantages, batch.advantages)
    elsewhere = batch.to("meta")
    assert elsewhere.window.cu_seqlens.device.type == elsewhere.tokens.device.type == "meta"
    assert elsewhere.window.response_indices.device.type == "cpu"


def test_the_largest_target_is_that_of_the_responses() -> None:
    """A prompt may hold placeholders that no row of the vocabulary stands for."""
    sample = Sample(tokens=[7, 900, 3, 4], response_length=2, loss_mask=[1, 0], advantages=0.0)
    assert pack([sample]).largest_target == 4
    assert [pack([sample], cp_rank=rank, cp_size=2).largest_target for rank in (0, 1)] == [0, 4]


def test_number_for_advantages_is_one_per_response_token() -> None:
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 0, 1], advantages=0.5)
    assert sample.advantages.tolist() == [0.5, 0.5, 0.5]
    assert sample.advantages.dtype == torch.float32
    assert (sample.total_length, sample.prompt_length, sample.num_active_tokens) == (4, 1, 2)
