"""Bad input is refused before a step, with an error that names field, sample, found and expected.

One table a door into the package: the samples, the packing, the step's totals, the reducer factory,
the settings, the loss. An error that a user cannot act on counts as a failure here.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_pg
from megatron_pg import AGGREGATIONS, Sample, get_pg_loss_reducer, pack
from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.from_logits import policy_loss_function
from megatron_pg.step import plan_step
from tests.random_steps import uneven_totals

NAME = "task-7/answer-2"
PER_TOKEN_FIELDS = (
    "loss_mask",
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
)
VOCABULARY = 8


def sample(**fields: Any) -> Sample:
    """A good sample of two prompt and three response tokens, but for the given fields."""
    good: dict[str, Any] = {
        "tokens": [1, 2, 3, 4, 5],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "advantages": [0.5, 0.25, -1.0],
        "old_log_probs": [-1.0, -2.0, -0.5],
        "group_index": 11,
        "name": NAME,
    }
    return Sample(**{**good, **fields})


def refusal_of(call: Any, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as refusal:
        call()
    return str(refusal.value)


# --------------------------------------------------------------------------------------------------
# Samples
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("field", PER_TOKEN_FIELDS)
def test_a_per_token_field_of_the_wrong_size(field, size):
    message = refusal_of(lambda: sample(**{field: [1.0] * size}))
    for word in (NAME, field, f"{size} values", "response token", "(3)"):
        assert word in message


@pytest.mark.parametrize("field", PER_TOKEN_FIELDS)
@pytest.mark.parametrize(
    "values", [torch.ones(1, 3), [[1.0, 1.0, 1.0]], [[1.0], [1.0, 2.0]], "101"]
)
def test_a_per_token_field_that_is_no_vector(field, values):
    message = refusal_of(lambda: sample(**{field: values}))
    assert NAME in message
    assert field in message


@pytest.mark.parametrize("value", [2, -1, 0.5, 2.0**-30, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("container", [list, np.array, torch.tensor])
def test_a_mask_value_other_than_0_and_1(value, position, container):
    mask: list[float] = [1, 0, 1]
    mask[position] = value
    message = refusal_of(lambda: sample(loss_mask=container(mask)))
    for word in (NAME, f"loss_mask[{position}]", str(float(value))[:3], "expected 0 or 1"):
        assert word in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_advantage_that_is_no_number_at_an_active_token(value):
    message = refusal_of(lambda: sample(advantages=[0.0, 0.0, value]))
    for word in (NAME, "advantages[2]", str(value), "finite"):
        assert word in message
    # the same at a masked position harms nobody
    assert sample(advantages=[0.0, value, 0.0]).num_active_tokens == 2


@pytest.mark.parametrize(
    "advantage",
    [1e39, -1e39, 10**400, np.float64(1e39), torch.tensor(1e39, dtype=torch.float64)],
    ids=["float", "below", "integer", "numpy", "tensor"],
)
def test_one_advantage_that_float32_does_not_hold(advantage):
    message = refusal_of(lambda: sample(advantages=advantage))
    for word in (NAME, "advantages is ", "float32"):
        assert word in message


@pytest.mark.parametrize("field", ["tokens", *PER_TOKEN_FIELDS])
@pytest.mark.parametrize("first", [0.5, 1])
def test_an_integer_that_no_tensor_holds(field, first):
    message = refusal_of(lambda: sample(**{field: [first, 10**400, 10**400]}))
    assert NAME in message and field in message


LENGTHS = {
    "negative": (-1, "expected 0 or more"),
    "whole sequence": (5, "prompt needs at least one token"),
    "longer than the sequence": (6, "prompt needs at least one token"),
    "a fraction": (2.5, "expected an integer"),
    "missing": (None, "expected an integer"),
    "a truth value": (True, "expected an integer"),
    "a tensor of a float": (torch.tensor(3.0), "expected an integer"),
}
NO_INTEGERS = [torch.tensor(3.0), torch.tensor(True), torch.tensor([3, 4]), np.float64(3.0)]


@pytest.mark.parametrize("case", LENGTHS)
def test_a_response_length_that_cannot_be(case):
    length, expected = LENGTHS[case]
    message = refusal_of(lambda: sample(response_length=length))
    for word in (NAME, "response_length", str(length), expected):
        assert word in message


def test_an_empty_response_is_legal_and_an_empty_sequence_is_not():
    empty: dict[str, Any] = {"loss_mask": [], "advantages": 0.0, "old_log_probs": []}
    assert sample(response_length=0, **empty).num_active_tokens == 0
    message = refusal_of(lambda: sample(tokens=[], response_length=0, **empty))
    assert NAME in message and "prompt" in message


@pytest.mark.parametrize(
    "tokens", [[1.0, 2.0, 3.0, 4.0, 5.0], torch.ones(1, 5).long(), "12345", None, [1, 2, None]]
)
def test_tokens_that_are_no_vector_of_integers(tokens):
    message = refusal_of(lambda: sample(tokens=tokens))
    assert NAME in message and "tokens" in message


@pytest.mark.parametrize("field", ["group_index", "rollout_id"])
@pytest.mark.parametrize("value", [1.0, "1", math.nan, True, 2**63, -(2**63) - 1, *NO_INTEGERS])
def test_an_identifier_that_is_no_64_bit_integer(field, value):
    message = refusal_of(lambda: sample(**{field: value}))
    for word in (NAME, field, repr(value), "integer"):
        assert word in message
    assert getattr(sample(**{field: -(2**63)}), field) == -(2**63)


# --------------------------------------------------------------------------------------------------
# Packing and the step's totals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["old_log_probs", "ref_log_probs", "rollout_log_probs"])
def test_log_probs_that_only_some_samples_carry(field):
    has = sample(**{field: [-1.0] * 3}, name="has them")
    lacks = sample(**{field: None}, name="lacks them")
    for samples in ([has, lacks], [lacks, has]):
        message = refusal_of(lambda samples=samples: pack(samples))
        for word in (field, "lacks them", "has no", "has them"):
            assert word in message


@pytest.mark.parametrize("size", ["cp_rank", "cp_size", "pad_to_multiple"])
@pytest.mark.parametrize("value", [2.0, 1.5, "2", True, None, math.nan])
def test_a_size_that_is_no_integer(size, value):
    """A layout of 2.0 ranks would come to a slice of floats, deep in torch."""
    message = refusal_of(lambda: pack([sample()], **{size: value}))
    assert f"{size} is {value!r}, expected an integer" in message
    if size != "cp_rank":
        plan = lambda: plan_step([sample()], max_tokens_per_microbatch=64, **{size: value})  # noqa: E731
        assert refusal_of(plan) == message


def test_a_number_of_bins_that_is_no_integer():
    for name in ("microbatch_group_size", "max_tokens_per_microbatch"):
        sizes: dict[str, Any] = {"max_tokens_per_microbatch": 64, name: 2.5}
        message = refusal_of(lambda sizes=sizes: plan_step([sample()], **sizes))
        assert "2.5" in message and "integer" in message


def test_packing_under_inference_mode():
    """Symptom: "Inference tensors cannot be saved for backward", at the first training step."""
    with torch.inference_mode():
        made = sample()
        with pytest.raises(RuntimeError, match=r"pack\(\) under torch.inference_mode\(\)"):
            pack([made])
    with torch.no_grad():
        pack([made])
    batch = pack([made])
    logits = torch.zeros(batch.window.local_tokens, VOCABULARY, requires_grad=True)
    loss, _ = policy_loss_function(PolicyLossConfig(), batch, logits, totals=uneven_totals([made]))
    loss.backward()


def test_a_group_id_that_is_missing_is_never_read_as_one_group():
    samples = [sample(), sample(group_index=None, name="no group")]
    totals = uneven_totals(samples)
    prompt_mean = AGGREGATIONS["prompt_mean"]
    message = refusal_of(lambda: prompt_mean.denominators(totals, samples))
    for word in ("no group", "group_index", "prompt_mean"):
        assert word in message
    message = refusal_of(lambda: prompt_mean.outer_count(totals))
    assert "no group has no group_index" in message
    config = PolicyLossConfig(loss_aggregation="prompt_mean")
    batch = pack(samples)
    logits = torch.zeros(batch.window.local_tokens, VOCABULARY)
    message = refusal_of(lambda: policy_loss_function(config, batch, logits, totals=totals))
    assert "no group has no group_index" in message


# --------------------------------------------------------------------------------------------------
# The reducer factory
# --------------------------------------------------------------------------------------------------

FACTORY = {
    "mask too short": (
        {"loss_masks": [torch.ones(3), torch.ones(1)]},
        ["loss_masks[1]", "[1]", "[2]", "response_length"],
    ),
    "mask too long": (
        {"loss_masks": [torch.ones(4), torch.ones(2)]},
        ["loss_masks[0]", "[4]", "[3]"],
    ),
    "mask of two dimensions": (
        {"loss_masks": [torch.ones(1, 3), torch.ones(2)]},
        ["loss_masks[0]", "[1, 3]", "[3]"],
    ),
    "one mask too many": ({"loss_masks": [torch.ones(3)] * 3}, ["loss_masks", "3", "2"]),
    "mask of twos": (
        {"loss_masks": [torch.ones(3), torch.full((2,), 2.0)]},
        ["loss_masks[1]", "0 or 1", "2.0"],
    ),
    "mask with NaN": (
        {"loss_masks": [torch.tensor([math.nan, 1.0, 1.0]), torch.ones(2)]},
        ["loss_masks[0]", "0 or 1", "nan"],
    ),
    "a length missing": ({"response_lengths": [3]}, ["response_lengths", "total_lengths"]),
    "a negative response": ({"response_lengths": [3, -1]}, ["response_lengths[1]", "-1"]),
    "a sequence of no token": (
        {"total_lengths": [5, 0], "response_lengths": [3, 0]},
        ["total_lengths[1]", "0", "at least 1"],
    ),
    "no prompt": ({"total_lengths": [3, 4]}, ["sample 0", "prompt"]),
    "response longer than all": (
        {"total_lengths": [2, 4]},
        ["response_lengths[0]", "3", "total_lengths[0]", "2"],
    ),
    "unknown mode": ({"aggregation": "seq_mean"}, ["'seq_mean'", *AGGREGATIONS]),
    "prompt mean of unknown groups": ({"aggregation": "prompt_mean"}, ["denominators"]),
    "a denominator missing": ({"denominators": [3.0]}, ["denominators", "[1]", "(2)"]),
    "divisor of another mode": ({"divisor": 4.0}, ["divisor 4.0", "sample_mean", "constant"]),
    **{
        f"divisor {divisor}": (
            {"aggregation": "constant", "divisor": divisor},
            ["--loss-aggregation-divisor", str(divisor), "finite"],
        )
        for divisor in (None, 0, -1, math.nan, math.inf)
    },
    "rank outside its group": ({"cp_rank": 2, "cp_size": 2}, ["cp_rank 2", "cp_size 2"]),
    "unknown cut": ({"cp_partition_mode": "slices"}, ["cp_partition_mode", "'slices'", "zigzag"]),
    "unknown layout": ({"qkv_format": "sbhd"}, ["--qkv-format", "'sbhd'", "thd"]),
    "rank without a size": ({"cp_rank": 1}, ["cp_rank"]),
    "size without a rank": ({"cp_size": 2}, ["cp_rank is not given"]),
    "size of zero": ({"cp_size": 0}, ["cp_size is 0"]),
    "half a mask": ({"loss_masks": [torch.ones(3), torch.full((2,), 0.5)]}, ["loss_masks[1]"]),
    **{
        f"length {length}": ({"total_lengths": [length, 4]}, ["total_lengths[0]", "integer"])
        for length in (5.5, True, "5")
    },
    **{
        f"denominator {value}": (
            {"denominators": [value, 1.0]},
            ["denominators[0]", "count of active tokens"],
        )
        for value in (math.nan, math.inf, -1.0)
    },
}


@pytest.mark.parametrize("case", FACTORY)
def test_the_factory_refuses(case):
    changes, words = FACTORY[case]
    good: dict[str, Any] = {
        "total_lengths": [5, 4],
        "response_lengths": [3, 2],
        "loss_masks": [torch.ones(3), torch.ones(2)],
    }
    message = refusal_of(lambda: get_pg_loss_reducer(**{**good, **changes}))
    for word in words:
        assert word in message


def test_bshd_under_context_parallelism():
    inputs: tuple[Any, ...] = ([5], [3], [torch.ones(3)])
    with pytest.raises(NotImplementedError, match="--qkv-format thd"):
        get_pg_loss_reducer(*inputs, cp_rank=0, cp_size=2, qkv_format="bshd")
    assert get_pg_loss_reducer(*inputs, qkv_format="bshd")(torch.ones(3)).item() == 1.0


# --------------------------------------------------------------------------------------------------
# The loss
# --------------------------------------------------------------------------------------------------

UNBIASED = {"policy_loss": "reinforce", "kl_loss_coef": 0.1, "use_unbiased_kl": True}


@pytest.mark.parametrize(
    ("field", "settings", "flag"),
    [
        ("old_log_probs", {}, "--policy-loss ppo"),
        ("old_log_probs", UNBIASED, "--use-unbiased-kl"),
        ("ref_log_probs", {"kl_loss_coef": 0.1}, "--kl-loss-coef 0.1"),
        ("rollout_log_probs", {"use_tis": True}, "--use-tis"),
    ],
)
def test_an_input_that_a_setting_needs(field, settings, flag):
    bare = sample(**{field: None})
    batch, totals = pack([bare]), uneven_totals([bare])
    logits = torch.zeros(batch.window.local_tokens, VOCABULARY, requires_grad=True)
    config = PolicyLossConfig(**settings)
    message = refusal_of(lambda: policy_loss_function(config, batch, logits, totals=totals))
    for word in (NAME, field, flag):
        assert word in message


# --------------------------------------------------------------------------------------------------
# All of the package
# --------------------------------------------------------------------------------------------------


def test_no_refusal_disappears_under_python_O_or_is_swallowed():
    """An ``assert`` is no check of a user's input, and a bare ``except`` hides what was wrong."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(megatron_pg.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.ExceptHandler) and node.type is None)
    ]
    assert not found


# --------------------------------------------------------------------------------------------------
# What was once accepted in silence
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token_mean", "constant"])
def test_denominators_that_the_aggregation_would_ignore(aggregation):
    divisor = 4.0 if aggregation == "constant" else None
    message = refusal_of(
        lambda: get_pg_loss_reducer(
            [6], [3], [torch.ones(3)], aggregation=aggregation, divisor=divisor, denominators=[3]
        )
    )
    assert aggregation in message


def test_masks_as_lists_and_as_one_matrix_are_masks():
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for masks in ([[1, 0], [1, 1]], torch.tensor([[1, 0], [1, 1]])):
        reducer = get_pg_loss_reducer([4, 5], [2, 2], masks)  # type: ignore[arg-type]
        assert float(reducer(losses)) == 1.0 + 3.5


@pytest.mark.parametrize("field", ["old_log_probs", "ref_log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("value", [0.5, 0.0625, 1e-3, math.inf, -math.inf, -1e300])
def test_a_log_prob_that_is_none(field, value):
    """At an active token; 0.0625 is what a log-softmax in bfloat16 may leave, of logits of 16."""
    with pytest.raises(
        ValueError, match=rf"row 7: {field}\[2\] is .* at an active token, expected a log-prob"
    ):
        Sample([1] * 5, 4, [1, 0, 1, 1], name="row 7", **{field: [-1.0, value, value, -1.0]})
    given = {field: [-1.0, value, -1.0, -1.0]}
    Sample([1] * 5, 4, [1, 0, 1, 1], **given)


def test_log_probs_that_rounding_leaves_above_0_are_log_probs():
    """z - logsumexp(z) in float32, one token with nearly all of the probability, logits up to 8192."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(512, 64, generator=generator) * 16
    logits[:, 0] = torch.rand(512, generator=generator) * 8191
    log_probs = logits[:, 0] - logits.logsumexp(1)
    assert (log_probs > 0).any() or (log_probs == 0).any()
    Sample([1] * 513, 512, [1] * 512, old_log_probs=log_probs, ref_log_probs=[2.0**-10] * 512)
    Sample([1] * 2, 1, [1], old_log_probs=[math.nan])  # which the step's metrics name


def test_a_negative_response_token():
    message = refusal_of(lambda: sample(tokens=[1, 2, 3, -100, 5]))
    for word in (NAME, "tokens[3]", "-100"):
        assert word in message
    assert sample(tokens=[-200, 2, 3, 4, 5]).prompt_length == 2  # a placeholder in the prompt


def test_a_response_token_outside_the_vocabulary():
    batch = pack([sample(tokens=[1, 2, 3, VOCABULARY, 5])])
    logits = torch.zeros(batch.window.local_tokens, VOCABULARY)
    totals = uneven_totals(batch.samples)
    message = refusal_of(
        lambda: policy_loss_function(PolicyLossConfig(), batch, logits, totals=totals)
    )
    for word in (NAME, "outside the vocabulary", str(VOCABULARY)):
        assert word in message


def test_a_sample_keeps_its_values_when_the_buffer_they_came_from_changes():
    buffer = torch.tensor([-1.0, -2.0, -0.5])
    kept = sample(old_log_probs=buffer)
    buffer.fill_(0.0)
    assert kept.old_log_probs is not None and kept.old_log_probs.tolist() == [-1.0, -2.0, -0.5]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_no_default_dtype_rounds_the_numbers_of_a_sample(dtype):
    """A trainer may have set it to its model's, which would take 0.4 % off a ratio."""
    numbers = [-0.1234567, -2.7182817, -9.8765432]

    def made() -> Sample:
        per_token = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "returns", "old_values")
        fields: dict[str, Any] = dict.fromkeys(per_token, numbers)
        weights = [-each for each in numbers]
        return Sample([1] * 4, 3, [1] * 3, advantages=numbers[0], loss_weights=weights, **fields)

    expected = made()
    torch.set_default_dtype(dtype)
    try:
        found = made()
    finally:
        torch.set_default_dtype(torch.float32)
    for field in dataclasses.fields(Sample):
        value = getattr(expected, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(found, field.name), value), field.name
            assert getattr(found, field.name).dtype == value.dtype


def test_numpy_integers_and_scalars_are_numbers():
    kept = sample(response_length=np.int64(3), advantages=np.float32(0.5))
    assert kept.response_length == 3 and kept.advantages.tolist() == [0.5] * 3


def test_one_advantage_as_an_array_without_dimensions():
    assert sample(advantages=np.array(0.5)).advantages.tolist() == [0.5] * 3
    message = refusal_of(lambda: sample(advantages=np.array("much")))
    assert NAME in message and "advantages" in message
