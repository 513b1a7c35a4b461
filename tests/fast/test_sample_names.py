"""An error about a sample without a name says which it is: by its ids when it is made, by its place
in the step later.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_pg import AGGREGATIONS, PolicyLossConfig, Sample, pack, step_totals
from megatron_pg.critic.settings import CriticConfig
from megatron_pg.critic.value_loss import MicroBatchValueLoss
from megatron_pg.loss.corrections import accepted_samples
from megatron_pg.loss.from_logits import policy_loss_function
from megatron_pg.rollout_files import RewardedSample, with_group_advantages
from megatron_pg.step import plan_step
from megatron_pg.step.sample import number_samples
from tests.fast.one_step import loss_of, reported
from tests.fast.refusals import assert_refused, refusal
from tests.random_steps import uneven_totals


def sample(kind: type[Sample] = Sample, length: int = 2, **fields: Any) -> Any:
    """A good sample without a name."""
    good: dict[str, Any] = dict.fromkeys(("old_log_probs", "rollout_log_probs"), [-1.0] * length)
    good["advantages"] = 1.0
    return kind([1] * (length + 1), length, [1] * length, **(good | fields))


def test_a_sample_that_cannot_be_made_is_named_by_its_number_and_its_ids():
    wrong: dict[str, Any] = {"old_log_probs": [0.0, torch.nan]}
    first, second, third = (
        refusal(sample, **wrong, **ids) for ids in ({}, {"group_index": 7, "rollout_id": -3}, {})
    )
    numbers = [
        int(re.findall(r"^sample (\d+) of this process", text)[0])
        for text in (first, second, third)
    ]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]
    assert "of this process (group_index 7, rollout_id -3): old_log_probs[1] is nan" in second
    assert "of this process: old_log_probs[1] is nan" in third


REJECTING = {"use_geometric_rejection": True, "rejection_denominator": "accepted"}
REJECTING |= {"geometric_rejection_low": 0.9, "geometric_rejection_high": 1.1}
OF_A_STEP: dict[str, tuple[dict[str, Any], Callable[[list[Any]], object]]] = {
    # what is wrong with sample 2 of 3, and what is done with the step
    "plan": ({"length": 20}, lambda step: plan_step(step, max_tokens_per_microbatch=9)),
    "rejection": (
        {"rollout_log_probs": None},
        lambda step: accepted_samples(PolicyLossConfig(**REJECTING), step),
    ),
    "reward": ({"reward": None}, with_group_advantages),
    "group": (
        {"group_index": None},
        lambda step: AGGREGATIONS["prompt_mean"].outer_count(step_totals(step)),
    ),
    "field": ({"old_log_probs": None}, lambda step: step_totals(step) and pack(step)),
    "log-probs": ({"old_log_probs": None}, lambda step: loss_of_last(step)),
    "values": (
        {},
        lambda step: MicroBatchValueLoss(
            PolicyLossConfig(), CriticConfig(), pack(step[2:]), uneven_totals(step)
        ),
    ),
    "vocabulary": ({}, lambda step: loss_of_last(step, vocab_size=1)),
    "counted group": (
        {"group_index": 5},
        lambda step: AGGREGATIONS["prompt_mean"].denominators(step_totals(step[:2]), step),
    ),
}  # fmt: skip


def loss_of_last(step: list[Sample], vocab_size: int = 2) -> None:
    totals, batch = uneven_totals(step), pack(step[2:])
    logits = torch.zeros(batch.window.local_tokens, 2)
    policy_loss_function(PolicyLossConfig(), batch, logits, totals=totals, vocab_size=vocab_size)


@pytest.mark.parametrize("case", OF_A_STEP)
def test_a_sample_of_a_step_is_named_by_its_place(case):
    changes, use = OF_A_STEP[case]
    good = {"reward": 1.0, "group_index": 0}
    step = [sample(RewardedSample, **good), sample(RewardedSample, **good)]
    step.append(sample(RewardedSample, **(good | changes)))
    if case == "counted group":
        number_samples(step)
    assert re.search(r"\bsample 2\b(?! of this process)", refusal(use, step))


def test_the_checksum_names_samples_by_their_places():
    step = [sample(advantages=float(number)) for number in range(1, 5)]
    totals, config = step_totals(step), PolicyLossConfig(check_aggregation=True)
    batch = pack([step[0], step[1], step[1]])
    _, metrics = loss_of(config, batch, torch.full((6,), -1.0), totals=totals)
    words = "trained on twice: sample 1; never trained on: sample 2, sample 3."
    assert_refused(words, reported, config, metrics, error=RuntimeError)


def test_a_name_stays_and_a_number_follows_the_step():
    given, other, last = sample(name="it"), sample(), sample()
    number_samples([given, other, last])
    assert [each.name for each in (given, other, last)] == ["it", "sample 1", "sample 2"]
    made = dataclasses.replace(last, advantages=0.5)
    assert made.name == "sample 2"
    step_totals([made, dataclasses.replace(given, advantages=0.5)])
    assert made.name == "sample 0"
