"""The reducer factory: one closure per micro-batch and rank, against the oracle's weights."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import AGGREGATIONS, get_pg_loss_reducer
from tests import oracle
from tests.cut_steps import DIVISOR, assert_same
from tests.dispatches import CountDispatches
from tests.fast.refusals import assert_refused
from tests.random_steps import (
    lengths,
    loss_masks,
    package_samples,
    random_losses,
    random_step,
    uneven_totals,
)
from tests.token_layout import token_layout

CP_SIZES = (1, 2, 4, 8)


def scored(step: list[oracle.PlainSample], cp_rank: int, cp_size: int) -> list[int]:
    """Indices into the flat responses that the oracle hands to this rank."""
    layout = token_layout(*lengths(step), cp_size)
    return [row.response for row in layout[cp_rank] if row.response is not None]


def arguments(step: list[oracle.PlainSample], aggregation: str) -> dict:
    """The keyword arguments that give an aggregation the totals of the step."""
    samples = package_samples(step)
    denominators = AGGREGATIONS[aggregation].denominators(uneven_totals(samples), samples)
    divisor = DIVISOR if aggregation == "constant" else None
    return {"aggregation": aggregation, "divisor": divisor, "denominators": denominators}


def sum_over_ranks(step, losses: list[Tensor], cp_size: int, *args: Any, **keywords: Any) -> Tensor:
    """The sum of what the reducers of a context-parallel group give."""
    flat, found = torch.cat(losses), torch.zeros((), dtype=torch.float64)
    for cp_rank in range(cp_size):
        place = {"cp_rank": cp_rank, "cp_size": cp_size}
        reducer = get_pg_loss_reducer(*lengths(step), loss_masks(step), *args, **place, **keywords)
        part = reducer(flat[scored(step, cp_rank, cp_size)])
        assert part.shape == ()
        found = found + part
    return found


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("aggregation", ("sample_mean", "prompt_mean", "token_mean"))
def test_per_token_mode_is_the_masked_token_sum(aggregation: str, cp_size: int) -> None:
    """Whatever the aggregation; this is what custom reducers of the field are asked for."""
    step = random_step(seed=12)
    losses = random_losses(step)
    found = sum_over_ranks(step, losses, cp_size, True, aggregation=aggregation)
    assert_same(found, oracle.masked_sum(step, losses, range(len(step))), losses)


def test_positional_signature_of_custom_reducers() -> None:
    parameters = list(inspect.signature(get_pg_loss_reducer).parameters.values())
    names = ["total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"]
    assert [parameter.name for parameter in parameters[:4]] == names
    assert parameters[3].default is False
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[4:])
    expected: dict = dict.fromkeys(("divisor", "denominators", "cp_rank", "cp_size"))
    expected |= {"aggregation": "sample_mean", "qkv_format": "thd"}
    assert {parameter.name: parameter.default for parameter in parameters[4:]} == expected
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1])]
    x = torch.tensor([1.0, 50.0, 3.0, 7.0])
    for per_token, expected in (((), 2.0 + 7.0), ((False,), 2.0 + 7.0), ((True,), 11.0)):
        assert get_pg_loss_reducer([5, 2], [3, 1], masks, *per_token)(x).item() == expected


@pytest.mark.parametrize("dtype", (torch.bool, torch.int64, torch.int32, torch.float32))
def test_masks_of_any_dtype(dtype: torch.dtype) -> None:
    reducer = get_pg_loss_reducer([4], [3], [torch.tensor([1, 0, 1]).to(dtype)])
    assert reducer(torch.tensor([2.0, 9.0, 4.0])).item() == 3.0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_low_precision_losses_are_summed_in_float32(dtype: torch.dtype) -> None:
    """4,096 ones stall at 256 in bfloat16."""
    reducer = get_pg_loss_reducer([4097], [4096], [torch.ones(4096)], True)
    total = reducer(torch.ones(4096, dtype=dtype))
    assert total.dtype == torch.float32 and total.item() == 4096.0


def test_denominators_default_to_the_samples_own() -> None:
    step = [sample for sample in random_step(seed=13) if sample.rollout_id is None]
    losses = random_losses(step)
    found = get_pg_loss_reducer(*lengths(step), loss_masks(step))(torch.cat(losses)) / len(step)
    assert_same(found, oracle.sample_mean(step, losses), losses)


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean"])
def test_per_token_mode_leaves_the_denominators_out(aggregation: str) -> None:
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1])]

    def reducer(denominators: list[float]) -> Any:
        keywords: Any = {"aggregation": aggregation, "denominators": denominators}
        return get_pg_loss_reducer([5, 2], [3, 1], masks, True, **keywords)

    assert reducer([3.0, 3.0])(torch.tensor([1.0, 50.0, 3.0, 7.0])).item() == 11.0
    assert_refused("denominators", reducer, [3.0])


def test_reducer_can_be_called_again() -> None:
    """Once a loss, once a KL term, once under inference mode: nothing is used up, each precision
    has its own result.
    """
    reducer = get_pg_loss_reducer([4], [3], [torch.tensor([1, 0, 1])])
    x = torch.tensor([2.0, 9.0, 4.0], requires_grad=True)
    with torch.inference_mode():
        assert reducer(x).item() == 3.0
    assert reducer(2 * x).item() == 6.0 and reducer(x.double()).dtype == torch.float64
    reducer(x).backward()
    assert x.grad.tolist() == [0.5, 0.0, 0.5]


def test_denominators_above_the_integers_of_float32_are_exact() -> None:
    """2^24 + 1 active tokens of a prompt group; float32 holds 2^24."""
    count = 2**24 + 1
    group: Any = {"aggregation": "prompt_mean", "denominators": [count]}
    reducer = get_pg_loss_reducer([3], [1], [torch.ones(1)], **group)
    assert reducer(torch.ones(1, dtype=torch.float64)).item() == 1 / count


@pytest.mark.parametrize("garbage", (math.nan, math.inf, -math.inf))
def test_garbage_at_an_active_position_stays_visible(garbage: float) -> None:
    reducer = get_pg_loss_reducer([4], [3], [torch.tensor([0, 1, 1])])
    assert not reducer(torch.tensor([0.0, garbage, 1.0])).isfinite()


def count_reducer_dispatches(num_samples: int, aggregation: str, dtype: torch.dtype) -> list:
    """Operators of the first call of a fresh reducer, forward and backward."""
    row = AGGREGATIONS[aggregation]
    needs_denominators = row.denominator is not None and not row.defaults_to_own_tokens
    reducer = get_pg_loss_reducer(
        [7] * num_samples,
        [4] * num_samples,
        [torch.tensor([1, 0, 1, 1])] * num_samples,
        aggregation=aggregation,
        divisor=DIVISOR if aggregation == "constant" else None,
        denominators=[3] * num_samples if needs_denominators else None,
        cp_rank=1,
        cp_size=2,
    )
    x = torch.ones(4 * num_samples, dtype=dtype, requires_grad=True)
    with CountDispatches(may_synchronise=False) as forward:
        value = reducer(x)
    with CountDispatches(may_synchronise=False) as backward:
        value.backward()
    return [forward.names, backward.names]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_dispatches_do_not_grow_with_samples(aggregation: str, dtype: torch.dtype) -> None:
    counted = count_reducer_dispatches(1, aggregation, dtype)
    assert counted == count_reducer_dispatches(1000, aggregation, dtype)
    assert all(1 <= len(names) <= 8 for names in counted)


def test_mutant_the_count_would_notice_a_loop_over_samples() -> None:
    """The check's own check: a reducer in the style of the field dispatches per sample."""

    def looped(x: Tensor) -> Tensor:
        return torch.stack([part.mean() for part in x.split(4)]).sum()

    with CountDispatches() as one:
        looped(torch.ones(4))
    with CountDispatches() as many:
        looped(torch.ones(400))
    assert len(many.names) > len(one.names) + 50
    with pytest.raises(AssertionError, match="synchronises"):
        with CountDispatches(may_synchronise=False):
            torch.ones(1).item()


@pytest.mark.parametrize("cp_rank", (0, 1))
def test_wrong_length_raises_with_both_sizes(cp_rank: int) -> None:
    masks = [torch.ones(6), torch.ones(3)]
    reducer = get_pg_loss_reducer([9, 5], [6, 3], masks, cp_rank=cp_rank, cp_size=2)
    layout = token_layout([9, 5], [6, 3], 2)
    size = sum(row.response is not None for row in layout[cp_rank])
    reducer(torch.zeros(size))
    for wrong in (size - 1, size + 1, 9 if size != 9 else 10):
        assert_refused(f"[{wrong}], expected [{size}]", reducer, torch.zeros(wrong))
    assert_refused(f"[1, {size}], expected [{size}]", reducer, torch.zeros(1, size))
