"""Kept sets and side channels: refusals by sample and position, and their way through pack and the
token window.
"""

import random
from typing import Any

import pytest
import torch

from megatron_pg import Ragged, Sample, pack
from megatron_pg.head.ragged import offsets_of
from tests.fast.refusals import assert_refused, refusal
from tests.token_layout import token_layout


def sample(kept: Any, mask: list[int] | None = None, **fields: Any) -> Sample:
    mask = [1] * 3 if mask is None else mask
    tokens = [8, 9, *range(1, len(mask) + 1)]
    return Sample(tokens, len(mask), mask, kept_tokens=kept, **fields)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ([[1], [2]], " has 2 sets, expected one per response token (3)"),
        ([[1], [5, 6], [3]], "[1] is a set of 2 ids without 2, expected the sampled token"),
        ([[1], [2], [3, 5, 3]], "[2] is a set with id 3 twice, expected distinct"),
        ([[1], [2, -1], [3]], "[1] is a set with id -1, expected ids in"),
        ([[1], [2, 2**31], [3]], "[1] is a set with id 2147483648, expected ids"),
        ([[1], [2.5], [3]], " is torch.float64"),
        ([1, 2, 3], " is invalid"),
        ("abc", " is invalid"),
    ],
)
def test_wrong_sets_are_named(kept: Any, words: str) -> None:
    assert refusal(sample, kept, name="a").startswith(f"a: kept_tokens{words}")


def test_what_is_legal() -> None:
    assert sample([[], [7, 2], []]).kept_tokens.sizes.tolist() == [0, 2, 0]
    assert sample([[1], [], [6]], [1, 1, 0]).kept_tokens.row(2).tolist() == [6]  # a tool's token
    assert Sample([1], 0, [], kept_tokens=[]).kept_tokens.sizes.tolist() == []
    given = Ragged(torch.tensor([1, 2, 5, 3], dtype=torch.int32), torch.tensor([0, 1, 3, 4]))
    assert sample(given).kept_tokens.values.dtype == torch.int64


def test_some_with_and_some_without_are_refused() -> None:
    words = "b (number 1 of the micro-batch) has no kept_tokens and a"
    assert_refused(words, pack, [sample([[], [], []], name="a"), sample(None, name="b")])
    some = [sample(None, side_channels={"x": torch.zeros(3)}), sample(None)]
    assert_refused("side_channels['x']", pack, some)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(4, 2), "has 4 rows, expected one per response token (3) or per token of the"),
        ([1, 2, 3], "is a list, expected a tensor or a Ragged"),
        (torch.tensor(1.0), "is a Tensor, expected a tensor or a Ragged"),
    ],
)
def test_wrong_channels_are_named(value: Any, words: str) -> None:
    message = refusal(sample, None, name="a", side_channels={"experts": value})
    assert message.startswith(f"a: side_channels['experts'] {words}")


@pytest.mark.parametrize("cp_rank", (0, 1))
@pytest.mark.parametrize(
    "other", (torch.ones(3).long(), torch.ones(3, 1), Ragged(torch.ones(3), torch.arange(4)))
)
def test_channels_that_differ_are_refused(other: Any, cp_rank: int) -> None:
    """Whoever is packed together: other rows, or a dtype that depends on the packing, would come of
    it.
    """
    channels = {"first": other, "again": other, "odd": torch.ones(3)}
    samples = [
        sample(None, name=name, side_channels={"x": each}) for name, each in channels.items()
    ]
    plain = "a Tensor [response tokens] of torch.float32"
    words = f"side_channels['x'] is a  |  in first and {plain} in odd"
    assert_refused(words, pack, samples, cp_rank=cp_rank, cp_size=2)


def rows_of(ragged: Ragged) -> list[list]:
    return [ragged.row(at).tolist() for at in range(len(ragged))]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_rank_gets_its_own(cp_size: int) -> None:
    """Of random samples, one of them without response, against the layout simulated row by row."""
    rng = random.Random(cp_size)
    shapes = [(3, 9), (1, 0), (2, 1), (5, 14)]
    samples, responses, sequences = [], [], []
    for prompt, length in shapes:
        tokens = [rng.randrange(50) for _ in range(prompt + length)]
        mask = [int(rng.random() < 0.7) for _ in range(length)]
        sets: list[list[int]] = [[] for _ in range(length)]
        for target, ids in zip(tokens[prompt:], sets, strict=True):
            if rng.random() < 0.8:
                ids += {*rng.sample(range(50), rng.randrange(4)), target}
        states, experts = torch.rand(length, 3), torch.randint(8, (prompt + length, 2))
        sizes = torch.tensor(list(map(len, sets)), dtype=torch.int64)
        lists = Ragged(torch.tensor(sum(sets, []), dtype=torch.float64), offsets_of(sizes))
        channels = {"states": states, "experts": experts, "lists": lists}
        samples.append(Sample(tokens, length, mask, kept_tokens=sets, side_channels=channels))
        responses += zip(sets, mask, states, strict=True)
        sequences += experts
    layout = token_layout([p + n for p, n in shapes], [n for _, n in shapes], cp_size)
    for rank, rows in enumerate(layout):
        batch = pack(samples, cp_rank=rank, cp_size=cp_size)
        scored = [responses[row.response] for row in rows if row.response is not None]
        wanted = [ids if keep else [] for ids, keep, _ in scored]
        assert rows_of(batch.kept_tokens) == wanted
        assert batch.kept_set_size.tolist() == list(map(len, wanted))
        found = batch.side_channels
        assert all(torch.equal(a, b[2]) for a, b in zip(found["states"], scored, strict=True))
        assert rows_of(found["lists"]) == [ids for ids, *_ in scored]
        for row, found_experts in zip(rows, found["experts"], strict=True):
            expected = torch.zeros(2) if row.token is None else sequences[row.token]
            assert found_experts.tolist() == expected.tolist()
        of_rows = iter(wanted)
        expected = [[] if row.response is None else next(of_rows) for row in rows]
        assert rows_of(batch.kept_tokens_of_rows) == expected


def test_largest_id_and_empty_micro_batch() -> None:
    assert pack([sample([[1, 40], [2], [3]])]).largest_target == 40
    assert pack([sample([[1], [2], [3, 99]], [1, 1, 0])]).largest_target == 3
    assert len(pack([]).kept_tokens) == 0


@pytest.mark.parametrize("rows", [slice(0, 2), slice(1, 3), slice(2, 2), slice(3, 4)], ids=str)
def test_consecutive_rows_of_a_ragged_tensor(rows: slice) -> None:
    whole = Ragged(torch.arange(1, 7), torch.tensor([0, 2, 2, 3, 6]))
    found = whole.slice(rows)
    assert rows_of(found) == [[1, 2], [], [3], [4, 5, 6]][rows]
    assert int(found.offsets[0]) == 0
