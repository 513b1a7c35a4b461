"""Objectives and sequence-level corrections with the tokens of a sequence spread over ranks, some of them empty."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.corrections import apply_corrections
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.loss.objectives import OBJECTIVES
from megatron_pg.loss.reducer import Reducer, get_pg_loss_reducer
from megatron_pg.step.batch import pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals
from tests.distributed.launch import run_ranks
from tests.fast import objectives_oracle as oracle
from tests.fast.objectives_oracle import Correction, Sequence1
from tests.fast.sequences import (
    flat_gradient,
    flat_log_probs,
    package_sample,
    random_sequence,
    random_sequences,
    stacked,
    tokens_and_sums,
)
from tests.lanes import in_one_lane
from tests.random_steps import uneven_totals

pytestmark = in_one_lane

MICRO_BATCHES: dict[str, list[Sequence1]] = {
    "ragged": random_sequences(1),
    # One response token in all: every rank but one has an empty window.
    "one_token": [random_sequence(11, 1, active_rate=1.0)],
}

CASES: dict[str, tuple[dict, Correction]] = {
    "gspo": ({"policy_loss": "gspo"}, Correction()),
    "gspo_with_corrections": (
        {
            "policy_loss": "gspo",
            "use_tis": True,
            "tis_level": "sequence",
            "tis_clip_low": 0.5,
            "tis_clip": 1.5,
            "use_geometric_rejection": True,
            "geometric_rejection_low": 0.95,
            "geometric_rejection_high": 1.03,
            "use_opsm": True,
            "opsm_delta": 0.01,
        },
        Correction("sequence", 0.5, 1.5, geometric=(0.95, 1.03), opsm_delta=0.01),
    ),
    "ppo_with_opsm": ({"use_opsm": True, "opsm_delta": 0.01}, Correction(opsm_delta=0.01)),
    "geometric_mask_and_sequence_rejection": (
        {
            "use_tis": True,
            "tis_level": "geometric",
            "tis_mode": "mask",
            "tis_clip_low": 0.95,
            "tis_clip": 1.05,
            "use_sequence_rejection": True,
            "sequence_rejection_low": 0.8,
            "sequence_rejection_high": math.inf,
        },
        Correction("geometric_mask", 0.95, 1.05, sequence=(0.8, math.inf)),
    ),
    "tis_geometric": (
        {"use_tis": True, "tis_level": "geometric", "tis_clip_low": 0.97, "tis_clip": 1.02},
        Correction("geometric", 0.97, 1.02),
    ),
    "ppo_token_level": ({"use_tis": True, "tis_clip": 1.1}, Correction("token", tis_high=1.1)),
    "gmpo": ({"policy_loss": "gmpo"}, Correction()),
    "gmpo_against_rollout_with_corrections": (
        {
            "policy_loss": "gmpo",
            "ratio_anchor": "rollout",
            "use_geometric_rejection": True,
            "geometric_rejection_low": 0.95,
            "geometric_rejection_high": 1.03,
            "use_opsm": True,
            "opsm_delta": 0.01,
        },
        Correction(geometric=(0.95, 1.03), opsm_delta=0.01, anchor="rollout"),
    ),
    "gspo_against_rollout": ({"policy_loss": "gspo", "ratio_anchor": "rollout"}, Correction()),
    "ppo_against_rollout": ({"ratio_anchor": "rollout"}, Correction()),
    **{name: ({"policy_loss": name}, Correction()) for name in ("sapo", "dppo_tv", "dppo_kl")},
    "dppo_tv_against_rollout": (
        {"policy_loss": "dppo_tv", "ratio_anchor": "rollout"},
        Correction(),
    ),
}
SUMS = {
    "gspo_with_corrections": 2,
    "geometric_mask_and_sequence_rejection": 1,
    "gmpo_against_rollout_with_corrections": 3,
    **dict.fromkeys(("gspo", "gspo_against_rollout", "gmpo", "ppo_with_opsm", "tis_geometric"), 1),
}
"""What a case sums over sequences, beside their active tokens; without an entry nothing."""

AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")


def samples_of(sequences: list[Sequence1]) -> list:
    return [package_sample(s, group_index=index // 2) for index, s in enumerate(sequences)]


def corrected_on_this_rank(
    settings: dict, sequences: list[Sequence1], group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(indices into the responses laid end to end, losses, gradient for all log-probs)."""
    config = PolicyLossConfig(**settings)
    batch = pack(samples_of(sequences), cp_rank=dist.get_rank(), cp_size=dist.get_world_size())
    everything = flat_log_probs(sequences)
    log_probs = everything[batch.window.response_indices]
    tokens, sums = tokens_and_sums(config, batch, log_probs, group)
    loss = OBJECTIVES[config.policy_loss](config, tokens, sums).loss
    found = apply_corrections(config, tokens, loss, sums)
    found.loss.sum().backward()
    return batch.window.response_indices, found.loss.detach(), everything.grad


def corrections_worker() -> dict:
    """Every case: the rank's losses, and the shapes of the tensors that were all-reduced."""
    results = {}
    original = dist.all_reduce
    for case, (settings, _) in CASES.items():
        for name, sequences in MICRO_BATCHES.items():
            shapes: list[tuple[int, ...]] = []

            def counted(tensor: Tensor, *args: object, shapes=shapes, **options: object):
                shapes.append(tuple(tensor.shape))
                return original(tensor, *args, **options)

            dist.all_reduce = counted
            try:
                found = corrected_on_this_rank(settings, sequences, dist.group.WORLD)
            finally:
                dist.all_reduce = original
            mutant = corrected_on_this_rank(settings, sequences, None)
            results[case, name] = (found, mutant, shapes)
    return results


def assembled(parts: list[tuple[Tensor, Tensor, Tensor]], length: int) -> tuple[Tensor, Tensor]:
    losses = torch.zeros(length, dtype=torch.float64)
    for indices, values, _ in parts:
        losses[indices] = values
    return losses, sum(gradient for _, _, gradient in parts)


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_level_settings_equal_the_unsharded_formula(size: int) -> None:
    ranks = run_ranks(corrections_worker, size)
    for case, (settings, correction) in CASES.items():
        policy_loss = settings.get("policy_loss", "ppo")
        anchor = settings.get("ratio_anchor", "old")
        for name, sequences in MICRO_BATCHES.items():
            expected = stacked(
                [
                    oracle.correct(s, oracle.objective(policy_loss, s, anchor=anchor), correction)[
                        0
                    ]
                    for s in sequences
                ]
            )
            gradient = flat_gradient(expected.sum(), sequences)
            found, found_gradient = assembled(
                [rank[case, name][0] for rank in ranks], expected.numel()
            )
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=1e-12)

            is_sequence_level = case in SUMS
            shapes = [(1 + SUMS[case], len(sequences))] if is_sequence_level else []
            assert all(rank[case, name][2] == shapes for rank in ranks), "one all-reduce, by all"
            if name == "ragged" and is_sequence_level:
                mutant, _ = assembled([rank[case, name][1] for rank in ranks], expected.numel())
                assert not torch.allclose(mutant, expected, atol=1e-3), "local sums would pass"
    windows = [rank["gspo", "one_token"][0][0].numel() for rank in ranks]
    assert sorted(windows) == [0] * (size - 1) + [1]


def aggregation_worker() -> dict[str, tuple[float, Tensor]]:
    sequences = MICRO_BATCHES["ragged"]
    samples = samples_of(sequences)
    batch = pack(samples, cp_rank=dist.get_rank(), cp_size=dist.get_world_size())
    results = {}
    for aggregation in AGGREGATIONS:
        config = PolicyLossConfig(
            policy_loss="gspo",
            loss_aggregation=aggregation,
            loss_aggregation_divisor=4.0 if aggregation == "constant" else None,
        )
        everything = flat_log_probs(sequences)
        loss, _ = policy_loss_from_log_probs(
            config,
            batch,
            everything[batch.window.response_indices],
            None,
            totals=uneven_totals(samples),
            context_parallel_group=dist.group.WORLD,
        )
        loss.backward()
        results[aggregation] = (loss.item(), everything.grad)
    return results


def test_gspo_under_every_aggregation() -> None:
    sequences = MICRO_BATCHES["ragged"]
    counts = [sum(s.loss_mask) for s in sequences]
    group_counts = [
        sum(counts[index // 2 * 2 : index // 2 * 2 + 2]) for index in range(len(counts))
    ]
    num_groups = (len(sequences) + 1) // 2
    weights = {
        "sample_mean": [1 / max(count, 1) / len(sequences) for count in counts],
        "prompt_mean": [1 / max(count, 1) / num_groups for count in group_counts],
        "token_mean": [1 / sum(counts)] * len(counts),
        "constant": [1 / 4.0 / len(sequences)] * len(counts),
    }
    ranks = run_ranks(aggregation_worker, 2)
    for aggregation in AGGREGATIONS:
        expected = sum(
            weight * sum(oracle.objective("gspo", s), oracle.ZERO)
            for weight, s in zip(weights[aggregation], sequences, strict=True)
        )
        gradient = flat_gradient(expected, sequences)
        found = sum(rank[aggregation][0] for rank in ranks)
        assert found == pytest.approx(expected.item(), abs=1e-12)
        found_gradient = sum(rank[aggregation][1] for rank in ranks)
        torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=1e-12)


def mean_of_what_is_left(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[Tensor],
    calculate_per_token_loss: bool,
    **place: Any,
) -> Reducer:
    """The token mean of every sample, of the masks that it is given."""
    received.append([mask.tolist() for mask in loss_masks])
    return get_pg_loss_reducer(total_lengths, response_lengths, loss_masks, **place)


received: list[list[list[float]]] = []


def reducer_of_place(
    total_lengths, response_lengths, loss_masks, calculate_per_token_loss,
    cp_rank, cp_size, cp_partition_mode, pad_to_multiple,
):  # fmt: skip
    return mean_of_what_is_left(
        total_lengths, response_lengths, loss_masks, calculate_per_token_loss, cp_rank=cp_rank,
        cp_size=cp_size, cp_partition_mode=cp_partition_mode, pad_to_multiple=pad_to_multiple,
    )  # fmt: skip


DROPPING = {
    "icepop": (
        {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.9, "tis_clip": 1.1},
        Correction("mask", 0.9, 1.1),
    ),
    **{
        name: CASES[name]
        for name in ("geometric_mask_and_sequence_rejection", "ppo_with_opsm", "ppo_token_level")
    },
}
TERMS = {"kl_loss_coef": 0.3, "regularizer_aggregation": "loss"}
Reduced = tuple[float, Tensor, list[list[list[float]]], list[tuple[int, ...]]]


def reducer_worker() -> dict[tuple[str, str, str], Reduced]:
    """Loss, gradient, the masks of the calls and the shapes of the all-reduces of one rank."""
    results: dict[tuple[str, str, str], Reduced] = {}
    original, path = dist.all_reduce, f"{__name__}:reducer_of_place"
    for case, mode, name in itertools.product(DROPPING, ("zigzag", "contiguous"), MICRO_BATCHES):
        shapes: list[tuple[int, ...]] = []

        def counted(tensor: Tensor, *args: object, shapes=shapes, **options: object):
            shapes.append(tuple(tensor.shape))
            return original(tensor, *args, **options)

        config = PolicyLossConfig(
            custom_pg_loss_reducer_function_path=path,
            cp_partition_mode=mode,
            **DROPPING[case][0],
            **TERMS,
        )
        samples = samples_of(MICRO_BATCHES[name])
        rank, size = dist.get_rank(), dist.get_world_size()
        batch = pack(samples, cp_rank=rank, cp_size=size, cp_partition_mode=mode)
        everything = flat_log_probs(MICRO_BATCHES[name])
        log_probs, totals = everything[batch.window.response_indices], step_totals(samples)
        received.clear()
        dist.all_reduce = counted
        try:
            loss, _ = policy_loss_from_log_probs(
                config, batch, log_probs, None, totals=totals, context_parallel_group=dist.group.WORLD
            )  # fmt: skip
        finally:
            dist.all_reduce = original
        loss.backward()
        results[case, mode, name] = (loss.item(), everything.grad, list(received), shapes)
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_a_users_reducer_gets_whole_masks_after_rejection(size: int) -> None:
    """On every rank, those whose window is empty included; KL follows it with the masks from before."""
    ranks = run_ranks(reducer_worker, size)
    for case, mode, name in ranks[0]:
        sequences, correction = MICRO_BATCHES[name], DROPPING[case][1]
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
        found = [rank[case, mode, name] for rank in ranks]
        assert sum(loss for loss, *_ in found) == pytest.approx(expected.item(), rel=1e-12)
        gradient = sum(of_rank for _, of_rank, *_ in found)
        wanted = flat_gradient(expected, sequences)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
        is_dropping = correction.rejects()
        for *_, masks, shapes in found:
            assert masks == ([after, before] if is_dropping else [before])
            of_sequences = [(1 + SUMS[case], max(len(sequences), 2))] if case in SUMS else []
            assert shapes == of_sequences + [(sum(map(len, before)),)] * is_dropping
        assert name != "ragged" or (after != before) == is_dropping


def reduction_worker() -> tuple[Tensor, Tensor]:
    """Rank 1 of 2 has no token of the sample at all."""
    sample = Sample(
        tokens=[1] * 12,
        response_length=2,
        loss_mask=[1, 1],
        advantages=[1.0] * 2,
        old_log_probs=[-1.0, -2.0],
    )
    batch = pack([sample], cp_rank=dist.get_rank(), cp_size=2)
    log_probs = batch.old_log_probs + torch.tensor([0.25, 0.5])[: len(batch.window)]
    config = PolicyLossConfig(policy_loss="gspo")
    tokens, sums = tokens_and_sums(config, batch, log_probs.requires_grad_(), dist.group.WORLD)
    assert not sums.total("policy").requires_grad and tokens.log_probs.requires_grad
    return sums.sums["policy"], sums.mean("policy")


def test_sums_means_and_broadcast() -> None:
    for rank, (total, mean) in enumerate(run_ranks(reduction_worker, 2)):
        assert total.tolist() == [0.75]
        assert mean.tolist() == [0.375] * (2, 0)[rank]
