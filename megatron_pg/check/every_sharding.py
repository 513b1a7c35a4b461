"""`megatron-pg check --all`: a check of every sharding that the number of processes allows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

from megatron_pg.check.options import CheckOptions, violations_of_sizes
from megatron_pg.check.report import Checked
from megatron_pg.check.step import run_check


def shardings(options: CheckOptions, world_size: int) -> Iterator[CheckOptions]:
    """Yield the options with every sharding of `world_size` processes.

    TP with and without SP, PP, VPP 1 and 2, CP and, with experts, EP vary. The rest is data parallel.
    """
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tensor, pipeline, context, expert in itertools.product(sizes, repeat=4):
        for sequence_parallel, chunks in itertools.product((False, True), (None, 2)):
            each = replace(
                options,
                all=False,
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                virtual_pipeline_model_parallel_size=chunks,
                context_parallel_size=context,
                expert_model_parallel_size=expert,
                sequence_parallel=sequence_parallel,
                hybrid_model=options.hybrid_model and pipeline == 1,
            )
            if not any(violations_of_sizes(each, world_size)):
                yield each


def check_every_sharding(options: CheckOptions, world_size: int) -> list[Checked]:
    """Check each sharding. Every rank of the world calls it."""
    found = []
    for each in shardings(options, world_size):
        started = time.monotonic()
        rows = run_check(each)
        found.append(Checked(each, rows, time.monotonic() - started))
    return found
