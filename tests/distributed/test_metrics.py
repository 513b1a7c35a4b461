"""Metrics reduced over a world in which not every rank has something to say."""

import dataclasses
import math
from unittest import mock

import torch
import torch.distributed as dist

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.loss.metrics import (
    SIGNS,
    MicroBatchMetrics,
    metric_table,
    metrics_on,
    reduce_metrics,
)
from megatron_pg.step.batch import pack
from megatron_pg.step.totals import step_totals
from tests.distributed.launch import run_ranks
from tests.fast.sequences import flat_log_probs, package_sample, random_sequences

WORLD_SIZE = 5
FIRST_STAGE, LAST_STAGE = (0,), (1, 3)
"""A rank of the first pipeline stage, and two data-parallel ranks of the last one. Ranks 2 and 4
are their tensor-parallel peers: they hold the same metrics and must not add them again."""

CONFIG = PolicyLossConfig(pg_metrics="with_entropy", use_tis=True)
STEP = [
    # All advantages are negative: a zero from any rank would become the maximum.
    dataclasses.replace(s, advantages=[-1.0 - t for t in range(len(s.advantages))])
    for s in random_sequences(1)
]
TOTALS = step_totals([package_sample(s) for s in STEP])
PARTS: dict[int, list[list[int]]] = {1: [[0, 1], [2], []], 3: [[3, 4, 5, 6]]}
"""Sample indices by micro-batch of the two data-parallel ranks, whose numbers of them differ."""


def metrics_of(indices: list[int], step_share: float) -> MicroBatchMetrics:
    sequences = [STEP[index] for index in indices]
    log_probs = flat_log_probs(sequences)
    batch = pack([package_sample(s) for s in sequences])
    step = {"totals": TOTALS, "step_share": step_share}
    return policy_loss_from_log_probs(CONFIG, batch, log_probs, -log_probs.detach(), **step)[1]


def of_this_rank() -> list[MicroBatchMetrics]:
    rank = dist.get_rank()
    if rank in FIRST_STAGE:
        return []
    parts = PARTS[rank if rank in LAST_STAGE else rank - 1]
    return [metrics_of(part, 1 / (len(LAST_STAGE) * len(parts))) for part in parts]


def reduced_metrics() -> tuple[dict[str, float], list[str]]:
    """(the reduced metrics, the operation of every all-reduce of the step)."""
    contributes = dist.get_rank() in LAST_STAGE
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions:
        micro_batches = of_this_rank()
        assert not reductions.called, "none before the end of the step"
        found = reduce_metrics(CONFIG, micro_batches, contributes=contributes, device="cpu")
    calls = reductions.call_args_list
    return found, [str(call.kwargs.get("op", dist.ReduceOp.SUM)) for call in calls]


def test_the_world_agrees_with_one_process_by_two_all_reduces() -> None:
    whole = metrics_of(list(range(len(STEP))), 1.0)
    expected = reduce_metrics(CONFIG, [whole], contributes=True, device="cpu")
    assert expected["max_advantage"] < 0 and math.isfinite(expected["entropy"])
    for found, operations in run_ranks(reduced_metrics, WORLD_SIZE):
        assert [operation.split(".")[-1] for operation in operations] == ["SUM", "MAX"]
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert abs(found[name] - value) <= 1e-12 * max(abs(value), 1), name


def with_zero_for_an_identity() -> dict[str, float]:
    """The mutant: the first stage brings zeros to both reductions, as a freshly zeroed buffer
    does.
    """
    micro_batches = of_this_rank()
    if not micro_batches:
        table = metric_table(CONFIG)
        num_extremes = sum(row.reduction in SIGNS for row in metrics_on(CONFIG))
        sizes = (len(table.names), 2), (num_extremes,)
        zeros = (torch.zeros(size, dtype=torch.float64) for size in sizes)
        micro_batches = [MicroBatchMetrics(table, *zeros)]
    contributes = dist.get_rank() in FIRST_STAGE + LAST_STAGE
    return reduce_metrics(CONFIG, micro_batches, contributes=contributes, device="cpu")


def test_mutant_zero_is_not_the_identity_of_the_maximum() -> None:
    found = run_ranks(with_zero_for_an_identity, WORLD_SIZE)[0]
    assert found["max_advantage"] == 0
