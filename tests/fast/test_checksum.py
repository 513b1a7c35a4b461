"""The aggregation checksum of a step that is short, or empty; `test_checksum_numbers` has whole and
exchanged ones.
"""

import logging

import pytest
import torch

from megatron_pg import PolicyLossConfig, Sample, pack
from megatron_pg.loss.checksum import check_checksum
from tests.fast.one_step import loss_of, reported
from tests.fast.refusals import assert_refused
from tests.random_steps import uneven_totals


def sample(name: str, mask: list[int]) -> Sample:
    return Sample([1, 2, 3], 2, mask, old_log_probs=[0.0, 0.0], name=name)


MASKED = [sample(name, [0, 0]) for name in "abc"]


def checksum_of(step: list[Sample], parts: list[list[Sample]], *, check: bool = True) -> float:
    """Of a step of these samples, whose micro-batches hold those."""
    config, totals = PolicyLossConfig(check_aggregation=check), uneven_totals(step)
    metrics = []
    for batch in map(pack, parts):
        settings = {"totals": totals, "step_share": 1 / len(parts)}
        metrics.append(loss_of(config, batch, torch.zeros(len(batch.window)), **settings)[1])
    return reported(config, *metrics)["aggregation_checksum"]


def test_without_the_flag_it_is_one_warning(caplog, monkeypatch):
    monkeypatch.setattr("megatron_pg.loss.checksum._warned_of", set())
    step = [sample(name, [0, 1]) for name in "abcdef"]
    with caplog.at_level(logging.WARNING, logger="megatron_pg"):
        values = [checksum_of(step, [step[:-2]], check=False) for _ in range(2)]
        checksum_of(step, [step[:-1]], check=False)  # another number is no other news
    assert values == pytest.approx([4 / 6, 4 / 6])
    assert [record.message.count("expected 1") for record in caplog.records] == [1]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7])
def test_a_step_without_an_active_token_is_whole_however_it_is_cut(num_microbatches):
    parts = [MASKED[index : index + 1] for index in range(num_microbatches)]
    assert checksum_of(MASKED, parts) == pytest.approx(1, abs=1e-12)


def test_an_active_token_that_the_totals_lack_is_named():
    """In a step that holds none by its totals."""
    parts = [MASKED, [sample("stranger", [0, 1])]]
    assert_refused("are missing from step_totals", checksum_of, MASKED, parts, error=RuntimeError)


@pytest.mark.parametrize("wrong", [1 + 2e-5, 1 - 2e-5, 0.0, 2.0, float("nan")])
def test_one_sample_in_ten_thousand_is_noticed(wrong):
    config = PolicyLossConfig(check_aggregation=True)
    with pytest.raises(RuntimeError, match="aggregation_checksum"):
        check_checksum(config, {"aggregation_checksum": wrong})
    for right in (1.0, 1 + 5e-6, 1 - 5e-6):
        check_checksum(config, {"aggregation_checksum": right})
