"""The aggregation checksum is 1 for a step that is whole, and names one that is not."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_pg import (
    AGGREGATIONS,
    PackedBatch,
    PolicyLossConfig,
    Sample,
    pack,
    policy_loss_function,
    reduce_metrics,
)
from megatron_pg.loss.metrics import check_checksum
from tests.random_steps import uneven_totals

VOCAB_SIZE = 7


def step(lengths: list[tuple[int, int]]) -> list[Sample]:
    """Samples of these (total, response) lengths; the first response token of each is masked."""
    return [
        Sample(
            tokens=torch.arange(total) % VOCAB_SIZE,
            response_length=response,
            loss_mask=[0] + [1] * (response - 1),
            advantages=1.0,
            old_log_probs=torch.full((response,), -1.0),
            group_index=index // 2,
            name=f"sample {index}",
        )
        for index, (total, response) in enumerate(lengths)
    ]


SAMPLES = step([(9, 5), (15, 11), (6, 2), (21, 17), (8, 7), (4, 3)])
EVERY_MODE = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def checksum_of(
    aggregation: str, parts: list[PackedBatch], *, check_aggregation: bool = False
) -> float:
    """Of the step whose micro-batches and context-parallel parts are these."""
    config = PolicyLossConfig(
        loss_aggregation=aggregation,  # type: ignore[arg-type]
        loss_aggregation_divisor=16.0 if aggregation == "constant" else None,
        check_aggregation=check_aggregation,
    )
    totals = uneven_totals(SAMPLES)
    metrics = []
    for part in parts:
        logits = torch.zeros(part.window.local_tokens, VOCAB_SIZE, requires_grad=True)
        _, metric = policy_loss_function(
            config, part, logits, totals=totals, step_share=1 / len(parts)
        )
        metrics.append(metric)
    return reduce_metrics(config, metrics, contributes=True, device="cpu")["aggregation_checksum"]


@EVERY_MODE
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_whole_step_has_checksum_one(aggregation, cp_size):
    parts = [
        pack(samples, cp_rank=rank, cp_size=cp_size)
        for samples in (SAMPLES[:2], SAMPLES[2:])
        for rank in range(cp_size)
    ]
    assert checksum_of(aggregation, parts, check_aggregation=True) == pytest.approx(1, abs=1e-12)


@EVERY_MODE
def test_a_duplicated_sample_is_named(aggregation):
    with pytest.raises(RuntimeError, match="trained on twice"):
        checksum_of(aggregation, [pack(SAMPLES), pack(SAMPLES[:1])], check_aggregation=True)


@EVERY_MODE
def test_a_dropped_sample_is_named(aggregation):
    with pytest.raises(RuntimeError, match="samples were dropped"):
        checksum_of(aggregation, [pack(SAMPLES[1:])], check_aggregation=True)


@EVERY_MODE
def test_a_sample_sliced_for_another_rank_is_named(aggregation):
    parts = [pack(SAMPLES, cp_rank=0, cp_size=2), pack(SAMPLES, cp_rank=0, cp_size=2)]
    with pytest.raises(RuntimeError, match="another context-parallel rank"):
        checksum_of(aggregation, parts, check_aggregation=True)


def test_without_the_flag_it_is_one_warning(caplog, monkeypatch):
    monkeypatch.setattr("megatron_pg.loss.metrics._warned_of", set())
    with caplog.at_level(logging.WARNING, logger="megatron_pg"):
        values = [checksum_of("sample_mean", [pack(SAMPLES[:-2])]) for _ in range(2)]
        checksum_of("sample_mean", [pack(SAMPLES[:-1])])  # another number is no other news
    assert values == pytest.approx([4 / 6, 4 / 6])
    assert [record.message.count("expected 1") for record in caplog.records] == [1]


def test_a_step_without_an_active_token_is_whole():
    masked = Sample([1, 2, 3], 2, [0, 0], old_log_probs=[0.0, 0.0], name="masked")
    config = PolicyLossConfig(check_aggregation=True)
    batch = pack([masked])
    logits = torch.zeros(batch.window.local_tokens, VOCAB_SIZE, requires_grad=True)
    loss, metrics = policy_loss_function(config, batch, logits, totals=uneven_totals([masked]))
    loss.backward()
    reduced = reduce_metrics(config, [metrics], contributes=True, device="cpu")
    assert reduced["aggregation_checksum"] == 1 and reduced["pg_loss"] == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


MASKED = [Sample([1, 2, 3], 2, [0, 0], old_log_probs=[0.0, 0.0], name=name) for name in "abc"]


def checksum_of_masked(parts: list[list[Sample]]) -> float:
    """Of a step of the masked samples, whose micro-batches hold these."""
    config, totals = (PolicyLossConfig(check_aggregation=True), uneven_totals(MASKED))
    share, metrics = 1 / len(parts), []
    for part in parts:
        batch = pack(part)
        logits = torch.zeros(batch.window.local_tokens, VOCAB_SIZE, requires_grad=True)
        _, metric = policy_loss_function(config, batch, logits, totals=totals, step_share=share)
        metrics.append(metric)
    return reduce_metrics(config, metrics, contributes=True, device="cpu")["aggregation_checksum"]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7])
def test_a_step_without_an_active_token_is_whole_however_it_is_cut(num_microbatches):
    parts = [MASKED[index : index + 1] for index in range(num_microbatches)]
    assert checksum_of_masked(parts) == pytest.approx(1, abs=1e-12)


def test_an_active_token_that_the_totals_lack_is_named():
    """In a step that holds none by its totals."""
    stranger = Sample([1, 2, 3], 2, [0, 1], old_log_probs=[0.0, 0.0], name="stranger")
    with pytest.raises(RuntimeError, match="are missing from step_totals"):
        checksum_of_masked([MASKED, [stranger]])


@pytest.mark.parametrize("wrong", [1 + 2e-5, 1 - 2e-5, 0.0, 2.0, float("nan")])
def test_one_sample_in_ten_thousand_is_noticed(wrong):
    config = PolicyLossConfig(check_aggregation=True)
    with pytest.raises(RuntimeError, match="aggregation_checksum"):
        check_checksum(config, {"aggregation_checksum": wrong})
    for right in (1.0, 1 + 5e-6, 1 - 5e-6):
        check_checksum(config, {"aggregation_checksum": right})
