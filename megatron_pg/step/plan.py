"""Plan of a step: its samples in packed micro-batches of bounded size, and its totals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from megatron_pg.config.planning import OversizedSamples, PlanningConfig
from megatron_pg.step.bins import Indices, plan_bins
from megatron_pg.step.cost import TOKENS, SampleCost
from megatron_pg.step.counts import SampleCounts, StepCounts
from megatron_pg.step.sample import Sample, check_samples
from megatron_pg.step.token_window import Layout
from megatron_pg.step.totals import StepTotals, sample_counts, totals_of_counts

Ordered = TypeVar("Ordered")


@dataclass(frozen=True)
class StepPlan:
    """Plan of a step on one data-parallel rank, built by `plan_step`."""

    microbatches: tuple[tuple[int, ...], ...]
    """Per micro-batch the indices of its samples, ascending, in the order of execution. pack()
    turns an empty one into a dummy that no objective counts."""
    microbatch_tokens: tuple[int, ...]
    """Packed tokens per micro-batch over the context-parallel group, including padding."""
    totals: StepTotals
    """The step totals over all data-parallel ranks, including `num_tokens`."""

    @property
    def num_microbatches(self) -> int:
        """M, for Megatron's schedule."""
        return len(self.microbatches)


def plan_step(
    samples: Sequence[Sample],
    *,
    max_tokens_per_microbatch: int,
    data_parallel_group: dist.ProcessGroup | None = None,
    cp_size: int = 1,
    pad_to_multiple: int = 1,
    microbatch_group_size: int = 1,
    ragged: bool = False,
    oversized: OversizedSamples = "error",
    cost: SampleCost = TOKENS,
    seed: int | None = None,
    allow_different_prompts: bool = False,
    samples_per_group: int | None = None,
    allow_different_group_sizes: bool = False,
) -> StepPlan:
    """Pack the samples of one optimizer step into micro-batches and count the step.

    Every data-parallel rank must call it once per step instead of `step_totals`, with all its
    samples of the step. Ranks that differ only in their context-, tensor- or pipeline-parallel rank
    pass the same samples and get the same plan. It exchanges the same data over the data-parallel
    group as `step_totals`. Call `accepted_samples` before, if a correction needs it.

    Args:
        samples: this data-parallel rank's samples of the step, possibly none.
        max_tokens_per_microbatch: the maximum number of packed tokens per micro-batch over the
            context-parallel group, including padding. A rank holds `1 / cp_size` of them.
        data_parallel_group: the data-parallel group *without* context parallelism. None: only this
            rank.
        cp_size: see `pack`, also for `pad_to_multiple`.
        microbatch_group_size: the number of micro-batches becomes a multiple of it. Interleaved
            pipeline parallelism requires `config.microbatch_group_size_per_vp_stage`.
        ragged: data-parallel ranks may run different numbers of micro-batches. Otherwise ranks with
            fewer run empty ones, as expert parallelism requires.
        oversized: `error`, or `own_microbatch` for a separate micro-batch above the budget.
        cost: the quantity to balance between micro-batches, which also orders them. Default:
            tokens.
        seed: see `plan_bins`.
        samples_per_group: see `step_totals`, also for `allow_different_prompts` and
            `allow_different_group_sizes`.

    Raises:
        ValueError: the argument is not a list of samples, a sample is longer than the budget, or
            sizes are out of range, raised on all ranks, or ids are not unique or a prompt group has
            the wrong size (see `step_totals`).
    """
    layout = Layout(cp_size=cp_size, multiple=pad_to_multiple)

    def plan_rank() -> tuple[SampleCounts, Any, tuple[int, int]]:
        check_samples("plan_step", samples)
        counts = sample_counts(samples)  # first, because it numbers the samples for errors
        PlanningConfig(max_tokens_per_microbatch, oversized_samples=oversized)  # checks them
        total_lengths = np.array([sample.tokens.numel() for sample in samples], dtype=np.int64)
        lengths = layout.padded_length(total_lengths)
        if max_tokens_per_microbatch < layout.least_tokens:
            raise ValueError(
                f"--max-tokens-per-microbatch is {max_tokens_per_microbatch}, expected at least "
                f"{layout.least_tokens}, the multiple that context and sequence parallelism pad to"
            )
        # Leave space for the padding of the micro-batch itself.
        capacity = max_tokens_per_microbatch // layout.least_tokens * layout.least_tokens
        is_oversized = lengths > capacity
        if is_oversized.any() and oversized == "error":
            first = int(np.argmax(is_oversized))
            raise ValueError(
                f"{samples[first].name} takes {lengths[first]} tokens with padding, more than "
                f"--max-tokens-per-microbatch allows ({capacity}). Raise it, shorten the sample, "
                "or use --oversized-samples own_microbatch."
            )
        bins = plan_bins(
            lengths,
            capacity,
            multiple=microbatch_group_size,
            oversized_alone=True,
            seed=seed,
            cost=cost,
        )
        microbatches = tuple(tuple(members.tolist()) for members in bins)
        tokens = tuple(layout.packed_length(int(lengths[members].sum())) for members in bins)
        return counts, (microbatches, tokens), (len(microbatches), int(total_lengths.sum()))

    counts, (microbatches, tokens), sent = StepCounts.over_ranks(plan_rank, data_parallel_group)
    numbers, num_tokens = zip(*sent, strict=True)
    # Only for this rank, because lists for all ranks would take quadratic time.
    added = 0 if ragged else max(numbers) - len(microbatches)
    return StepPlan(
        microbatches=pipeline_order(microbatches + ((),) * added),
        microbatch_tokens=pipeline_order(tokens + (layout.least_tokens,) * added),
        totals=totals_of_counts(
            counts,
            counts.rank,
            sum(num_tokens),
            allow_different_prompts=allow_different_prompts,
            samples_per_group=samples_per_group,
            allow_different_group_sizes=allow_different_group_sizes,
        ),
    )


def pipeline_order(costliest_first: tuple[Ordered, ...]) -> tuple[Ordered, ...]:
    """Order micro-batches with the cheap ones at both ends, where pipeline stages wait.

    All ranks run their most expensive one at the same position, as expert parallelism needs.
    """
    return costliest_first[::2][::-1] + costliest_first[1::2]


def assign_to_data_parallel_ranks(
    samples: Sequence[Sample] | Indices,
    data_parallel_size: int,
    *,
    cp_size: int = 1,
    cost: SampleCost = TOKENS,
) -> list[list[int]]:
    """Split samples that every rank holds over the data-parallel ranks, balanced by the cost of
    their padded tokens.

    No communication: every rank computes the same split. Prompt groups and rollouts may be split
    over ranks, and the step totals cover all of them. Rollouts of several samples then need an
    `id_source`.

    Args:
        samples: all samples of the step, or their total lengths [samples] int64 if no process has
            all samples.
        data_parallel_size: the number of ranks, without context parallelism.
        cp_size: see `pack`.
        cost: the quantity to balance. Default: tokens.

    Returns:
        Per rank the indices of its samples, ascending, possibly none.

    Raises:
        ValueError: `data_parallel_size` is below 1.
    """
    layout = Layout(cp_size=cp_size)
    if not isinstance(samples, np.ndarray):
        samples = np.array([sample.total_length for sample in samples], dtype=np.int64)
    lengths = layout.padded_length(samples)
    bins = plan_bins(lengths, max(int(lengths.sum()), 1), multiple=data_parallel_size, cost=cost)
    return [members.tolist() for members in bins]
