"""A step's samples as packed micro-batches of bounded size, and the totals of the step."""

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
    """The step of one data-parallel rank. Built by `plan_step`."""

    microbatches: tuple[tuple[int, ...], ...]
    """Per micro-batch the indices of its samples, ascending, in the order in which micro-batches
    are run. Of an empty one pack() makes a dummy that no objective counts."""
    microbatch_tokens: tuple[int, ...]
    """Per micro-batch its packed tokens over the context-parallel group, padding included."""
    totals: StepTotals
    """The totals of the step over all data-parallel ranks; with the `num_tokens` of `plan_step`."""

    @property
    def num_microbatches(self) -> int:
        """M, as Megatron's schedule takes it."""
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

    Every data-parallel rank must call it, once a step, with all samples that it trains on in that
    step, in place of `step_totals`; ranks that differ only in their context-, tensor- or
    pipeline-parallel place pass the same samples and get the same plan. The exchanges over the
    data-parallel group are those of `step_totals`. Samples whose masks a correction shrinks
    (`accepted_samples`) must have been shrunk before.

    Args:
        samples: this data-parallel rank's samples of the step. None at all is legal.
        max_tokens_per_microbatch: the most packed tokens of a micro-batch over the context-parallel
            group, padding included; a rank holds `1 / cp_size` of them.
        data_parallel_group: the data-parallel group *without* context parallelism; None is this
            rank alone.
        cp_size: see `pack`, for `pad_to_multiple` too.
        microbatch_group_size: the number of micro-batches becomes a multiple of it. Interleaved
            pipeline parallelism needs `config.microbatch_group_size_per_vp_stage`.
        ragged: data-parallel ranks may run different numbers of micro-batches. Otherwise those with
            fewer run empty ones, as expert parallelism needs.
        oversized: `error`, or `own_microbatch` for a micro-batch of its own, above the budget.
        cost: what is evened out between micro-batches and orders them; by default tokens.
        seed: see `plan_bins`.
        samples_per_group: see `step_totals`, for `allow_different_prompts` and
            `allow_different_group_sizes` too.

    Raises:
        ValueError: an argument that is no list of samples, a sample longer than the budget or sizes
            out of range, on all ranks where one has it; ids that stand for two things or a prompt
            group of another size (see `step_totals`).
    """
    layout = Layout(cp_size=cp_size, multiple=pad_to_multiple)

    def plan_rank() -> tuple[SampleCounts, Any, tuple[int, int]]:
        check_samples("plan_step", samples)
        counts = sample_counts(samples)  # first: it numbers them, for errors
        PlanningConfig(max_tokens_per_microbatch, oversized_samples=oversized)  # checks them
        total_lengths = np.array([sample.tokens.numel() for sample in samples], dtype=np.int64)
        lengths = layout.padded_length(total_lengths)
        if max_tokens_per_microbatch < layout.least_tokens:
            raise ValueError(
                f"--max-tokens-per-microbatch is {max_tokens_per_microbatch}: expected at least "
                f"{layout.least_tokens}, the "
                "multiple that context and sequence parallelism pad a micro-batch to"
            )
        # Room for the padding of the micro-batch itself.
        capacity = max_tokens_per_microbatch // layout.least_tokens * layout.least_tokens
        is_oversized = lengths > capacity
        if is_oversized.any() and oversized == "error":
            first = int(np.argmax(is_oversized))
            raise ValueError(
                f"{samples[first].name} takes {lengths[first]} tokens with padding, more than "
                f"--max-tokens-per-microbatch "
                f"leaves it ({capacity}): raise the budget, shorten the sample, or give it a "
                f"micro-batch of its own with "
                "--oversized-samples own_microbatch"
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

    counts, (microbatches, tokens), told = StepCounts.over_ranks(plan_rank, data_parallel_group)
    numbers, num_tokens = zip(*told, strict=True)
    # Of this rank alone: a list for all ranks would take time in the square of their number.
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


def pipeline_order(dearest_first: tuple[Ordered, ...]) -> tuple[Ordered, ...]:
    """Order micro-batches so that the cheap ones stand at both ends, which a pipeline's stages wait
    for.

    All ranks run their dearest at the same place, as experts need it.
    """
    return dearest_first[::2][::-1] + dearest_first[1::2]


def assign_to_data_parallel_ranks(
    samples: Sequence[Sample] | Indices,
    data_parallel_size: int,
    *,
    cp_size: int = 1,
    cost: SampleCost = TOKENS,
) -> list[list[int]]:
    """Split samples that every rank holds over the data-parallel ranks, evenly by the cost of their
    padded tokens.

    No communication: every rank computes the same split of the same samples. Prompt groups and
    rollouts may end up on several ranks; the totals of the step span them. Rollouts of several
    samples need an `id_source` for that.

    Args:
        samples: all samples of the step, or their total lengths [samples] int64 where no process
            holds them.
        data_parallel_size: the number of ranks to split over, without context parallelism.
        cp_size: see `pack`.
        cost: what is evened out; by default tokens.

    Returns:
        Per rank the indices of its samples, ascending; empty where there are too few samples.

    Raises:
        ValueError: `data_parallel_size` is below 1.
    """
    layout = Layout(cp_size=cp_size)
    if not isinstance(samples, np.ndarray):
        samples = np.array([sample.total_length for sample in samples], dtype=np.int64)
    lengths = layout.padded_length(samples)
    bins = plan_bins(lengths, max(int(lengths.sum()), 1), multiple=data_parallel_size, cost=cost)
    return [members.tolist() for members in bins]
