"""Bad input is refused before a step, with an error that names field, sample, found and expected.

One table a door into the package: the samples, the packing, the step's totals, the reducer factory,
the settings, the loss. An error that a user cannot act on counts as a failure here.
"""

import ast
import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_pg
from megatron_pg import AGGREGATIONS, Sample, get_pg_loss_reducer, pack
from megatron_pg.config import PolicyLossConfig
from megatron_pg.critic.gae import whiten
from megatron_pg.loss.from_logits import policy_loss_function
from megatron_pg.rollout_files import RewardedSample
from megatron_pg.rollout_files.schema import sample_of_row
from megatron_pg.step import plan_step
from tests.fast.refusals import assert_refused
from tests.random_steps import uneven_totals

NAME = "task-7/answer-2"
LOG_PROBS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
PER_TOKEN_FIELDS = ("loss_mask", "advantages", *LOG_PROBS)
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


def loss_of(samples: list[Sample], **settings: Any) -> torch.Tensor:
    batch = pack(samples)
    logits = torch.zeros(batch.window.local_tokens, VOCABULARY, requires_grad=True)
    config, totals = PolicyLossConfig(**settings), uneven_totals(samples)
    return policy_loss_function(config, batch, logits, totals=totals)[0]


# Samples.


@pytest.mark.parametrize("field", ["old_log_probs", "no_field"])
def test_a_sample_cannot_be_changed(field):
    with pytest.raises(dataclasses.FrozenInstanceError) as refusal:
        setattr(sample(), field, [0.0] * 3)
    assert f"{NAME}: {field} cannot be set" in str(refusal.value)
    assert f"sample = dataclasses.replace(sample, {field}=...)" in str(refusal.value)


@pytest.mark.parametrize("size", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("field", PER_TOKEN_FIELDS)
def test_a_per_token_field_of_the_wrong_size(field, size):
    words = f"{NAME} | {field} | {size} values | response token | (3)"
    assert_refused(words, sample, **{field: [1.0] * size})


@pytest.mark.parametrize("value", [2, -1, 0.5, 2.0**-30, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("container", [list, np.array, torch.tensor])
def test_a_mask_value_other_than_0_and_1(value, position, container):
    mask: list[float] = [1, 0, 1]
    mask[position] = value
    words = f"{NAME} | loss_mask[{position}] | {str(float(value))[:3]} | expected 0 or 1"
    assert_refused(words, sample, loss_mask=container(mask))


HUGE = 1e39
DOUBLE = torch.tensor(HUGE, dtype=torch.float64)
NO_INTEGERS = [torch.tensor(3.0), torch.tensor(True), torch.tensor([3, 4]), np.float64(3.0)]
IDS = [1.0, "1", math.nan, True, 2**63, -(2**63) - 1, *NO_INTEGERS]
# field, its value, words of the refusal beside the sample's name
SAMPLES = [
    *((field, value, field) for field in PER_TOKEN_FIELDS
      for value in (torch.ones(1, 3), [[1.0, 1.0, 1.0]], [[1.0], [1.0, 2.0]], "101")),
    *((field, [first, 10**400, 10**400], field)
      for field in ("tokens", *PER_TOKEN_FIELDS) for first in (0.5, 1)),
    *(("advantages", value, "advantages is  | float32")
      for value in (HUGE, -HUGE, 10**400, np.float64(HUGE), DOUBLE)),
    ("advantages", np.array("much"), "advantages"),
    ("response_length", -1, "-1 | expected 0 or more"),
    ("response_length", 5, "5 | prompt needs a token"),
    ("response_length", 6, "6 | prompt needs a token"),
    *(("response_length", value, f"{value!s} | expected an integer")
      for value in (2.5, None, True, torch.tensor(3.0))),
    *(("tokens", value, "tokens")
      for value in ([1.0] * 5, torch.ones(1, 5).long(), "12345", None, [1, 2, None])),
    ("tokens", [1, 2, 3, -100, 5], "tokens[3] | -100"),
    *((field, value, f"{value!r} | integer")
      for field in ("group_index", "rollout_id") for value in IDS),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "words"), SAMPLES)
def test_a_field_of_a_sample_that_cannot_be(field, value, words):
    assert_refused(f"{NAME} | {field} | {words}", sample, **{field: value})


def test_values_at_the_edge_of_what_a_sample_may_be():
    empty: dict[str, Any] = {"loss_mask": [], "advantages": 0.0, "old_log_probs": []}
    assert sample(response_length=0, **empty).num_active_tokens == 0
    assert_refused(f"{NAME} | prompt", sample, tokens=[], response_length=0, **empty)
    for field in ("group_index", "rollout_id"):
        assert getattr(sample(**{field: -(2**63)}), field) == -(2**63)
    assert sample(tokens=[-200, 2, 3, 4, 5]).prompt_length == 2  # a placeholder in the prompt
    kept = sample(response_length=np.int64(3), advantages=np.float32(0.5))
    assert kept.response_length == 3 and kept.advantages.tolist() == [0.5] * 3
    assert sample(advantages=np.array(0.5)).advantages.tolist() == [0.5] * 3


# Packing and the step's totals.


@pytest.mark.parametrize("field", LOG_PROBS)
def test_log_probs_that_only_some_samples_carry(field):
    has = sample(**{field: [-1.0] * 3}, name="has them")
    lacks = sample(**{field: None}, name="lacks them")
    for samples in ([has, lacks], [lacks, has]):
        assert_refused(f"{field} | lacks them | has no | has them", pack, samples)


@pytest.mark.parametrize("size", ["cp_rank", "cp_size", "pad_to_multiple"])
@pytest.mark.parametrize("value", [2.0, 1.5, "2", True, None, math.nan])
def test_a_size_that_is_no_integer(size, value):
    """A layout of 2.0 ranks would come to a slice of floats, deep in torch."""
    words, sizes = f"{size} is {value!r}, expected an integer", {size: value}
    assert_refused(words, pack, [sample()], **sizes)
    if size != "cp_rank":
        assert_refused(words, plan_step, [sample()], max_tokens_per_microbatch=64, **sizes)


def test_a_number_of_bins_that_is_no_integer():
    for name in ("microbatch_group_size", "max_tokens_per_microbatch"):
        sizes: dict[str, Any] = {"max_tokens_per_microbatch": 64, name: 2.5}
        assert_refused("2.5 | integer", plan_step, [sample()], **sizes)


def test_packing_under_inference_mode():
    """Symptom: "Inference tensors cannot be saved for backward", at the first training step."""
    with torch.inference_mode():
        made = sample()
        assert_refused("pack() under torch.inference_mode()", pack, [made], error=RuntimeError)
    with torch.no_grad():
        pack([made])
    loss_of([made]).backward()


def test_a_group_id_that_is_missing_is_never_read_as_one_group():
    samples = [sample(), sample(group_index=None, name="no group")]
    totals = uneven_totals(samples)
    prompt_mean = AGGREGATIONS["prompt_mean"]
    words = "no group | group_index | prompt_mean"
    assert_refused(words, prompt_mean.denominators, totals, samples)
    words = "no group (number 1 of data-parallel rank 0) has no group_index"
    assert_refused(words, prompt_mean.outer_count, totals)
    assert_refused(words, loss_of, samples, loss_aggregation="prompt_mean")


# The reducer factory.

# case: (changed arguments, words of the refusal)
FACTORY = {
    "mask too short": ({"loss_masks": [torch.ones(3), torch.ones(1)]}, "loss_masks[1] | [1] | [2] "
                                                                       "| response_length"),
    "mask too long": ({"loss_masks": [torch.ones(4), torch.ones(2)]}, "loss_masks[0] | [4] | [3]"),
    "mask of two dimensions": ({"loss_masks": [torch.ones(1, 3), torch.ones(2)]}, "loss_masks[0] | "
                                                                                  "[1, 3] | [3]"),
    "one mask too many": ({"loss_masks": [torch.ones(3)] * 3}, "loss_masks | 3 | 2"),
    "mask of twos": ({"loss_masks": [torch.ones(3), torch.full((2,), 2.0)]}, "loss_masks[1] | 0 or "
                                                                             "1 | 2.0"),
    "mask with NaN": ({"loss_masks": [[math.nan, 1.0, 1.0], torch.ones(2)]}, "loss_masks[0] | 0 or "
                                                                             "1 | nan"),
    "half a mask": ({"loss_masks": [torch.ones(3), torch.full((2,), 0.5)]}, "loss_masks[1]"),
    "a length missing": ({"response_lengths": [3]}, "response_lengths | total_lengths"),
    "a negative response": ({"response_lengths": [3, -1]}, "response_lengths[1] | -1"),
    "a sequence of no "
    "token": ({"total_lengths": [5, 0], "response_lengths": [3, 0]}, "total_lengths[1] | 0 | at "
                                                                     "least 1"),
    "no prompt": ({"total_lengths": [3, 4]}, "sample 0 | prompt"),
    "response longer than all": ({"total_lengths": [2, 4]}, "response_lengths[0] | 3 | "
                                                            "total_lengths[0] | 2"),
    **{
        f"length {length}": ({"total_lengths": [length, 4]}, "total_lengths[0] | integer")
        for length in (5.5, True, "5")
    },
    "unknown mode": ({"aggregation": "seq_mean"}, " | ".join(["'seq_mean'", *AGGREGATIONS])),
    "prompt mean of unknown groups": ({"aggregation": "prompt_mean"}, "denominators"),
    "a denominator missing": ({"denominators": [3.0]}, "denominators | [1] | (2)"),
    **{
        f"denominator {value}": ({"denominators": [value, 1.0]}, "denominators[0] | count of "
                                                                 "active tokens")
        for value in (math.nan, math.inf, -1.0)
    },
    "denominators of a token "
    "mean": ({"aggregation": "token_mean", "denominators": [3, 2]}, "token_mean"),
    "denominators of a "
    "constant": ({"aggregation": "constant", "denominators": [3, 2], "divisor": 4.0}, "constant"),
    "divisor of another mode": ({"divisor": 4.0}, "divisor 4.0 | sample_mean | constant"),
    **{
        f"divisor {divisor}": (
            {"aggregation": "constant", "divisor": divisor}, f"--loss-aggregation-divisor | "
                                                             f"{divisor} | finite"
        )
        for divisor in (None, 0, -1, math.nan, math.inf)
    },
    "rank outside its group": ({"cp_rank": 2, "cp_size": 2}, "cp_rank is 2 | cp_size 2"),
    "unknown layout": ({"qkv_format": "sbhd"}, "--qkv-format | 'sbhd' | thd"),
    "rank without a size": ({"cp_rank": 1}, "cp_rank"),
    "size without a rank": ({"cp_size": 2}, "cp_rank is missing"),
    "size of zero": ({"cp_size": 0}, "cp_size is 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", FACTORY)
def test_the_factory_refuses(case):
    changes, words = FACTORY[case]
    good: dict[str, Any] = {
        "total_lengths": [5, 4],
        "response_lengths": [3, 2],
        "loss_masks": [torch.ones(3), torch.ones(2)],
    }
    assert_refused(words, get_pg_loss_reducer, **{**good, **changes})


def test_bshd_under_context_parallelism():
    inputs: tuple[Any, ...] = ([5], [3], [torch.ones(3)])
    with pytest.raises(NotImplementedError, match="--qkv-format thd"):
        get_pg_loss_reducer(*inputs, cp_rank=0, cp_size=2, qkv_format="bshd")
    assert get_pg_loss_reducer(*inputs, qkv_format="bshd")(torch.ones(3)).item() == 1.0


UNBIASED = {"policy_loss": "reinforce", "kl_loss_coef": 0.1, "use_unbiased_kl": True}


@pytest.mark.parametrize(("field", "settings", "flag"), [
    ("old_log_probs", {}, "--policy-loss ppo | compute_log_probs"),
    ("old_log_probs", UNBIASED, "--use-unbiased-kl"),
    ("ref_log_probs", {"kl_loss_coef": 0.1}, "--kl-loss-coef 0.1 | compute_log_probs | --ref-load"),
    ("rollout_log_probs", {"use_tis": True}, "--use-tis"),
])  # fmt: skip
def test_an_input_that_a_setting_needs(field, settings, flag):
    assert_refused(f"{NAME} | {field} | {flag}", loss_of, [sample(**{field: None})], **settings)


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


def test_masks_as_lists_and_as_one_matrix_are_masks():
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for masks in ([[1, 0], [1, 1]], torch.tensor([[1, 0], [1, 1]])):
        reducer = get_pg_loss_reducer([4, 5], [2, 2], masks)  # type: ignore[arg-type]
        assert float(reducer(losses)) == 1.0 + 3.5


@pytest.mark.parametrize("field", LOG_PROBS)
@pytest.mark.parametrize("value", [0.5, 0.0625, 1e-3, -1e300])
def test_a_log_prob_that_is_none(field, value):
    """At an active token; 0.0625 is what a log-softmax in bfloat16 may leave, of logits of 16."""
    words = f"row 7: {field}[2] is  |  at an active token, expected a log-prob"
    tokens, mask = [1] * 5, [1, 0, 1, 1]
    values = {field: [-1.0, value, value, -1.0]}
    assert_refused(words, Sample, tokens, 4, mask, name="row 7", **values)
    Sample(tokens, 4, mask, **{field: [-1.0, value, -1.0, -1.0]})


def test_log_probs_that_rounding_leaves_above_0_are_log_probs():
    """z - logsumexp(z) in float32, one token with nearly all of the probability, logits up to
    8192.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(512, 64, generator=generator) * 16
    logits[:, 0] = torch.rand(512, generator=generator) * 8191
    log_probs = logits[:, 0] - logits.logsumexp(1)
    assert (log_probs > 0).any() or (log_probs == 0).any()
    Sample([1] * 513, 512, [1] * 512, old_log_probs=log_probs, ref_log_probs=[2.0**-10] * 512)


def test_a_response_token_outside_the_vocabulary():
    words = f"{NAME} | outside the vocabulary | {VOCABULARY}"
    assert_refused(words, loss_of, [sample(tokens=[1, 2, 3, VOCABULARY, 5])])


def test_a_sample_keeps_its_values_when_the_buffer_they_came_from_changes():
    buffer = torch.tensor([-1.0, -2.0, -0.5])
    kept = sample(old_log_probs=buffer)
    buffer.fill_(0.0)
    assert kept.old_log_probs is not None and kept.old_log_probs.tolist() == [-1.0, -2.0, -0.5]


NUMBERS = {
    **dict.fromkeys(LOG_PROBS, -1.0),
    **dict.fromkeys(("advantages", "loss_weights", "old_values", "returns"), 1.0),
}
"""The fields of response tokens that are numbers, and a number that each may be."""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("container", [list, np.array, torch.tensor])
@pytest.mark.parametrize("field", NUMBERS)
def test_what_is_no_number_is_refused_at_an_active_token_alone(field, container, value):
    """One such log-prob makes NaN of every parameter, before any metric says so."""
    number = NUMBERS[field]
    words = f"{NAME}: {field}[2] is {value} at an active token, expected "
    assert_refused(words, sample, **{field: container([number, number, value])})
    masked = getattr(sample(**{field: container([number, value, number])}), field)
    assert masked[[0, 2]].tolist() == [number] * 2
    assert not masked[1].isfinite() or (field == "loss_weights" and masked[1] == 0)


@pytest.mark.parametrize("field", NUMBERS)
def test_none_in_a_list_is_read_as_null_in_a_file_is(field):
    number = NUMBERS[field]
    refused = f"{field}[0] is nan at an active token"
    assert_refused(f"{NAME}: {refused}", sample, **{field: [None, number, number]})
    found = getattr(sample(**{field: [number, None, number]}), field)
    if field not in ("old_values", "returns"):  # which files lack
        row = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "loss_mask": [1, 0, 1], "reward": 0}
        column = field.removeprefix("old_")
        row_sample = partial(sample_of_row, required=(), vocab_size=None, name=NAME)
        in_file = row_sample(row | {column: [number, None, number]})
        assert torch.equal(getattr(in_file, field).nan_to_num(7), found.nan_to_num(7))
        assert_refused(refused, row_sample, row | {column: [None, number, number]})
    assert_refused(f"{NAME}: tokens | integers", sample, tokens=[1, 2, 3, None, 5])


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", True, torch.tensor(math.nan)])
def test_a_reward_that_is_no_number(reward):
    words = f"{NAME}: reward is  | expected a number, finite"
    assert_refused(words, RewardedSample, [1, 2], 1, [1], reward=reward, name=NAME)
    assert RewardedSample([1, 2], 1, [1], reward=np.float32(0.5)).reward == 0.5


def test_a_teachers_hidden_state_that_is_no_number():
    hidden = torch.ones(3, 4, dtype=torch.bfloat16)
    hidden[1] = math.nan
    assert sample(side_channels={"teacher_hidden": hidden}).num_active_tokens == 2
    hidden[2, 3] = -math.inf
    words = f"{NAME}: side_channels['teacher_hidden'][2, 3] is -inf at an active token"
    assert_refused(words, sample, side_channels={"teacher_hidden": hidden})


def test_an_advantage_that_is_no_number_is_not_whitened():
    """It would make NaN of every advantage of the step."""
    rows = [torch.tensor([1.0, math.nan]), torch.tensor([math.nan, 2.0])]
    assert_refused("advantages[1][0] is nan", whiten, rows, [[1, 0], [1, 1]])
    assert all(row.isfinite().all() for row in whiten(rows, [[1, 0], [0, 1]]))
