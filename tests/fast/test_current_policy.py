"""`--old-log-probs current`: the loss of one forward is that of two, for every row of the
tables.
"""

import dataclasses
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
)
from megatron_pg.loss import CORRECTIONS, OBJECTIVES
from megatron_pg.loss.metrics import reduce_metrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve

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
    """Loss, gradient and metrics, up to the float32 rounding of given log-probs."""
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
    changed = [dataclasses.replace(sample, advantages=1.0) for sample in samples]
    for again in (samples, changed):
        assert_refused("sample 0 is in a second optimizer step", lambda again=again: outcome(
            {"old_log_probs": "current"}, again
        ))  # fmt: skip


CONFLICTS = {
    "anchor": ({"ratio_anchor": "rollout"}, "has no effect with --ratio-anchor rollout"),
    "opsm": ({"use_opsm": True}, "--use-opsm are mutually exclusive"),
}
ACCEPTED = {"loss_aggregation": "token_mean", "rejection_denominator": "accepted"}
ICEPOP = {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.8, "tis_clip": 1.3}
UNCOUNTED: dict[str, tuple[dict[str, Any], str]] = {
    "groups": (
        {"loss_aggregation": "prompt_mean", "use_sequence_rejection": True},
        "--loss-aggregation prompt_mean",
    ),
    "tokens": (
        {"loss_aggregation": "sample_mean", **ICEPOP},
        "--loss-aggregation sample_mean and --use-tis --tis-mode mask",
    ),
    "turns": (
        {
            "loss_aggregation": "sample_mean",
            "use_sequence_rejection": True,
            "sequence_unit": "turn",
        },
        "--loss-aggregation sample_mean and --use-sequence-rejection",
    ),
    "reducer": (
        {**ICEPOP, "custom_pg_loss_reducer_function_path": "tests.settings.own_reducer"},
        "--custom-pg-loss-reducer-function-path",
    ),
    "kl": ({**ICEPOP, "kl_loss_coef": 0.1}, "--kl-loss-coef"),
    "entropy": ({**ICEPOP, "entropy_coef": 0.1}, "--entropy-coef"),
    "teacher": ({**ICEPOP, "distill_coef": 0.1, "distill_teacher": "logits"}, "--distill-coef"),
    "divisor": ({**ICEPOP, "grad_divisor": 4.0}, "grad_divisor"),
    "twice": ({**ICEPOP, "divide_gradient_twice": True}, "--divide-gradient-twice"),
}


@pytest.mark.parametrize("case", UNCOUNTED)
@pytest.mark.parametrize("old", ["current", "interpolated"])
def test_what_no_factor_of_the_gradient_counts_is_refused(case: str, old: str) -> None:
    settings, other = UNCOUNTED[case]
    words = f"requires --rejection-denominator original with {other}: what is accepted is"
    given = {**ACCEPTED, **settings}
    assert_refused(words, lambda: PolicyLossConfig(old_log_probs=old, **given))


@pytest.mark.parametrize("unit", ["mask", "weights"])
@pytest.mark.parametrize("rejection", [ICEPOP, {"use_geometric_rejection": True,
    "geometric_rejection_low": 0.8, "geometric_rejection_high": 1.3}])  # fmt: skip
def test_accepted_tokens_are_counted_by_the_forward_pass(
    unit: str, rejection: dict[str, Any]
) -> None:
    """The loss and its gradient, times the step's tokens over its accepted tokens, are those of
    counts that are known before the step.
    """
    settings = {**ACCEPTED, **rejection, "loss_weight_denominator": unit}
    weights = torch.tensor([0.5, 2.0, 0.0, 1.5, 1.0, 3.0])
    samples = [
        dataclasses.replace(sample, loss_weights=weights[: sample.response_length])
        for sample in SAMPLES[:3]
    ] + [dataclasses.replace(SAMPLES[3])]  # fmt: skip
    table = LOGITS.detach()
    parts = []
    for number, sample in enumerate(samples):
        before = sum(len(s.tokens) for s in samples[:number])
        rows = table[before + sample.prompt_length - 1 : before + len(sample.tokens) - 1]
        targets = sample.tokens[sample.prompt_length :]
        parts.append(rows.log_softmax(1).gather(1, targets[:, None])[:, 0])
    with_old = [
        dataclasses.replace(sample, old_log_probs=old)
        for sample, old in zip(samples, parts, strict=True)
    ]
    two_pass = PolicyLossConfig(**settings)
    marked = accepted_samples(two_pass, with_old)
    leaf = torch.cat(parts).requires_grad_()
    totals = step_totals(marked)
    wanted, metrics = MicroBatchLoss(resolve(two_pass), pack(marked), totals)(leaf, None)
    (wanted_gradient,) = torch.autograd.grad(wanted, leaf)
    wanted_report = reduce_metrics(two_pass, [metrics], contributes=True, device="cpu")

    config = PolicyLossConfig(**settings, old_log_probs="current")
    assert all(a is b for a, b in zip(accepted_samples(config, samples), samples, strict=True))
    totals, losses, reports = step_totals(samples), [], []
    leaves = [part.clone().requires_grad_() for part in parts]
    for members in (slice(0, 1), slice(1, 4)):
        micro_batch = MicroBatchLoss(
            resolve(config), pack(samples[members]), totals, step_share=0.5, scales_gradients=True
        )
        loss, metrics = micro_batch(torch.cat(leaves[members]), None)
        losses.append(loss)
        reports.append(metrics)
    factor = 1 / torch.stack([metrics["pg_loss"][1] for metrics in reports]).sum()
    assert factor > 1.1
    gradient = torch.cat(torch.autograd.grad(sum(losses), leaves))
    torch.testing.assert_close(gradient * factor, wanted_gradient, rtol=1e-5, atol=1e-8)
    report = reduce_metrics(config, reports, contributes=True, device="cpu")
    for name in ("loss", "pg_loss", "aggregation_checksum", "rejected_fraction"):
        assert report[name] == pytest.approx(wanted_report[name], rel=1e-5)


def test_only_policy_step_counts_accepted_tokens() -> None:
    settings = {**ACCEPTED, **ICEPOP, "old_log_probs": "current"}
    samples = [dataclasses.replace(sample) for sample in SAMPLES]
    assert_refused("use PolicyStep, or --rejection-denominator original", lambda: outcome(
        settings, samples
    ))  # fmt: skip


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
