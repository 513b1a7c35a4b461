"""Steps through Megatron's schedule at DP 2 x CP 2 whose data is wrong in ways that leave the weights as they are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import torch.distributed as dist

from megatron_pg import PackedBatch, PolicyLossConfig, Sample, pack
from megatron_pg.megatron import ParallelGroups, PolicyStep
from megatron_pg.megatron.schedule import run_micro_batches
from tests.random_steps import uneven_totals

from .models import ModelOptions, Sharding
from .one_step import build
from .steps import AGGREGATIONS

FAULTS = (
    *("none", "fed twice", "exchanged", "stale", "other window", "other cut", "dropped"),
    "duplicated",
)
RESPONSE = 15
AGGREGATIONS_OF_MODE = {False: AGGREGATIONS, True: ("sample_mean", "token_mean")}
"""By whether the mode is per token, where the data of a step is what it is in the other."""


def samples(first_token: int, name: str) -> list[Sample]:
    """Eight of equal weight under every aggregation, and in both windows."""
    mask = [int(token != 4) for token in range(RESPONSE)]
    return [
        Sample(
            tokens=[index % 4, *((first_token + index * token) % 16 for token in range(RESPONSE))],
            response_length=RESPONSE,
            loss_mask=mask,
            old_log_probs=[-2.8] * RESPONSE,
            group_index=index % 4,
            name=f"{name} {index}",
        )
        for index in range(8)
    ]


def fed(fault: str, rank: int) -> list[list[Sample]]:
    """The two micro-batches that a data-parallel rank is fed."""
    step, stale = samples(1, "sample"), samples(5, "yesterday's")
    halves = [[step[first : first + 2] for first in (start, start + 2)] for start in (0, 4)]
    if fault == "exchanged":
        halves[0][0], halves[1][0] = halves[1][0], halves[0][0]
    elif fault == "fed twice":
        halves[1][1] = halves[1][0]
    elif fault == "stale":
        halves[1][0] = stale[4:6]
    elif fault == "dropped":
        halves[0][1] = step[2:3]
    elif fault == "duplicated":
        halves[1][0] = [*step[4:6], step[5]]
    return halves[rank]


def pack_of(fault: str, groups: ParallelGroups, micro_batch: list[Sample]) -> PackedBatch:
    """Packed for this rank; for the other one, or in another cut, and labelled for this, where that is the fault."""
    rank, size = groups.context_rank, groups.context_size
    if fault == "other cut" and groups.data_rank == 0 and rank == 0:
        batch = pack(micro_batch, cp_rank=0, cp_size=size, cp_partition_mode="contiguous")
        return replace(
            batch, window=replace(batch.window, layout=replace(batch.window.layout, mode="zigzag"))
        )
    if fault != "other window" or groups.data_rank == 1:
        return pack(micro_batch, cp_rank=rank, cp_size=size)
    batch = pack(micro_batch, cp_rank=0, cp_size=size)
    return replace(
        batch, window=replace(batch.window, layout=replace(batch.window.layout, cp_rank=rank))
    )


def messages_of_faults() -> dict[tuple[str, bool, str], tuple[str, int]]:
    """By aggregation, loss mode and fault what this rank says, and how many all-reduces its report took."""
    found = {}
    for per_token in (False, True):
        chunks = build(Sharding(context=2), ModelOptions(calculate_per_token_loss=per_token))
        groups = ParallelGroups.from_model(chunks)
        counted = [each for part in fed("none", groups.data_rank) for each in part]
        totals = uneven_totals(counted, data_parallel_group=groups.data)
        for aggregation, fault in itertools.product(AGGREGATIONS_OF_MODE[per_token], FAULTS):
            config = PolicyLossConfig(
                loss_aggregation=aggregation,
                loss_aggregation_divisor=16.0 if aggregation == "constant" else None,
                check_aggregation=True,
                pg_metrics="none",
            )
            parts = fed(fault, groups.data_rank)
            batches = [pack_of(fault, groups, part) for part in parts]
            step = PolicyStep(config, totals=totals, num_microbatches=2, model=chunks)
            output = run_micro_batches(step.head, batches, chunks)
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduction:
                try:
                    message = f"{step.metrics(output)['aggregation_checksum']:.12f}"
                except RuntimeError as error:
                    message = str(error)
            found[aggregation, per_token, fault] = message, reduction.call_count
    return found
