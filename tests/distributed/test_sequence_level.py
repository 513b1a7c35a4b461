"""Objectives and sequence-level corrections with the tokens of a sequence spread over ranks, some
of them empty; and metrics reduced over a world in which not every rank has something to say.
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
from megatron_pg.loss.corrections import apply_corrections
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.loss.metrics import (
    SIGNS,
    MicroBatchMetrics,
    metric_table,
    metrics_on,
    reduce_metrics,
)
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.objectives import OBJECTIVES
from megatron_pg.loss.reducer import get_pg_loss_reducer
from megatron_pg.loss.resolved import resolve
from megatron_pg.megatron.fused_head import FusedHead
from megatron_pg.step.batch import pack
from megatron_pg.step.totals import step_totals
from tests.distributed.launch import run_ranks
from tests.fast import objectives_oracle as oracle
from tests.fast.objectives_oracle import Sequence1
from tests.fast.sequences import (
    flat_gradient,
    flat_log_probs,
    package_sample,
    random_sequence,
    random_sequences,
    stacked,
    tokens_and_sums,
)
from tests.fast.test_corrections import GEOMETRIC, OPSM, TIS_SEQUENCE, correction_of, sequence, tis

MICRO_BATCHES: dict[str, list[Sequence1]] = {
    "ragged": random_sequences(1),
    # One response token in all: every rank but one has an empty window.
    "one_token": [random_sequence(11, 1, active_rate=1.0)],
    "long": [random_sequence(12, 3), random_sequence(13, 17)],
}
GSPO, GMPO, ROLLOUT = {"policy_loss": "gspo"}, {"policy_loss": "gmpo"}, {"ratio_anchor": "rollout"}
TURN = {"sequence_unit": "turn"}
MASKED = tis(0.95, 1.05, tis_level="geometric", tis_mode="mask")
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "gspo": (1, GSPO),
    "gspo_with_corrections": (2, {**GSPO, **TIS_SEQUENCE, **GEOMETRIC, **OPSM}),
    "ppo_with_opsm": (1, OPSM),
    "geometric_mask_and_sequence_rejection": (1, {**MASKED, **sequence(0.8, math.inf)}),
    "tis_geometric": (1, tis(0.97, 1.02, tis_level="geometric")),
    "ppo_token_level": (0, tis(0.0, 1.1)),
    "icepop": (0, tis(0.9, 1.1, tis_mode="mask")),
    "gmpo": (1, GMPO),
    "gmpo_against_rollout_with_corrections": (3, {**GMPO, **ROLLOUT, **GEOMETRIC, **OPSM}),
    "gspo_against_rollout": (1, {**GSPO, **ROLLOUT}),
    "ppo_against_rollout": (0, ROLLOUT),
    **{name: (0, {"policy_loss": name}) for name in ("sapo", "dppo_tv", "dppo_kl", "dis")},
    "vespo": (1, {"policy_loss": "vespo"}),
    "vespo_against_rollout": (1, {"policy_loss": "vespo", **ROLLOUT, **OPSM}),
    "dppo_tv_against_rollout": (0, {"policy_loss": "dppo_tv", **ROLLOUT}),
    "gspo_by_turn_with_corrections": (2, {**GSPO, **TURN, **TIS_SEQUENCE, **GEOMETRIC, **OPSM}),
}
"""The number of sums over sequences, beside their active tokens; the settings."""


def samples_of(sequences: list[Sequence1]) -> list:
    return [package_sample(s, group_index=index // 2) for index, s in enumerate(sequences)]


def corrected_on_this_rank(
    settings: dict, sequences: list[Sequence1], group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(indices into the responses laid end to end, losses, gradient for all log-probs)."""
    config = PolicyLossConfig(**settings)
    cut = {"cp_rank": dist.get_rank(), "cp_size": dist.get_world_size()}
    batch = pack(samples_of(sequences), **cut)
    everything = flat_log_probs(sequences)
    log_probs = everything[batch.window.response_indices]
    tokens, sums = tokens_and_sums(config, batch, log_probs, group)
    loss = OBJECTIVES[config.policy_loss].function(config, tokens, sums).loss
    corrected = apply_corrections(config, tokens, loss, sums, resolve(config).corrections)
    corrected.loss.sum().backward()
    return batch.window.response_indices, corrected.loss.detach(), everything.grad


def shapes_of(reductions: mock.Mock) -> list[tuple[int, ...]]:
    return [tuple(call.args[0].shape) for call in reductions.call_args_list]


def corrections_worker() -> dict:
    """Every case: the rank's losses, those of local sums, and the shapes of the tensors that were
    all-reduced.
    """
    results = {}
    for (case, (_, settings)), name in itertools.product(CASES.items(), MICRO_BATCHES):
        task = settings, MICRO_BATCHES[name]
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions:
            found = corrected_on_this_rank(*task, dist.group.WORLD)
        mutant = corrected_on_this_rank(*task, None)
        results[case, name] = found, mutant, shapes_of(reductions)
    return results


def assembled(parts: list[tuple[Tensor, Tensor, Tensor]], length: int) -> tuple[Tensor, Tensor]:
    losses = torch.zeros(length, dtype=torch.float64)
    for indices, values, _ in parts:
        losses[indices] = values
    return losses, sum(gradient for _, _, gradient in parts)


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_level_settings_equal_the_unsharded_formula(size: int) -> None:
    ranks = run_ranks(corrections_worker, size)
    for case, name in ranks[0]:
        (num_sums, settings), sequences = CASES[case], MICRO_BATCHES[name]
        policy_loss = settings.get("policy_loss", "ppo")
        anchor = settings.get("ratio_anchor", "old")
        correction = dataclasses.replace(correction_of(settings), anchor=anchor)
        of_oracle = {"anchor": anchor, "by_turn": "sequence_unit" in settings}
        losses = [oracle.objective(policy_loss, s, **of_oracle) for s in sequences]
        pairs = zip(sequences, losses, strict=True)
        expected = stacked([oracle.correct(*pair, correction)[0] for pair in pairs])
        gradient = flat_gradient(expected.sum(), sequences)
        found, mutants, shapes = zip(*(rank[case, name] for rank in ranks), strict=True)
        found_losses, found_gradient = assembled(found, expected.numel())
        torch.testing.assert_close(found_losses, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=1e-12)
        rows = (num_sums > 0) + num_sums
        turns = [(n, turn) for n, s in enumerate(sequences) for turn in set(s.turn_ids or [])]
        units = len(turns if of_oracle["by_turn"] else sequences)
        reduced = [(rows, max(units, 2))] if rows else []
        assert all(of_rank == reduced for of_rank in shapes), "one all-reduce, by all"
        if rows and name == "ragged":
            mutant, _ = assembled(mutants, expected.numel())
            assert not torch.allclose(mutant, expected, atol=1e-3), "local sums would pass"
    windows = [rank["gspo", "one_token"][0][0].numel() for rank in ranks]
    assert sorted(windows) == [0] * (size - 1) + [1]


FUSED = ("gspo", "gspo_by_turn_with_corrections")
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
    for case, name in itertools.product(FUSED, ("ragged", "long")):
        config, sequences = PolicyLossConfig(**CASES[case][1]), MICRO_BATCHES[name]
        samples = samples_of(sequences)
        batch = pack(samples, cp_rank=place[0], cp_size=place[1])
        hidden, weight = hidden_and_weight(sequences)
        loss = MicroBatchLoss(resolve(config), batch, step_totals(samples), dist.group.WORLD)
        head = FusedHead(loss, HeadOptions(chunk_tokens=1))
        value = head.output_processor(hidden[batch.window.token_indices][:, None], weight)
        value.backward()
        results[case, name] = value.detach(), hidden.grad, weight.grad
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_fused_head_equals_the_unsharded_formula(size: int) -> None:
    """From hidden states, of which a rank has its own; the gradients of all ranks are added up."""
    ranks = run_ranks(fused_worker, size)
    for case, name in ranks[0]:
        settings, total, sequences = CASES[case][1], oracle.ZERO, MICRO_BATCHES[name]
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
        total = total / len(sequences)
        expected = (total.detach(), *torch.autograd.grad(total, (hidden, weight)))
        assert expected[1].abs().max() > 1e-4
        parts = zip(*(rank[case, name] for rank in ranks), strict=True)
        for of_ranks, wanted in zip(parts, expected, strict=True):
            torch.testing.assert_close(sum(of_ranks), wanted, rtol=1e-11, atol=1e-11)


received: list[list[list[float]]] = []


def reducer_of_place(
    total_lengths, response_lengths, loss_masks, calculate_per_token_loss,
    cp_rank, cp_size,
):  # fmt: skip
    """The token mean of every sample, of the masks that it is given."""
    received.append([mask.tolist() for mask in loss_masks])
    return get_pg_loss_reducer(
        total_lengths, response_lengths, loss_masks, cp_rank=cp_rank, cp_size=cp_size
    )  # fmt: skip


DROPPING = (
    *("icepop", "geometric_mask_and_sequence_rejection", "ppo_with_opsm", "ppo_token_level"),
)


def reducer_worker() -> dict[tuple[str, str], Any]:
    """Loss, gradient, the masks of the calls and the shapes of the all-reduces of one rank."""
    results = {}
    rank, size = dist.get_rank(), dist.get_world_size()
    for case, name in itertools.product(DROPPING, MICRO_BATCHES):
        config = PolicyLossConfig(
            **CASES[case][1],
            custom_pg_loss_reducer_function_path=f"{__name__}:reducer_of_place",
            kl_loss_coef=0.3,
            regularizer_aggregation="loss",
        )
        samples = samples_of(MICRO_BATCHES[name])
        batch = pack(samples, cp_rank=rank, cp_size=size)
        everything = flat_log_probs(MICRO_BATCHES[name])
        log_probs, totals = everything[batch.window.response_indices], step_totals(samples)
        received.clear()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions:
            loss, _ = policy_loss_from_log_probs(
                config, batch, log_probs, None, totals=totals,
                context_parallel_group=dist.group.WORLD,
            )  # fmt: skip
        loss.backward()
        masks, shapes = list(received), shapes_of(reductions)
        results[case, name] = (loss.item(), everything.grad, masks, shapes)
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_a_users_reducer_gets_whole_masks_after_rejection(size: int) -> None:
    """On every rank, those whose window is empty included; KL follows it with the masks from
    before.
    """
    ranks = run_ranks(reducer_worker, size)
    for case, name in ranks[0]:
        (num_sums, settings), sequences = CASES[case], MICRO_BATCHES[name]
        correction = correction_of(settings)
        made = [oracle.correct(s, oracle.objective("ppo", s), correction) for s in sequences]
        before, after = [s.loss_mask for s in sequences], [mask for _, mask in made]
        expected = sum(
            (
                sum(losses, oracle.ZERO) / max(sum(mask), 1)
                + 0.3 * sum(oracle.kl(s, "k3"), oracle.ZERO) / max(sum(s.loss_mask), 1)
                for s, (losses, mask) in zip(sequences, made, strict=True)
            ),
            oracle.ZERO,
        ) / len(sequences)
        found = [rank[case, name] for rank in ranks]
        assert sum(loss for loss, *_ in found) == pytest.approx(expected.item(), rel=1e-12)
        gradient = sum(of_rank for _, of_rank, *_ in found)
        wanted = flat_gradient(expected, sequences)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
        is_dropping = correction.rejects()
        for *_, masks, shapes in found:
            assert masks == ([after, before] if is_dropping else [before])
            of_sequences = [(1 + num_sums, max(len(sequences), 2))] if num_sums else []
            assert shapes == of_sequences + [(sum(map(len, before)),)] * is_dropping
        assert name != "ragged" or (after != before) == is_dropping


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
