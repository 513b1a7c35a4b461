"""What distillation asks of samples and of calls, by name, before a model has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_pg import (
    PolicyLossConfig,
    Sample,
    pack,
    policy_loss_from_log_probs,
    policy_loss_function,
    step_totals,
)
from megatron_pg.loss.policy_loss import gradient_scope, leaves_out_zero_advantages

DISTILL = {"policy_loss": "distill", "distill_teacher": "top_k"}


def sample(**channels: torch.Tensor) -> Sample:
    return Sample(
        [1, 2, 3, 4], 2, [1, 1], name="a", old_log_probs=[-1.0, -1.0], side_channels=channels
    )


def loss(given: Sample, settings: dict[str, Any], **keywords: Any) -> torch.Tensor:
    batch, totals = pack([given]), step_totals([given])
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    config = PolicyLossConfig(**settings)
    return policy_loss_function(config, batch, logits, totals=totals, **keywords)[0]


@pytest.mark.parametrize(
    ("channels", "settings", "words"),
    [
        ({}, DISTILL, "a: side_channels['teacher_ids'] is missing or of the wrong length (none)"),
        (
            {"teacher_ids": torch.zeros(2, 1, dtype=torch.int64)},
            DISTILL,
            "a: side_channels['teacher_log_probs'] is missing",
        ),
        (
            {"teacher_logits": torch.zeros(4, 8)},  # of all tokens
            {"distill_coef": 0.1, "distill_teacher": "logits"},
            "a: side_channels['teacher_logits'] is missing or of the wrong length (4 rows for 2",
        ),
        (
            {"teacher_hidden": torch.zeros(2, 3)},
            {**DISTILL, "distill_teacher": "hidden"},
            "--distill-teacher hidden needs teacher_weight=",
        ),
    ],
)
def test_a_teacher_that_is_not_there(
    channels: dict[str, torch.Tensor], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as error:
        loss(sample(**channels), settings)
    assert str(error.value).startswith(words)


def test_log_probs_alone_are_refused() -> None:
    given = sample(teacher_ids=torch.tensor([[1], [2]]), teacher_log_probs=torch.zeros(2, 1) - 1)
    config = PolicyLossConfig(**DISTILL)
    with pytest.raises(ValueError, match="use PolicyStep or policy_loss_function"):
        policy_loss_from_log_probs(
            config, pack([given]), torch.zeros(2), None, totals=step_totals([given])
        )


def test_the_loss_is_the_divergence_and_the_term_its_multiple() -> None:
    """Two teachers that say the same: their logits, and their hidden states with a weight."""
    hidden, weight = torch.randn(2, 3), torch.randn(8, 3)
    given = sample(teacher_hidden=hidden, teacher_logits=hidden @ weight.T)
    of_logits = loss(given, {**DISTILL, "distill_teacher": "logits"})
    of_hidden = loss(given, {**DISTILL, "distill_teacher": "hidden"}, teacher_weight=weight)
    torch.testing.assert_close(of_logits, of_hidden)
    plain = loss(given, {})
    mixed = loss(given, {"distill_coef": 0.25, "distill_teacher": "logits"})
    torch.testing.assert_close(mixed, plain + 0.25 * of_logits)


def test_what_follows_from_the_settings() -> None:
    assert gradient_scope(PolicyLossConfig(**DISTILL)) == "token"
    term = PolicyLossConfig(distill_coef=0.1, distill_teacher="logits")
    assert gradient_scope(term) == "token" and not leaves_out_zero_advantages(term)
    assert leaves_out_zero_advantages(PolicyLossConfig())
