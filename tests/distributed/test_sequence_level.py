"""The fused head with the tokens of a sequence spread over ranks, some of them empty; and metrics
reduced over a world in which not every rank has something to say.
"""

import dataclasses
import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.head import HeadOptions
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.loss.metrics import (
    SIGNS,
    MicroBatchMetrics,
    metric_table,
    metrics_on,
    reduce_metrics,
)
from megatron_pg.loss.micro_batch import MicroBatchLoss, gradient_scope
from megatron_pg.megatron.fused_head import FusedHead
from megatron_pg.step.batch import pack
from megatron_pg.step.totals import step_totals
from tests.distributed.launch import run_ranks
from tests.fast import objectives_oracle as oracle
from tests.fast.objectives_oracle import Sequence1
from tests.fast.sequences import flat_log_probs, package_sample, random_sequence, random_sequences
from tests.fast.test_corrections import GEOMETRIC, OPSM, TIS_SEQUENCE, correction_of

MICRO_BATCHES: dict[str, list[Sequence1]] = {
    "ragged": random_sequences(1),
    # One response token in all: every rank but one has an empty window.
    "one_token": [random_sequence(11, 1, active_rate=1.0)],
    "long": [random_sequence(12, 3), random_sequence(13, 17)],
}
GSPO = {"policy_loss": "gspo"}
CASES: dict[str, dict[str, Any]] = {
    "gspo": GSPO,
    "by turn": {**GSPO, "sequence_unit": "turn", **TIS_SEQUENCE, **GEOMETRIC, **OPSM},
}


def samples_of(sequences: list[Sequence1]) -> list:
    return [package_sample(s, group_index=index // 2) for index, s in enumerate(sequences)]


HIDDEN, VOCABULARY = 4, 9


def hidden_and_weight(sequences: list[Sequence1]) -> tuple[Tensor, Tensor]:
    """Leaves [tokens of the samples laid end to end, hidden] and [vocabulary, hidden]; prompts have
    two tokens.
    """
    generator = torch.Generator().manual_seed(7)
    rows = sum(2 + len(s.loss_mask) for s in sequences)
    shapes = (rows, HIDDEN), (VOCABULARY, HIDDEN)
    hidden, weight = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return hidden.requires_grad_(), weight.requires_grad_()


def fused_worker() -> dict:
    """By case and layout, this rank's loss and its gradients, in chunks of a row."""
    results, place = {}, (dist.get_rank(), dist.get_world_size())
    for case, name in itertools.product(CASES, MICRO_BATCHES):
        config, sequences = PolicyLossConfig(**CASES[case]), MICRO_BATCHES[name]
        samples = samples_of(sequences)
        batch = pack(samples, cp_rank=place[0], cp_size=place[1])
        hidden, weight = hidden_and_weight(sequences)
        loss = MicroBatchLoss(config, batch, step_totals(samples), dist.group.WORLD)
        head = FusedHead(loss, HeadOptions(chunk_tokens=1), gradient_scope(config))
        value = head.output_processor(hidden[batch.window.token_indices][:, None], weight)
        value.backward()
        results[case, name] = value.detach(), hidden.grad, weight.grad
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_fused_head_equals_the_unsharded_formula(size: int) -> None:
    """From hidden states, of which a rank has its own; the gradients of all ranks are added up."""
    ranks = run_ranks(fused_worker, size)
    for case, name in ranks[0]:
        settings, total, sequences = CASES[case], oracle.ZERO, MICRO_BATCHES[name]
        hidden, weight = hidden_and_weight(sequences)
        log_probs, row = (hidden @ weight.T).log_softmax(1)[:, 0], 1
        for s in sequences:
            length = len(s.loss_mask)
            scored = dataclasses.replace(s, log_probs=log_probs[row : row + length])
            by_turn = "sequence_unit" in settings
            losses = oracle.objective(settings["policy_loss"], scored, by_turn=by_turn)
            losses, _ = oracle.correct(scored, losses, correction_of(settings))
            total = total + sum(losses, oracle.ZERO) / max(sum(s.loss_mask), 1)
            row += 2 + length
        total = total / len(sequences) + 0.0 * (hidden.sum() + weight.sum())  # also if all is clipped
        expected = (total.detach(), *torch.autograd.grad(total, (hidden, weight)))
        assert name == "one_token" or expected[1].abs().max() > 1e-4
        parts = zip(*(rank[case, name] for rank in ranks), strict=True)
        for of_ranks, wanted in zip(parts, expected, strict=True):
            torch.testing.assert_close(sum(of_ranks), wanted, rtol=1e-11, atol=1e-11)


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


def test_zero_is_not_the_identity_of_the_maximum() -> None:
    found = run_ranks(with_zero_for_an_identity, WORLD_SIZE)[0]
    assert found["max_advantage"] == 0
