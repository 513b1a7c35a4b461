"""`reduce_padded`: worked numbers, masks of any dtype, refusals. Cuts: `test_cut_invariance`."""

import math
from typing import Any

import pytest
import torch

from megatron_pg.loss.padded import padded_totals, reduce_padded
from tests import oracle
from tests.cut_steps import DIVISOR, assert_same, padded_rows, row_ids
from tests.fast.refusals import assert_refused
from tests.random_steps import random_losses, random_step


def divisor_of(aggregation: str, divisor: float = DIVISOR) -> dict[str, Any]:
    return {"aggregation": aggregation, "divisor": divisor if aggregation == "constant" else None}


WORKED = [(1.0, 2.0), (3.0, 4.0, 5.0, 6.0), (20.0,), (8.0, 9.0, 10.0)]
"""Per-token losses of four samples, two to a prompt group."""
WORKED_MEANS = {"sample_mean": 8.75, "prompt_mean": 7.625, "token_mean": 6.8, "constant": 4.25}


@pytest.mark.parametrize("aggregation", WORKED_MEANS)
def test_the_worked_numbers(aggregation: str) -> None:
    rows = [torch.tensor(row) for row in WORKED]
    loss = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=99.0)
    found = reduce_padded(loss, loss != 99, group_index=[0, 0, 1, 1], **divisor_of(aggregation))
    assert found.item() == pytest.approx(WORKED_MEANS[aggregation], abs=1e-6)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_of_any_dtype_is_counted_exactly(dtype: torch.dtype) -> None:
    """Counted in its own dtype, a bfloat16 mask of 301 tokens has 302; a float16 one of 70,000 has
    infinity.
    """
    lengths = [301, 1000, 5001, 70_000]
    mask = (torch.arange(70_000) < torch.tensor(lengths)[:, None]).to(dtype)
    assert padded_totals(mask, allow_different_group_sizes=True).num_active_tokens == sum(lengths)
    loss = torch.arange(70_000, dtype=torch.float64).expand(4, -1)
    expected = sum((length - 1) / 2 for length in lengths) / 4
    assert reduce_padded(loss, mask).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, *DTYPES])
@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_rows_that_are_the_whole_step_need_no_totals(aggregation: str, dtype: torch.dtype) -> None:
    """Rollouts of two rows included. 1 / 3 in the dtype of the mask, or in float32, is another
    number.
    """
    step = random_step(7)
    losses = random_losses(step)
    loss, mask = padded_rows(step, losses)
    found = reduce_padded(loss, mask.to(dtype), **divisor_of(aggregation, 3.0), **row_ids(step))
    assert_same(found, oracle.aggregate(step, losses, aggregation, 3.0), losses)


def test_a_step_without_active_tokens_is_zero_and_attached() -> None:
    loss = torch.ones(2, 3, requires_grad=True)
    for aggregation in ("sample_mean", "token_mean"):
        reduced = reduce_padded(loss, torch.zeros(2, 3), aggregation=aggregation)
        assert reduced.item() == 0.0 and reduced.requires_grad


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"aggregation": "mean"}, "--loss-aggregation must be one of .* not 'mean'"),
        ({"aggregation": "constant"}, "-aggregation constant requires --loss-aggregation-divisor"),
        ({"aggregation": "constant", "divisor": -1.0}, "--loss-aggregation-divisor .* not -1"),
        ({"divisor": 4.0}, "belongs to --loss-aggregation constant"),
        ({"aggregation": "prompt_mean"}, "row 0 has no group_index"),
        ({"aggregation": "prompt_mean", "group_index": [0]}, "group_index has 1 ids for 2 rows"),
        ({"rollout_id": [1, 2, 3]}, "rollout_id has 3 ids for 2 rows"),
        ({"aggregation": "prompt_mean", "group_index": [0.5, 0.7]}, r"group_index\[0\] is 0.5"),
        ({"rollout_id": [1, math.nan]}, r"rollout_id\[1\] is nan"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        ({"data_parallel_size": 2.5}, "data_parallel_size is 2.5, expected an integer"),
        ({"aggregation": "constant", "divisor": True}, "divisor must be .* not True"),
        ({"mask": [[1, 1, 0], [1, 0, 0]]}, r"mask is a list, expected a tensor \[batch, length\]"),
        ({"mask": torch.ones(2, 4)}, r"loss has shape \[2, 3\] and mask \[2, 4\]"),
        ({"mask": torch.ones(3, 2)}, r"loss has shape \[2, 3\] and mask \[3, 2\]"),
        ({"mask": torch.ones(6)}, r"expected \[batch, length\]"),
        ({"mask": torch.tensor([[1, 1, 0], [1, 0, 0.5]])}, r"mask\[1, 2\] is 0.5"),
        ({"mask": torch.tensor([[1, 1, 0], [1, 2, 0]])}, r"mask\[1, 1\] is 2"),
        ({"mask": torch.tensor([[1, 1, 0], [1, torch.nan, 0]])}, r"mask\[1, 1\] is nan"),
    ],
)
def test_bad_input_is_named(keywords: dict[str, Any], message: str) -> None:
    mask = keywords.pop("mask", torch.ones(2, 3))
    with pytest.raises(ValueError, match=message):
        reduce_padded(torch.ones(2, 3), mask, **keywords)


@pytest.mark.parametrize(
    ("counted", "given", "words"),
    [
        ({}, {"rollout_id": [5, 6]}, "row 0: rollout_id 5  |  padded_totals with rollout_id"),
        ({"group_index": [4, 5]}, {"group_index": [4, 6]}, "row 1: group_index 6"),
        ({"rollout_id": [4, 4]}, {}, "rollout_id"),
    ],
)
def test_rows_that_the_totals_do_not_know_are_named(counted, given, words: str) -> None:
    ones, aggregation = torch.ones(2, 3), "prompt_mean" if "group_index" in given else "sample_mean"
    totals = padded_totals(ones, allow_different_group_sizes=True, **counted)
    given = {"totals": totals, "aggregation": aggregation, **given}
    assert_refused(words, reduce_padded, ones, ones, **given)
