"""A step whose micro-batches have context-parallel groups of their own: long sequences on many ranks, short ones on few.

The groups are those of Megatron's hybrid context parallelism (`create_hybrid_dp_cp_groups` of parallel_state, 0.19.2): the
DP * CP ranks, their halves, the halves of these, down to single ranks. The samples are halved with them: each half of the
ranks gets half of the work, and what a half cannot hold, or what would leave the halves uneven, both run together before
they part. So all ranks of a group begin a micro-batch at the same predicted time, and no two groups wait for each other.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch.distributed as dist

from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.bins import Indices, plan_bins
from megatron_pg.step.cost import TOKENS, SampleCost
from megatron_pg.step.identity import store_hashes
from megatron_pg.step.plan import StepPlan
from megatron_pg.step.sample import Sample, check_samples, checked_integer, number_samples
from megatron_pg.step.token_window import Layout
from megatron_pg.step.totals import step_totals

SLACK = 0.05
"""Excess of the slowest rank over the mean that is allowed: `delta` of Megatron's own scheduler (`next_hdp_group` of
pipeline_parallel/hybrid_cp_schedule.py, 0.19.2)."""


def plan_hybrid_cp_step(
    samples: Sequence[Sample],
    *,
    max_tokens_per_rank: int,
    data_with_context_group: dist.ProcessGroup | None = None,
    cp_partition_mode: CpPartitionMode = "zigzag",
    cost: SampleCost = TOKENS,
    allow_different_prompts: bool = False,
    samples_per_group: int | None = None,
    allow_different_group_sizes: bool = False,
) -> StepPlan:
    """Pack the samples of one optimizer step into micro-batches of 1, 2, 4, ... ranks, and count the step.

    Where a sample takes its cost over the number of its ranks, the slowest rank takes at most 5 % longer than the mean
    one; within that, samples lie on few ranks. Every rank of the group must call it, once a step, in place of
    `step_totals`; one exchange of 16 bytes a rank, a hash of all samples. Micro-batch j of the plan is this rank's in the aligned group of
    `plan.cp_sizes[j]` ranks, as context-parallel rank `rank % plan.cp_sizes[j]`; it is run in the plan's order, larger
    groups first.

    Args:
        samples: all samples of the step, on every rank the same in the same order.
        max_tokens_per_rank: the most packed tokens of a micro-batch on one rank, padding included (Megatron's
            `max_seqlen_per_dp_cp_rank`); under sequence parallelism a multiple of the tensor-parallel size.
        data_with_context_group: the data-parallel group *with* context parallelism; None is this rank alone.
        cp_partition_mode: see `pack`.
        cost: what is evened out between ranks and orders micro-batches; by default tokens.
        samples_per_group: see `step_totals`, for `allow_different_prompts` and `allow_different_group_sizes` too.

    Raises:
        ValueError: a sample that all ranks together do not hold, sizes out of range, a number of ranks that is no power
            of two, ranks with other samples than rank 0 (all on all ranks, where one has it), or what `step_totals`
            refuses.
    """
    group = data_with_context_group
    place = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    layout = Layout(*place, cp_partition_mode)

    def plan_rank() -> list[tuple[tuple[int, ...], int, int]]:
        check_samples("plan_hybrid_cp_step", samples)
        number_samples(samples)
        _check_sizes(samples, layout, max_tokens_per_rank)
        store_hashes(samples)
        lengths = [sample.total_length for sample in samples]
        return micro_batches_of_rank(lengths, layout, max_tokens_per_rank, cost)

    def digest(_: object) -> tuple[int, bytes]:
        identities = np.array([sample.identity for sample in samples], dtype=np.uint64)
        return len(samples), hashlib.blake2b(identities.tobytes(), digest_size=16).digest()

    planned, digests = compute_and_gather(plan_rank, digest, group)
    for other, (count, identities) in enumerate(digests):
        if (count, identities) != digests[0]:
            raise ValueError(
                f"rank {other} of the data-parallel group with context parallelism has {count} samples and rank 0 "
                f"{digests[0][0]}, or others: every rank plans all samples of the step, in one order"
            )
    microbatches, tokens, sizes = zip(*planned, strict=True)
    return StepPlan(
        microbatches=microbatches,
        microbatch_tokens=tokens,
        totals=step_totals(
            samples,
            allow_different_prompts=allow_different_prompts,
            samples_per_group=samples_per_group,
            allow_different_group_sizes=allow_different_group_sizes,
        ),
        cp_sizes=sizes,
    )


def micro_batches_of_rank(
    lengths: Sequence[int], layout: Layout, max_tokens_per_rank: int, cost: SampleCost
) -> list[tuple[tuple[int, ...], int, int]]:
    """List the samples, the packed tokens and the number of ranks of each micro-batch of a rank; at least one."""
    microbatches = []
    for size, members in _groups_of_rank(lengths, layout, max_tokens_per_rank, cost):
        group = Layout(cp_size=size, mode=layout.mode)
        padded = [group.padded_length(lengths[i]) for i in members]
        for chosen in plan_bins(padded, size * max_tokens_per_rank, cost=cost):
            tokens = group.packed_length(sum(padded[i] for i in chosen))
            microbatches.append((tuple(members[chosen].tolist()), tokens, size))
    return microbatches


def _groups_of_rank(
    lengths: Sequence[int], layout: Layout, max_tokens_per_rank: int, cost: SampleCost
) -> Iterator[tuple[int, Indices]]:
    """Yield the samples that a rank runs in its group of each size, by falling size.

    All ranks of a group compute the same, from the samples that are left to the group. Both halves of the group run the
    samples that are too long for one half. While the dearer half would still end later than both together by more than the
    slack, both halves also run the sample of the dearer half whose cost is nearest to the difference.
    """
    total_lengths, num_ranks = np.array(lengths, dtype=np.int64), layout.cp_size
    costs, everything = cost.of_lengths(total_lengths), max(int(total_lengths.sum()), 1)
    # The ranks are halved log2(num_ranks) times, and each time the latest end may grow by the same factor.
    slack = (1 + SLACK) ** (1 / max(num_ranks.bit_length() - 1, 1)) - 1
    mine, spent, size = np.arange(total_lengths.size), 0.0, num_ranks
    while size > 1:
        half = size // 2
        group = Layout(cp_size=half, mode=layout.mode)
        fits = group.padded_length(total_lengths[mine]) <= half * max_tokens_per_rank
        shared, mine = mine[~fits], mine[fits]
        end = spent + math.fsum(costs[[*shared, *mine]]) / size
        while True:
            halves = plan_bins(total_lengths[mine], everything, multiple=2, cost=cost)
            dearer, cheaper = (costs[mine[members]] for members in halves)
            # fsum: the same on every machine.
            uneven = math.fsum(dearer) - math.fsum(cheaper)
            if uneven / size <= slack * end:
                break
            lifted = mine[halves[0][np.argmin(np.abs(dearer - uneven))]]
            shared, mine = np.append(shared, lifted), mine[mine != lifted]
        if shared.size:
            yield size, shared
        spent += math.fsum(costs[shared]) / size
        mine, size = mine[halves[layout.cp_rank // half % 2]], half
    if mine.size or not total_lengths.size:
        yield 1, mine


def _check_sizes(samples: Sequence[Sample], layout: Layout, max_tokens_per_rank: int) -> None:
    num_ranks = layout.cp_size
    if num_ranks & (num_ranks - 1):
        raise ValueError(
            f"the data-parallel group with context parallelism has {num_ranks} ranks: hybrid context parallelism halves "
            "them again and again; expected 1, 2, 4, 8, ..."
        )
    least = layout.least_tokens // num_ranks
    if checked_integer("max_tokens_per_rank", max_tokens_per_rank) < least:
        raise ValueError(
            f"max_tokens_per_rank is {max_tokens_per_rank}: expected at least {least}, which a sequence takes of each rank"
        )
    for sample in samples:
        length = layout.padded_length(sample.total_length)
        if length > num_ranks * max_tokens_per_rank:
            raise ValueError(
                f"{sample.name} takes {length} tokens with padding, more than {num_ranks} ranks of max_tokens_per_rank "
                f"{max_tokens_per_rank} hold: raise it, or shorten the sample"
            )
