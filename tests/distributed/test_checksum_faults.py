"""The aggregation checksum of a real step sees data that is wrong, and every rank names what it
knows of it.

The steps run through Megatron's schedule at DP 2 x CP 2; the faults leave most weights as they are.
"""

import itertools
from collections.abc import Sequence
from unittest import mock

import torch.distributed as dist

from megatron_pg import PolicyLossConfig, Sample, pack
from megatron_pg.megatron import ParallelGroups, PolicyStep
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.agreement import gather
from tests.random_steps import uneven_totals

from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import build
from .steps import AGGREGATIONS

WORDS = {
    # fault -> what every rank says, and what data-parallel ranks 0 and 1 add
    "fed twice": (
        "trained on twice and a different one never",
        "",
        "twice: sample 4, sample 5; never trained on: sample 6, sample 7.",
    ),
    "one of another rank": (
        "the token weights in the loss",
        "",
        "counted on another rank: sample 0 (rank 0); never trained on: sample 4.",
    ),
    "stale": (
        "from a different step",
        "",
        "not of this step: yesterday's 4, yesterday's 5; never trained on: sample 4, sample 5.",
    ),
    "micro-batch lost": (
        "trained on twice and a different one never",
        "never trained on: sample 2, sample 3.",
        "",
    ),
    "dropped": ("is 0.875000, expected 1", "never trained on: sample 3.", ""),
    "duplicated": ("is 1.125000, expected 1", "", "trained on twice: sample 5."),
}
RIGHT = ("none", "exchanged")
FAULTS = (*RIGHT, *WORDS)
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


def fed(
    fault: str, rank: int, step: Sequence[Sample], stale: Sequence[Sample]
) -> list[list[Sample]]:
    """The two micro-batches that a data-parallel rank is fed."""
    indices = {
        "exchanged": [[4, 5], [2, 3], [0, 1], [6, 7]],
        "fed twice": [[0, 1], [2, 3], [4, 5], [4, 5]],
        "dropped": [[0, 1], [2], [4, 5], [6, 7]],
        "duplicated": [[0, 1], [2, 3], [4, 5, 5], [6, 7]],
        "one of another rank": [[0, 1], [2, 3], [0, 5], [6, 7]],
    }.get(fault, [[0, 1], [2, 3], [4, 5], [6, 7]])
    parts = [[step[index] for index in part] for part in indices]
    if fault == "stale":
        parts[2] = stale[4:6]
    if fault == "micro-batch lost" and rank == 0:
        return parts[:1]
    return parts[2 * rank : 2 * rank + 2]


def messages_of_faults() -> dict[tuple[str, bool, str], tuple[str, int]]:
    """By aggregation, loss mode and fault what this rank says, and how many all-reduces its report
    took.
    """
    found = {}
    for per_token in (False, True):
        chunks = build(Sharding(context=2), ModelOptions(calculate_per_token_loss=per_token))
        groups = ParallelGroups.from_model(chunks)
        counted, stale = (
            samples(*of)[4 * groups.data_rank :][:4] for of in ((1, "sample"), (5, "yesterday's"))
        )
        uneven_totals(stale, data_parallel_group=groups.data)
        totals = uneven_totals(counted, data_parallel_group=groups.data)
        # Samples travel between ranks after they were counted.
        step, yesterday = (sum(gather(each, groups.data), []) for each in (counted, stale))
        for aggregation, fault in itertools.product(AGGREGATIONS_OF_MODE[per_token], FAULTS):
            config = PolicyLossConfig(
                loss_aggregation=aggregation,
                loss_aggregation_divisor=16.0 if aggregation == "constant" else None,
                check_aggregation=True,
                pg_metrics="none",
            )
            place = {"cp_rank": groups.context_rank, "cp_size": groups.context_size}
            parts = fed(fault, groups.data_rank, step, yesterday)
            batches = [pack(part, **place) for part in parts]
            policy_step = PolicyStep(config, totals=totals, num_microbatches=2, model=chunks)
            chunks[0].zero_grad_buffer()
            output = run_micro_batches(policy_step.head, batches, chunks)
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduction:
                try:
                    message = f"{policy_step.metrics(output)['aggregation_checksum']:.12f}"
                except RuntimeError as error:
                    message = str(error)
            found[aggregation, per_token, fault] = message, reduction.call_count
    return found


def test_wrong_data_is_seen_and_named_under_every_aggregation_in_both_loss_modes() -> None:
    """Without a further collective: the report is one all-reduce under --pg-metrics none."""
    ranks = run_ranks(messages_of_faults, 4)
    steps = [(name, mode) for mode, names in AGGREGATIONS_OF_MODE.items() for name in names]
    for aggregation, per_token in steps:
        said = [{f: rank[aggregation, per_token, f] for f in FAULTS} for rank in ranks]
        right = {rank[fault] for rank in said for fault in RIGHT}
        assert right == {("1.000000000000", 1)}
        for fault, (meaning, *names) in WORDS.items():
            for message, num_reductions in (rank[fault] for rank in said):
                assert meaning in message and num_reductions == 1, (fault, message)
            # Ranks of one context-parallel group follow each other.
            for place, rank in enumerate(said):
                named = names[place // 2]
                assert named in rank[fault][0], (fault, rank[fault][0])
                assert bool(named) == ("On data-parallel rank" in rank[fault][0])
