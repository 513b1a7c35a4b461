"""No setting is passed over in silence: given by itself it changes the loss, or it is refused, or
it is said.

Every field of the config, beside every base, on a step whose samples bring all that a loss may
read.
"""

import argparse
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pg import (
    PolicyLossConfig,
    Sample,
    accepted_samples,
    pack,
    policy_loss_function,
    step_totals,
    validate_policy_loss_args,
)
from megatron_pg.config.settings import Field, fields_of
from megatron_pg.loss.corrections import CORRECTIONS
from megatron_pg.loss.regularizers import KL_ESTIMATES

HOW = {
    "calculate_per_token_loss", "qkv_format",
    "fused_lm_head", "fp32_lm_head", "check_aggregation", "replay_routing",
    "fused_lm_head_memory_gib", "fused_lm_head_without_quack",
    "kl_target", "allow_varying_log_probs",
}  # fmt: skip
"""What says how the loss is computed and checked, and not what; or what the next step's is."""
NUMBERS = (0.05, 0.3, 0.9, 1.5, 4.0)
REJECTION = {
    "use_sequence_rejection": True,
    "sequence_rejection_low": 0.3,
    "sequence_rejection_high": 1e3,
}
TOKEN_MEAN = {"loss_aggregation": "token_mean"}
CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": 3.0}
BASES: dict[str, dict[str, Any]] = {
    "default": {},
    "tis": {"use_tis": True},
    "tis mask": {"use_tis": True, "tis_mode": "mask"},
    # Under the sample mean both words of regularizer_aggregation are true.
    "kl": {"kl_loss_coef": 0.1, **TOKEN_MEAN},
    "opsm": {"use_opsm": True},
    # A sample mean of whole sequences has the same denominators either way.
    "rejection": {**REJECTION, **TOKEN_MEAN},
    "cispo": {"policy_loss": "cispo"},
    **{name: {"policy_loss": name} for name in ("reinforce", "dis", "vespo")},
    # Neither N nor L counts tokens, so that either word is true of it.
    "constant": {**CONSTANT, "loss_weight_denominator": "mask"},
}
VOCABULARY = 7


def whole_step() -> list[Sample]:
    generator = torch.Generator().manual_seed(5)

    def one(number: int, length: int) -> Sample:
        def log_probs() -> torch.Tensor:
            return -torch.rand(length, generator=generator, dtype=torch.float64) * 4.0

        tokens = torch.randint(VOCABULARY, (length + 2,), generator=generator)
        tokens[:2] = number // 2
        advantages = torch.randn(length, generator=generator)
        names = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
        others: dict[str, Any] = {name: log_probs() for name in names}
        others["loss_weights"] = torch.rand(length, generator=generator) + 0.5
        others["turn_ids"] = torch.arange(length) // 2
        others["policy_version"] = torch.arange(length)
        others["kept_tokens"] = [sorted({int(token), 0, 3}) for token in tokens[2:]]
        ids = others["kept_tokens"]
        of_head = [[-float(n + 1) for n in range(len(row))] for row in ids]
        others["sampler_top_k"] = (ids, of_head)
        mask = torch.ones(length)
        return Sample(tokens, length, mask, advantages, group_index=number // 2, **others)

    return [one(number, length) for number, length in enumerate((3, 5, 4, 6, 9, 9, 8, 8))]


STEP = whole_step()


def outcome(settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The loss, its gradient and the metrics of the step."""
    config = PolicyLossConfig(**settings)
    samples = accepted_samples(config, [replace(sample) for sample in STEP])
    batch = pack(samples)
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(len(batch.tokens), VOCABULARY, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    loss, metrics = policy_loss_function(
        config, batch, logits, totals=step_totals(samples), policy_version=9
    )
    loss.backward()
    assert logits.grad is not None
    return {"loss": loss.detach(), "gradient": logits.grad, **metrics}


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].nan_to_num(), other[name].nan_to_num()) for name in one
    )


def other_values(field: Field) -> Iterator[Any]:
    if field.type is bool:
        yield True
    elif field.choices:
        yield from (word for word in field.choices if word != field.default)
    elif field.interval is not None:
        yield from (n for n in NUMBERS if field.interval.contains(n) and n != field.default)


def silent_settings(base: Mapping[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The fields of which some value is neither refused nor said, and of which none changes
    anything.
    """
    expected, found = outcome(base), []
    for field in fields_of(PolicyLossConfig).values():
        if field.name in HOW or field.name in base:
            continue
        passed_over, changes = [], False
        for value in other_values(field):
            settings = {**base, field.name: value}
            args = argparse.Namespace(**settings)
            caplog.clear()
            try:
                with caplog.at_level(logging.WARNING, "megatron_pg"):
                    validate_policy_loss_args(args)
            except (ValueError, NotImplementedError):
                continue
            if field.flag in caplog.text:
                continue
            changes = changes or not is_equal(outcome(settings), expected)
            passed_over.append(value)
        if passed_over and not changes:
            found.append(field.name)
    return found


@pytest.mark.parametrize("base", BASES)
def test_no_setting_is_passed_over(base, caplog):
    assert silent_settings(BASES[base], caplog) == []


@pytest.mark.parametrize(
    ("table", "option"), [(CORRECTIONS, "opsm_delta"), (KL_ESTIMATES, "use_unbiased_kl")]
)
def test_mutant_a_row_that_does_not_name_its_settings(table, option, monkeypatch, caplog):
    for name, row in list(table.items()):
        kept = tuple(each for each in row.options if each != option)
        monkeypatch.setitem(table, name, dataclasses.replace(row, options=kept))
    assert silent_settings({}, caplog) == [option]
