"""The example's training step takes `--fused-lm-head`, and trains the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from .launch import run_ranks
from .test_quickstart import new_run, samples_of_lengths


def two_steps(flags: str) -> list[dict[str, float]]:
    run = new_run(f"--context-parallel-size 2 {flags}")
    samples = [
        dataclasses.replace(sample, advantages=sample.total_length - 6.0)
        for sample in samples_of_lengths(5, 7, 8, loss_mask=torch.tensor([1, 0, 1]))
    ]
    return [run.train_step(run.config, samples, lr=1e-2) for _ in range(2)]


def test_two_steps_equal_those_on_logits() -> None:
    expected = run_ranks(two_steps, 2, "")[0]
    found = run_ranks(two_steps, 2, "--fused-lm-head --fp32-lm-head")[0]
    for step, (fused, plain) in enumerate(zip(found, expected, strict=True)):
        assert fused.keys() == plain.keys()
        for name, value in plain.items():
            assert fused[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (step, name)
    assert expected[0]["loss"] != pytest.approx(expected[1]["loss"], rel=1e-3), "it trains"
