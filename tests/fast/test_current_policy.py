"""`--old-log-probs current`: the loss of one forward is that of two, for every row of the
tables.
"""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_pg import PolicyLossConfig, Sample, pack, policy_loss_function, step_totals
from megatron_pg.loss import CORRECTIONS, OBJECTIVES
from megatron_pg.loss.micro_batch import MicroBatchLoss

from .refusals import assert_refused

VOCABULARY = 7
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"policy_loss": name} for name in OBJECTIVES if name not in ("distill",)},
    "tis": {"use_tis": True},
    "tis mask": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.5},
    "sequence tis": {"use_tis": True, "tis_level": "sequence"},
    "rejection": {"use_sequence_rejection": True},
    "geometric": {"use_geometric_rejection": True, "geometric_rejection_high": 1.5},
    "kl": {"kl_loss_coef": 0.1, "use_unbiased_kl": True},
    "turns": {"policy_loss": "gspo", "sequence_unit": "turn"},
}


def a_sample(number: int, length: int) -> Sample:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (length + 2,), generator=generator)
    tokens[:2] = number // 2
    names = ("rollout_log_probs", "ref_log_probs")
    fields: dict[str, Any] = {
        n: -1.9 - 0.3 * torch.rand(length, generator=generator) for n in names
    }
    fields["turn_ids"] = torch.arange(length) // 2
    mask = torch.rand(length, generator=generator) < 0.8
    advantages = torch.randn(length, generator=generator)
    return Sample(tokens, length, mask, advantages, group_index=number // 2, **fields)


def outcome(settings: dict[str, Any], samples: list[Sample]) -> list[torch.Tensor]:
    config, batch = PolicyLossConfig(**settings), pack(samples)
    loss, metrics = policy_loss_function(
        config, batch, LOGITS.requires_grad_(), totals=step_totals(samples)
    )
    (gradient,) = torch.autograd.grad(loss, LOGITS)
    return [loss.detach(), gradient, *metrics.values()]


SAMPLES = [a_sample(number, length) for number, length in enumerate((3, 5, 1, 6))]
LOGITS = 0.3 * torch.randn(
    len(pack(SAMPLES).tokens), VOCABULARY, generator=torch.Generator().manual_seed(9)
)


@pytest.mark.parametrize("case", SETTINGS)
def test_one_forward_is_two(case: str) -> None:
    """To the bit, loss, gradient and metrics: the pass for old log-probs computes the same."""
    samples = [dataclasses.replace(sample) for sample in SAMPLES]
    batch = pack(samples)
    log_probs = LOGITS.detach().log_softmax(1)[batch.logit_rows, :]
    own = log_probs.gather(1, batch.targets[batch.logit_rows, None])[:, 0]
    parts = own.split([sample.response_length for sample in samples])
    with_old = [
        dataclasses.replace(sample, old_log_probs=old)
        for sample, old in zip(samples, parts, strict=True)
    ]
    found = outcome({**SETTINGS[case], "old_log_probs": "current"}, samples)
    wanted = outcome(SETTINGS[case], with_old)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_a_mutant_of_another_old_policy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = MicroBatchLoss._inputs

    def moved(*arguments: Any) -> dict[str, Any]:
        tensors = dict(inputs(*arguments))
        return tensors | {"old_log_probs": tensors["old_log_probs"].roll(1)}

    monkeypatch.setattr(MicroBatchLoss, "_inputs", moved)
    with pytest.raises(AssertionError):
        test_one_forward_is_two("tis")


def test_a_second_step_is_refused() -> None:
    samples = [dataclasses.replace(sample) for sample in SAMPLES]
    outcome({"old_log_probs": "current"}, samples)
    assert_refused("sample 0 is in a second optimizer step", lambda: outcome(
        {"old_log_probs": "current"}, samples
    ))  # fmt: skip


CONFLICTS = {
    "anchor": ({"ratio_anchor": "rollout"}, "has no effect with --ratio-anchor rollout"),
    "opsm": ({"use_opsm": True}, "--use-opsm are mutually exclusive"),
    "accepted": (
        {"use_sequence_rejection": True, "rejection_denominator": "accepted"},
        "requires --rejection-denominator original",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_refused_settings(case: str) -> None:
    settings, words = CONFLICTS[case]
    assert_refused(words, lambda: PolicyLossConfig(old_log_probs="current", **settings))


def test_rows_that_read_old_log_probs_are_covered() -> None:
    on = {row.name for s in SETTINGS.values() for row in CORRECTIONS.values()
          if row.is_on(PolicyLossConfig(**s))}  # fmt: skip
    left = set(CORRECTIONS) - on
    assert left == {"custom_tis", "opsm", "score_centering", "geometric_truncate",
                    "sequence_mask", "geometric_mask"}  # fmt: skip
