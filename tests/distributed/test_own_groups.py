"""A context-parallel group for each micro-batch: long ones on many ranks, short ones on few, in one step."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pg import PackedBatch, Sample, StepPlan, pack
from megatron_pg.megatron import PolicyStep
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.cost import SampleCost
from megatron_pg.step.hybrid_context import micro_batches_of_rank, plan_hybrid_cp_step
from megatron_pg.step.token_window import Layout
from tests.random_steps import package_samples, uneven_totals

from .compare import assert_equal, compare
from .launch import refusal, run_ranks
from .models import ModelOptions, Sharding, gather_gradients
from .one_step import Outcome, build
from .reference import reference_steps
from .steps import AGGREGATIONS, NUM_SAMPLES, Run

# Learned positions, which need no group.
OPTIONS = ModelOptions(calculate_per_token_loss=True, cp_partition_mode="contiguous")
GRID = Sharding(context=2, data=2)
SPLIT_TENSORS = Sharding(tensor=2, data=2, sequence_parallel=True)
GROUPS = [(0, 1, 2, 3), (0, 1), (2, 3), (0,), (1,), (2,), (3,), (2, 3), (1, 2, 3)]
"""The ranks of the grid of DP * CP that hold each micro-batch, in one order for all, so that no two wait for each other."""
RUNS = [
    *(Run(name, regularized=place % 2 == 0) for place, name in enumerate(AGGREGATIONS)),
    *(Run(name, cp_partition_mode="contiguous") for name in AGGREGATIONS),
    Run("token_mean", shape="short"),
]

Groups = list[tuple[int, ...]]
Deal = Callable[[Run, list[Sample]], tuple[StepPlan, Groups]]
"""Gives this rank's micro-batches of a step, and the ranks that hold each."""


def grid() -> Any:
    """The data-parallel group with context parallelism of this rank."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def in_turn(held_by: Groups, run: Run, samples: list[Sample]) -> tuple[StepPlan, Groups]:
    mine = [place for place, ranks in enumerate(held_by) if dist.get_rank(grid()) in ranks]
    dealt = tuple(tuple(range(place, len(samples), len(held_by))) for place in mine)
    sizes = tuple(len(held_by[place]) for place in mine)
    return StepPlan(dealt, (), uneven_totals(samples), sizes), [held_by[place] for place in mine]


COST, BUDGET = SampleCost(1.0, 0.1), 8
DEALT = functools.partial(in_turn, GROUPS)


def planned(run: Run, samples: list[Sample]) -> tuple[StepPlan, Groups]:
    """Few tokens of a rank: some samples fit one, some need all."""
    plan = plan_hybrid_cp_step(
        samples,
        max_tokens_per_rank=BUDGET * 4 // dist.get_world_size(grid()),
        data_with_context_group=grid(),
        cp_partition_mode=run.config.cp_partition_mode,
        cost=COST,
        allow_different_group_sizes=True,
    )
    return plan, [aligned(size) for size in plan.cp_sizes]


def aligned(size: int) -> tuple[int, ...]:
    start = dist.get_rank(grid()) // size * size
    return tuple(range(start, start + size))


def planned_of_rank_0(run: Run, samples: list[Sample]) -> tuple[StepPlan, Groups]:
    """Mutant: both halves of the ranks take the same half of the samples."""
    plans: list[Any] = [None] * dist.get_world_size(grid())
    dist.all_gather_object(plans, planned(run, samples)[0], group=grid())
    return plans[0], [aligned(size) for size in plans[0].cp_sizes]


def own_loss(group: Any, outcome: tuple[Any, ...]) -> tuple[Any, ...]:
    return outcome


def times_the_group(group: Any, outcome: tuple[Any, ...]) -> tuple[Any, ...]:
    """Mutant: the factor CP of the other loss mode."""
    loss, *rest = outcome
    return (loss * group.size(), *rest)


def tokens_of_the_group(group: Any, outcome: tuple[Any, ...]) -> tuple[Any, ...]:
    """Mutant: every rank of a group counts the tokens of all of them."""
    dist.all_reduce(outcome[1], group=group)
    return outcome


def steps(
    change: Callable[..., Any],
    runs: list[Run],
    deals: Sequence[Deal],
    policy_loss: str = "ppo",
    sharding: Sharding = GRID,
    options: ModelOptions = OPTIONS,
) -> list[list[Outcome | None]]:
    """Of every way to deal the samples every run, on four ranks; `change` is made of what a loss function returns."""
    chunks = build(sharding, options)
    group_of = {}
    for held in sorted(set(GROUPS)):
        if held[-1] < sharding.context * sharding.data:
            for tensor_rank in range(sharding.tensor):  # every rank of the world makes every group
                made = dist.new_group([rank * sharding.tensor + tensor_rank for rank in held])
                if dist.get_rank() % sharding.tensor == tensor_rank:
                    group_of[held] = made
    pad = sharding.tensor if sharding.sequence_parallel else 1

    def one_step(run: Run, deal: Deal) -> Outcome | None:
        samples = package_samples(run.samples)
        plan, held_by = deal(run, samples)
        step = PolicyStep(replace(run.config, policy_loss=policy_loss), plan, model=chunks)

        batches, groups = [], {}

        def head(batch: PackedBatch) -> Any:
            group = groups[id(batch)]
            right = step.head(batch, context_group=group)
            return replace(right, loss_func=lambda out: change(group, right.loss_func(out)))

        for indices, ranks in zip(plan.microbatches, held_by, strict=True):
            batch = pack(
                [samples[index] for index in indices],
                cp_rank=ranks.index(dist.get_rank(grid())),
                cp_size=len(ranks),
                pad_to_multiple=pad * len(ranks),
                cp_partition_mode=run.cp_partition_mode,
            )
            batches.append(batch)
            groups[id(batch)] = group_of[ranks]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        metrics = step.metrics(run_micro_batches(head, batches, chunks))
        gradients = gather_gradients(chunks)
        return None if gradients is None else Outcome(gradients, metrics)

    return [[one_step(run, deal) for run in runs] for deal in deals]


def sizes_of_groups(world_size: int, budget: int) -> set[int]:
    lengths = [len(sample.tokens) for sample in RUNS[0].samples]
    layouts = [Layout(rank, world_size) for rank in range(world_size)]
    plans = [micro_batches_of_rank(lengths, layout, budget, COST) for layout in layouts]
    return {size for plan in plans for *_, size in plan}


@pytest.fixture(scope="module")
def references() -> list[Outcome]:
    return run_ranks(reference_steps, 1, OPTIONS, RUNS)[0]


def test_the_gradient_is_the_unsharded_one_whatever_ranks_hold_a_micro_batch(references) -> None:
    assert len(GROUPS) < NUM_SAMPLES and {len(ranks) for ranks in GROUPS} == {1, 2, 3, 4}
    assert sizes_of_groups(4, BUDGET) == {1, 2, 4}
    for outcomes in run_ranks(steps, 4, own_loss, RUNS, [DEALT, planned])[0]:
        assert_equal(outcomes, references, RUNS)
    mutants = [
        (times_the_group, DEALT),
        (tokens_of_the_group, DEALT),
        (own_loss, planned_of_rank_0),
    ]
    for change, deal in mutants:
        (wrong,) = run_ranks(steps, 4, change, RUNS[:1], [deal])[0][0]
        assert compare(wrong, references[0]).gradient_error > 1e-2, (change, deal)
    assert abs(wrong.metrics["aggregation_checksum"] - 1) > 1e-3


def test_planned_groups_hold_under_tensor_and_sequence_parallelism(references) -> None:
    """Two halves of the vocabulary and of each micro-batch's tokens, on a grid of two: samples on one place or both."""
    assert sizes_of_groups(2, 2 * BUDGET) == {1, 2}
    (outcomes,) = run_ranks(steps, 4, own_loss, RUNS, [planned], "ppo", SPLIT_TENSORS)[0]
    assert_equal(outcomes, references, RUNS)
    for change, deal in [(times_the_group, planned), (own_loss, planned_of_rank_0)]:
        (wrong,) = run_ranks(steps, 4, change, RUNS[:1], [deal], "ppo", SPLIT_TENSORS)[0][0]
        assert compare(wrong, references[0]).gradient_error > 1e-2, (change, deal)


def test_sums_over_a_sequence_are_of_the_ranks_that_hold_it() -> None:
    """gspo, against every sample whole on one rank."""
    runs = [Run("prompt_mean"), Run("prompt_mean", cp_partition_mode="contiguous")]
    alone = functools.partial(in_turn, [(place % 4,) for place in range(NUM_SAMPLES)])
    expected, *by_deal = run_ranks(steps, 4, own_loss, runs, [alone, DEALT, planned], "gspo")[0]
    for found in by_deal:
        assert_equal(found, expected, runs)
    assert all(len(whole.metrics) > 10 for whole in expected)
    # The objective is another one than token by token.
    ((ppo,),) = run_ranks(steps, 4, own_loss, runs[:1], [DEALT])[0]
    assert compare(ppo, expected[0]).gradient_error > 1e-2


def refusals() -> list[str]:
    """What is said of a group of its own outside of per-token mode, with rotary positions, with experts on several ranks or a
    loss of theirs, and to a batch of another."""
    samples = package_samples(RUNS[0].samples[:3])
    said = []
    for options, place in (
        (replace(OPTIONS, calculate_per_token_loss=False), {}),
        (ModelOptions(calculate_per_token_loss=True), {}),
        (replace(OPTIONS, mixture_of_experts=True, moe_aux_loss_coeff=0.1), {}),
        (replace(OPTIONS, mixture_of_experts=True), {}),
        (OPTIONS, {"cp_rank": 1, "cp_size": 2}),
    ):
        chunks, batch = build(Sharding(), options), pack(samples, **place)
        if options.mixture_of_experts:
            chunks[0].config.expert_model_parallel_size = 2
        totals = replace(uneven_totals(samples), num_tokens=1)
        step = PolicyStep(RUNS[0].config, totals=totals, num_microbatches=1, model=chunks)
        errors = (NotImplementedError, ValueError)
        said.append(refusal(errors, step.head, batch, context_group=dist.group.WORLD))
    return said


def test_what_is_not_exact_with_groups_of_their_own_is_refused() -> None:
    mode, rotary, loss, exchange, other = run_ranks(refusals, 1)[0]
    assert "--calculate-per-token-loss" in mode
    assert "--position-embedding-type rope" in rotary
    assert "losses of experts" in loss
    assert "--expert-model-parallel-size 2" in exchange
    assert "packed for context-parallel rank" in other


def other_samples() -> list[str]:
    """What every rank is told where rank 1 lacks a sample, has two in another order, or another in the place of one."""
    samples, told = package_samples(RUNS[0].samples)[:7], []
    for of_rank_1 in ((1, 2, 3, 4, 5), (1, 0, 2, 3, 4, 5), (0, 1, 2, 3, 4, 6)):
        indices = of_rank_1 if dist.get_rank() == 1 else range(6)
        mine = [samples[index] for index in indices]
        task = {"max_tokens_per_rank": 64, "data_with_context_group": dist.group.WORLD}
        told.append(refusal(ValueError, plan_hybrid_cp_step, mine, **task))
    return told


def test_ranks_that_plan_other_samples_are_told_so() -> None:
    for told in run_ranks(other_samples, 2):
        for said, count in zip(told, (5, 6, 6), strict=True):
            assert f"rank 1 of the data-parallel group with context parallelism has {count}" in said
            assert "every rank plans all samples of the step, in one order" in said
