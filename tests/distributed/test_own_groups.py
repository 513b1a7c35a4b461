"""A context-parallel group for each micro-batch: long ones on many ranks, short ones on few, in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pg.megatron.policy_step import PolicyStep
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.totals import step_totals
from tests.random_steps import package_samples

from .compare import compare
from .launch import RankError, run_ranks
from .models import ModelOptions, Sharding, gather_gradients
from .one_step import Outcome, build
from .reference import reference_steps
from .steps import AGGREGATIONS, NUM_SAMPLES, Run

# Learned positions, which need no group.
OPTIONS = ModelOptions(calculate_per_token_loss=True, cp_partition_mode="contiguous")
GRID = Sharding(context=2, data=2)
GROUPS = [(0, 1, 2, 3), (0, 1), (2, 3), (0,), (1,), (2,), (3,), (2, 3), (1, 2, 3)]
"""The ranks that hold each micro-batch, in one order for all, so that no two wait for each other."""
RUNS = [
    *(Run(name, regularized=place % 2 == 0) for place, name in enumerate(AGGREGATIONS)),
    *(Run(name, cp_partition_mode="contiguous") for name in AGGREGATIONS),
    Run("token_mean", shape="short"),
]

Change = Callable[[PackedBatch, Any, PolicyStep], Any]


def own_loss(batch: PackedBatch, group: Any, step: PolicyStep) -> Any:
    return step.head(batch, context_group=group)


def times_the_group(batch: PackedBatch, group: Any, step: PolicyStep) -> Any:
    """Mutant: the factor CP of the other loss mode."""
    head = step.head(batch, context_group=group)

    def loss_func(output: torch.Tensor) -> Any:
        loss, *rest = head.loss_func(output)
        return (loss * group.size(), *rest)

    return replace(head, loss_func=loss_func)


def tokens_of_the_group(batch: PackedBatch, group: Any, step: PolicyStep) -> Any:
    """Mutant: every rank of a group counts the tokens of all of them."""
    head = step.head(batch, context_group=group)

    def loss_func(output: torch.Tensor) -> Any:
        loss, tokens, metrics = head.loss_func(output)
        dist.all_reduce(tokens, group=group)
        return loss, tokens, metrics

    return replace(head, loss_func=loss_func)


def steps(
    head: Change, runs: list[Run], held_by: list[tuple[int, ...]] = GROUPS, policy_loss: str = "ppo"
) -> list[Outcome | None]:
    """Every run on four ranks; the samples dealt to the micro-batches in turn."""
    chunks = build(GRID, OPTIONS)
    groups = [dist.new_group(list(ranks)) for ranks in held_by]
    mine = [place for place, ranks in enumerate(held_by) if dist.get_rank() in ranks]
    outcomes = []
    for run in runs:
        samples = package_samples(run.samples)
        totals = step_totals(samples)
        batches, group_of = [], {}
        for place in mine:
            batch = pack(
                samples[place :: len(held_by)],
                cp_rank=dist.get_rank(groups[place]),
                cp_size=groups[place].size(),
                cp_partition_mode=run.cp_partition_mode,
            )
            batches.append(batch)
            group_of[id(batch)] = groups[place]
        config = replace(run.config, policy_loss=policy_loss)
        step = PolicyStep(config, totals=totals, num_microbatches=len(mine), model=chunks)
        for chunk in chunks:
            chunk.zero_grad_buffer()

        def of_batch(batch: PackedBatch, step: PolicyStep = step, of: Any = group_of) -> Any:
            return head(batch, of[id(batch)], step)

        metrics = step.metrics(run_micro_batches(of_batch, batches, chunks))
        gradients = gather_gradients(chunks)
        outcomes.append(None if gradients is None else Outcome(gradients, metrics))
    return outcomes


def test_the_gradient_is_the_unsharded_one_whatever_ranks_hold_a_micro_batch() -> None:
    assert len(GROUPS) < NUM_SAMPLES and {len(ranks) for ranks in GROUPS} == {1, 2, 3, 4}
    references = run_ranks(reference_steps, 1, OPTIONS, RUNS)[0]
    outcomes = run_ranks(steps, 4, own_loss, RUNS)[0]
    for run, outcome, expected in zip(RUNS, outcomes, references, strict=True):
        comparison = compare(outcome, expected)
        assert comparison.passed, f"{run}: {comparison}"
    for mutant in (times_the_group, tokens_of_the_group):
        wrong = run_ranks(steps, 4, mutant, RUNS[:1])[0][0]
        assert compare(wrong, references[0]).gradient_error > 1e-2, mutant.__name__


def test_sums_over_a_sequence_are_of_the_ranks_that_hold_it() -> None:
    """gspo, against every sample whole on one rank."""
    runs = [Run("prompt_mean"), Run("prompt_mean", cp_partition_mode="contiguous")]
    alone = [(place % 4,) for place in range(NUM_SAMPLES)]
    expected = run_ranks(steps, 4, own_loss, runs, alone, "gspo")[0]
    found = run_ranks(steps, 4, own_loss, runs, GROUPS, "gspo")[0]
    for outcome, whole in zip(found, expected, strict=True):
        comparison = compare(outcome, whole)
        assert comparison.passed and len(whole.metrics) > 10, str(comparison)
    # The objective is another one than token by token.
    (ppo,) = run_ranks(steps, 4, own_loss, runs[:1], GROUPS)[0]
    assert compare(ppo, expected[0]).gradient_error > 1e-2


def refusals() -> list[str]:
    """What is said of a group of its own outside of per-token mode, and with rotary positions."""
    (batch,) = [pack(package_samples(RUNS[0].samples[:3]))]
    said = []
    for options in (
        replace(OPTIONS, calculate_per_token_loss=False),
        ModelOptions(calculate_per_token_loss=True),
    ):
        chunks = build(Sharding(), options)
        step = PolicyStep(
            RUNS[0].config, totals=step_totals(batch.samples), num_microbatches=1, model=chunks
        )
        try:
            step.head(batch, context_group=dist.group.WORLD)
        except NotImplementedError as error:
            said.append(str(error))
    return said


def test_what_is_not_exact_with_groups_of_their_own_is_refused() -> None:
    mode, rotary = run_ranks(refusals, 1)[0]
    assert "--calculate-per-token-loss" in mode
    assert "--position-embedding-type rope" in rotary


def test_a_batch_packed_for_another_group_is_refused() -> None:
    with pytest.raises(RankError, match="packed for context-parallel rank"):
        run_ranks(wrong_group, 1)


def wrong_group() -> None:
    chunks = build(Sharding(), OPTIONS)
    batch = pack(package_samples(RUNS[0].samples[:3]), cp_rank=1, cp_size=2)
    step = PolicyStep(
        RUNS[0].config, totals=step_totals(batch.samples), num_microbatches=1, model=chunks
    )
    step.head(batch, context_group=dist.group.WORLD)
