"""The names of a job's ranks in diagnoses, and the sample of ranks that a check runs on."""

import math
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from megatron_pg.check.options import CheckOptions

AXES = ("TP", "CP", "DP", "PP")
NUM_NAMED = 4
"""The most ranks that are named one by one."""


class Place(NamedTuple):
    """A rank's number in the job, its host, and its coordinates as in `AXES`."""

    rank: int
    host: str
    coordinates: tuple[int, ...]


def job_rank() -> int:
    """Return this process's rank as its launcher counts."""
    return int(os.environ.get("RANK", "0"))


def job_size() -> int:
    """Return the number of processes that the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def place_of(coordinates: tuple[int, ...], options: CheckOptions) -> Place:
    """Return this rank's place, with coordinates in the job instead of in the sample."""
    tensor, context, data, pipeline = coordinates
    if options.sample_groups is not None:
        data = sampled_data_ranks(options, job_size())[data]
    return Place(job_rank(), socket.gethostname(), (tensor, context, data, pipeline))


def names_of(ranks: Sequence[Place], everyone: Sequence[Place]) -> str:
    """Name ranks by host and coordinates, or many ranks by what they have in common. Return "" for
    all ranks.
    """
    if len(ranks) == len(everyone):
        return ""
    columns = zip(*(place.coordinates for place in everyone), strict=True)
    varying = [axis for axis, values in zip(AXES, columns, strict=True) if len(set(values)) > 1]

    def coordinates(place: Place, axes: Sequence[str]) -> list[str]:
        return [f"{axis} {place.coordinates[AXES.index(axis)]}" for axis in axes]

    def one_by_one(few: Sequence[Place]) -> str:
        hosts = (", ".join([f"host {place.host}", *coordinates(place, varying)]) for place in few)
        return ", ".join(f"rank {p.rank} ({host})" for p, host in zip(few, hosts, strict=True))

    if len(ranks) <= NUM_NAMED:
        return one_by_one(ranks)
    number = f"{len(ranks)} of {len(everyone)} ranks"
    hosts = sorted({place.host for place in ranks})
    if len(hosts) <= NUM_NAMED and len(ranks) == sum(p.host in hosts for p in everyone):
        return f"{number}, all on host {', '.join(hosts)}"
    first = ranks[0]
    shared = [
        axis for axis in varying if len({p.coordinates[AXES.index(axis)] for p in ranks}) == 1
    ]
    words = coordinates(first, shared)
    alike = [place for place in everyone if coordinates(place, shared) == words]
    if shared and len(alike) == len(ranks):
        return f"{number}, all with {', '.join(words)}"
    inside = f", all in {', '.join(words)}" if shared else ""
    return f"{number}{inside}, first {one_by_one(ranks[:NUM_NAMED])}"


def sampled_data_ranks(options: CheckOptions, size: int) -> tuple[int, ...]:
    """Return the data-parallel ranks that a check of `size` processes runs on: all without
    `--sample-groups`.

    They are evenly spaced, with the first and the last. Ranks that share experts are chosen
    together.
    """
    dense = options.tensor_model_parallel_size * options.context_parallel_size
    sparse = options.expert_tensor_parallel_size * options.expert_model_parallel_size
    run = math.lcm(dense, sparse) // dense
    runs = size // options.model_parallel_size // run
    count = min(options.sample_groups or runs, runs)
    chosen = sorted({round(place * (runs - 1) / max(count - 1, 1)) for place in range(count)})
    return tuple(start * run + place for start in chosen for place in range(run))


def sampled_ranks(options: CheckOptions, size: int) -> list[int]:
    """Return the ranks of the job that `sampled_data_ranks` stand for, in order.

    Megatron numbers ranks along tensor-, context-, data- and pipeline-parallel axes, the first one
    fastest (`order` of `initialize_model_parallel`). So the sample is a valid job, which shares all
    groups except the data-parallel ones with the whole job.
    """
    block = options.tensor_model_parallel_size * options.context_parallel_size
    stage = size // options.pipeline_model_parallel_size
    return [
        start + data * block + place
        for start in range(0, size, stage)
        for data in sampled_data_ranks(options, size)
        for place in range(block)
    ]
