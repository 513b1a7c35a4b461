"""A sample that names its temperature is trained at no other one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_pg import PolicyLossConfig, Sample, pack, policy_loss_function, step_totals
from megatron_pg.rollout_files import RolloutFiles

from .refusals import assert_refused


def a_sample(temperature: Any) -> Sample:
    old = torch.tensor([-1.0, -1.0])
    fields: dict[str, Any] = {"old_log_probs": old, "temperature": temperature, "name": "answer 3"}
    return Sample([1, 2, 3], 2, [1, 1], 1.0, **fields)


def train(temperature: Any, flag: float) -> None:
    samples = [a_sample(None), a_sample(temperature)]
    logits = torch.zeros(6, 5, requires_grad=True)
    config = PolicyLossConfig(rollout_temperature=flag)
    policy_loss_function(config, pack(samples), logits, totals=step_totals(samples))


@pytest.mark.parametrize("temperature", [None, 0.7, float(np.float32(0.7))])
def test_the_temperature_of_the_step_is_accepted(temperature: float | None) -> None:
    train(temperature, 0.7)


def test_another_temperature_is_refused_by_name() -> None:
    words = "answer 3 has temperature 0.7, but --rollout-temperature is 1.0 | different steps"
    assert_refused(words, train, 0.7, 1.0)
    assert_refused("answer 3: temperature is 0.0, expected a finite number", a_sample, 0.0)
    assert_refused("answer 3: temperature is '1'", a_sample, "1")


def test_files_have_the_temperature(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    row = '{"prompt_ids": [1], "response_ids": [2], "reward": 1, "temperature": %s}'
    path.write_text(row % "0.6")
    (sample,) = RolloutFiles([path], required_fields=["temperature"]).pull(1)
    assert sample.temperature == 0.6
    path.write_text(row % "-1")
    assert_refused("row 0 | temperature is -1.0, expected", RolloutFiles([path]).pull, 1)
