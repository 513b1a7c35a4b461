"""`--fused-lm-head` and `--fp32-lm-head` are honoured or refused, never ignored."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pg.config import (
    PolicyLossConfig,
    add_policy_loss_args,
    validate_policy_loss_args,
    validation,
)
from megatron_pg.head import linear_token_loss
from megatron_pg.megatron import fused_head
from megatron_pg.megatron.policy_step import PolicyStep
from megatron_pg.step.totals import step_totals


def validate(line: str, **found: Any) -> argparse.Namespace:
    args = add_policy_loss_args(argparse.ArgumentParser()).parse_args(line.split())
    vars(args).update(found)
    return validate_policy_loss_args(args)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--fp32-lm-head", "--fp32-lm-head .* add --fused-lm-head"),
        ("--fused-lm-head --qkv-format bshd", "--fused-lm-head .* --qkv-format thd"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        validate(line)


@pytest.mark.parametrize("is_there", [True, False])
def test_the_flag_needs_a_megatron_that_has_the_hook(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "supports_output_processor", lambda: is_there)
    line = "--fused-lm-head --fp32-lm-head"
    if is_there:
        config = PolicyLossConfig.from_args(validate(line))
        assert config.fused_lm_head and config.fp32_lm_head
        with pytest.raises(NotImplementedError, match="--use-mup"):
            validate(line, use_mup=True)
    else:
        with pytest.raises(NotImplementedError, match=r"0\.18 or later.*drop the flag"):
            validate(line)


def test_a_model_without_the_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Headless(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens

    monkeypatch.setattr(fused_head, "supports_output_processor", lambda: True)
    with pytest.raises(NotImplementedError, match="output_processor.*found Headless"):
        PolicyStep(
            PolicyLossConfig(fused_lm_head=True),
            totals=step_totals([]),
            num_microbatches=1,
            model=[SimpleNamespace(module=Headless())],
        )


@pytest.mark.parametrize("mtp_num_layers", [None, 1])
def test_the_gradient_of_multi_token_prediction_is_not_lost(mtp_num_layers: int | None) -> None:
    """It uses the same weight, and without fused addition DDP's hook has to add it to what the head has added."""
    weight = torch.ones(8, 4, requires_grad=True)
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(8, 4), False
    layer = SimpleNamespace(weight=weight, bias=None)
    config = SimpleNamespace(mtp_num_layers=mtp_num_layers)
    found = fused_head._plain_weight(layer, None, config)
    targets = torch.tensor([1, 5])
    one = torch.ones(())
    loss, _, _ = linear_token_loss(
        torch.ones(2, 4), found, targets, lambda log_probs, *_: log_probs.sum(), loss_scale=one
    )
    of_the_head = weight.main_grad.clone()
    (loss + (3 * weight).sum()).backward()
    # DistributedDataParallel's hook (megatron-core, distributed_data_parallel.py).
    if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
        weight.main_grad.add_(weight.grad)
    of_prediction = (
        3.0 if mtp_num_layers else 0.0
    )  # the mutant: a model that does not say it has such layers
    torch.testing.assert_close(weight.main_grad, of_the_head + of_prediction)
