"""Versions of the policy by token, and old log-probs interpolated by them, against plain loops."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import (
    PolicyLossConfig,
    Sample,
    pack,
    policy_loss_from_log_probs,
    policy_loss_function,
    step_totals,
)
from megatron_pg.loss.metrics import reduce_metrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.rollout_files import RolloutFiles

from .refusals import assert_refused

CURRENT = 9
VERSIONS: tuple[Any, ...] = (9, [5, 5, 7, 8, 9], [8], 2, [])
"""Of each sample: of all its tokens, or of each."""
LENGTHS = (3, 5, 1, 6, 0)
INTERPOLATED = {"old_log_probs": "interpolated"}


def a_sample(number: int) -> Sample:
    generator, length = torch.Generator().manual_seed(number), LENGTHS[number]
    numbers = torch.rand(3, length, generator=generator)
    return Sample(
        torch.arange(length + 2),
        length,
        torch.arange(length) % 4 != 3,
        2 * numbers[0] - 1,
        rollout_log_probs=-1.0 - numbers[1],
        old_log_probs=-1.5 - numbers[2],
        policy_version=VERSIONS[number],
        group_index=number // 2,
        name=f"answer {number}",
    )


SAMPLES = [a_sample(number) for number in range(len(LENGTHS))]


def log_probs_of(samples: list[Sample]) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    count = sum(sample.response_length for sample in samples)
    return -1.0 - torch.rand(count, generator=generator, dtype=torch.float64)


def version_of(sample: Sample, token: int) -> int:
    version = sample.policy_version
    assert version is not None
    return version if isinstance(version, int) else int(version[token])


def loops(samples: list[Sample], log_probs: Tensor, use_tis: bool) -> Tensor:
    """PPO's loss by sample and token, with the old policy of A-3PO."""
    total, at = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        terms = []
        for token in range(sample.response_length):
            current, at = log_probs[at], at + 1
            if not sample.loss_mask[token]:
                continue
            rollout = sample.rollout_log_probs[token].double()
            staleness = CURRENT - version_of(sample, token)
            share = 1 / staleness if staleness else 0.0
            old = share * rollout + (1 - share) * current.item()
            ratio, advantage = (current - old).exp(), sample.advantages[token].double()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
            terms.append(loss * min(math.exp(old - rollout), 1.1) if use_tis else loss)
        total = total + sum(terms) / max(len(terms), 1)
    return total / len(samples)


def check_interpolation(use_tis: bool, cp_size: int) -> None:
    tis: dict[str, Any] = {"use_tis": True, "tis_clip": 1.1} if use_tis else {}
    config, totals = PolicyLossConfig(**INTERPOLATED, **tis), step_totals(SAMPLES)
    expected_at = log_probs_of(SAMPLES).requires_grad_()
    expected = loops(SAMPLES, expected_at, use_tis)
    (expected_gradient,) = torch.autograd.grad(expected, expected_at)
    log_probs, losses = log_probs_of(SAMPLES).requires_grad_(), []
    for rank in range(cp_size):
        batch = pack(SAMPLES, cp_rank=rank, cp_size=cp_size)
        mine = log_probs[batch.window.response_indices]
        losses.append(
            policy_loss_from_log_probs(
                config, batch, mine, None, totals=totals, policy_version=CURRENT
            )[0]
        )
    (gradient,) = torch.autograd.grad(sum(losses), log_probs)
    torch.testing.assert_close(sum(losses).double(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("use_tis", [False, True])
def test_interpolated_old_log_probs_are_those_of_the_loops(use_tis: bool, cp_size: int) -> None:
    check_interpolation(use_tis, cp_size)


def test_a_mutant_that_counts_one_version_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    init = MicroBatchLoss.__init__

    def later(self: MicroBatchLoss, *arguments: Any) -> None:
        init(self, *arguments[:-1], arguments[-1] + 1)

    monkeypatch.setattr(MicroBatchLoss, "__init__", later)
    with pytest.raises(AssertionError):
        check_interpolation(use_tis=True, cp_size=1)


def test_from_logits_it_is_the_loss_of_given_log_probs() -> None:
    """The same gradient for every logit as with the interpolated numbers in the samples."""
    batch = pack(SAMPLES)
    logits = torch.randn(len(batch.tokens), 11, generator=torch.Generator().manual_seed(1))
    own = logits.log_softmax(1)[batch.logit_rows, batch.targets[batch.logit_rows]]
    given = []
    for sample, part in zip(SAMPLES, own.split(list(LENGTHS)), strict=True):
        ages = [CURRENT - version_of(sample, token) for token in range(sample.response_length)]
        share = torch.tensor([1 / age if age else 0.0 for age in ages])
        old = share * sample.rollout_log_probs + (1 - share) * part
        given.append(replace(sample, old_log_probs=old))
    results = []
    for samples, settings in ((SAMPLES, INTERPOLATED), (given, {})):
        leaf = logits.clone().requires_grad_()
        config = PolicyLossConfig(use_tis=True, **settings)
        loss, _ = policy_loss_function(
            config, pack(samples), leaf, totals=step_totals(samples), policy_version=CURRENT
        )
        results += [[loss.detach(), *torch.autograd.grad(loss, leaf)]]
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_what_contradicts_interpolation_is_refused() -> None:
    def config(**settings: Any) -> PolicyLossConfig:
        return PolicyLossConfig(**INTERPOLATED, **settings)

    flag = "--old-log-probs interpolated"
    assert_refused(f"{flag} has no effect with --ratio-anchor", config, ratio_anchor="rollout")
    assert_refused(f"{flag} is not read by --policy-loss reinf", config, policy_loss="reinforce")

    def loss(samples: list[Sample], **keywords: Any) -> None:
        log_probs, totals = log_probs_of(samples), step_totals(samples)
        batch = pack(samples)
        policy_loss_from_log_probs(config(), batch, log_probs, None, totals=totals, **keywords)

    assert_refused("Pass PolicyStep(policy_version=...)", loss, SAMPLES)
    words = "answer 1: policy_version[4] is 9, newer than the step's policy_version 8"
    assert_refused(words, loss, SAMPLES[1:2], policy_version=8)
    loss([replace(SAMPLES[1], loss_mask=[1, 1, 1, 1, 0])], policy_version=8)
    for name in ("policy_version", "rollout_log_probs"):
        without = [replace(sample, **{name: None}) for sample in SAMPLES]
        words = f"answer 0 has no {name}, required by {flag}"
        assert_refused(words, loss, without, policy_version=CURRENT)


def active_versions() -> list[list[int]]:
    return [[version_of(s, t) for t in range(s.response_length) if s.loss_mask[t]] for s in SAMPLES]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_versions_of_tokens_reach_the_metrics(cp_size: int) -> None:
    """The mean of a sample's active tokens, then of the samples that have some; and the oldest
    token of all.
    """
    parts = []
    for rank in range(cp_size):
        batch = pack(SAMPLES, cp_rank=rank, cp_size=cp_size)
        mine = log_probs_of(SAMPLES)[batch.window.response_indices]
        keywords = {"totals": step_totals(SAMPLES), "step_share": 1 / cp_size}
        parts.append(policy_loss_from_log_probs(PolicyLossConfig(), batch, mine, None, **keywords))
    metrics = [each for _, each in parts]
    found = reduce_metrics(
        PolicyLossConfig(), metrics, contributes=True, device="cpu", policy_version=CURRENT
    )
    versions = [each for each in active_versions() if each]
    mean = sum(sum(each) / len(each) for each in versions) / len(versions)
    staleness = CURRENT - mean
    assert found["policy_version"] == pytest.approx(mean)
    assert found["staleness"] == pytest.approx(staleness)
    assert found["max_staleness"] == CURRENT - min(map(min, versions))
    of_first_tokens = sum(each[0] for each in versions) / len(versions)
    assert found["policy_version"] != pytest.approx(of_first_tokens), "the mutant is not seen"


def test_versions_are_checked() -> None:
    def with_versions(versions: Any) -> Sample:
        return replace(SAMPLES[0], policy_version=versions)

    assert with_versions(torch.tensor(3)).policy_version == 3
    assert with_versions([1, 2, 3]).policy_version.tolist() == [1, 2, 3]
    assert_refused("answer 0: policy_version has 2 values | (3)", with_versions, [1, 2])
    assert_refused("answer 0: policy_version has dtype", with_versions, [1.5, 2.0, 2.0])
    assert_refused("answer 0: policy_version is '7', expected an integer", with_versions, "7")


def test_files_have_one_version_or_one_per_token(tmp_path: Path) -> None:
    row = '{"prompt_ids": [1], "response_ids": [2, 3], "reward": 1, "policy_version": %s}\n'
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(row % version for version in ("4", "[4, 5]")))
    one, each = RolloutFiles([path], required_fields=["policy_version"]).pull(2)
    assert one.policy_version == 4 and each.policy_version.tolist() == [4, 5]
    for version, words in (
        ("[4, 5.5]", "policy_version[1] is 5.5, expected an integer"),
        ("[4]", "policy_version has 1 values, expected one per response token (2)"),
        ("true", "policy_version is True, expected an integer"),
    ):
        path.write_text(row % version)
        assert_refused(words, RolloutFiles([path]).pull, 1)


def test_parquet_has_versions_of_tokens(tmp_path: Path) -> None:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    path, versions = tmp_path / "rollouts.parquet", [[4, 5], [6, 6]]
    columns = {"prompt_ids": [[1], [1]], "response_ids": [[2, 3]] * 2, "reward": [1.0, 0.0]}
    parquet.write_table(pyarrow.table({**columns, "policy_version": versions}), path)
    samples = RolloutFiles([path]).pull(2)
    assert [sample.policy_version.tolist() for sample in samples] == versions
