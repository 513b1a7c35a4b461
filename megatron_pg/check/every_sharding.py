"""`megatron-pg check --all`: every sharding that the number of processes allows, one after the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_pg.check.compare import Row
from megatron_pg.check.options import CheckOptions, violations_of_sizes
from megatron_pg.check.report import as_json, failures, sharding
from megatron_pg.check.step import run_check


@dataclass(frozen=True)
class Checked:
    """The rows of one sharding."""

    options: CheckOptions
    rows: Sequence[Row]
    seconds: float


def shardings(options: CheckOptions, world_size: int) -> Iterator[CheckOptions]:
    """The options with every sharding of so many processes: sizes of TP with and without SP, PP, VPP 1 and 2, CP and,
    where there are experts, EP; what is left is data parallel."""
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
    """The rows of each; every rank of the world calls it."""
    found = []
    for each in shardings(options, world_size):
        started = time.monotonic()
        rows = run_check(each)
        found.append(Checked(each, rows, time.monotonic() - started))
    return found


def summary(checked: Sequence[Checked], world_size: int) -> str:
    """A line for each sharding, below it the rows that fail, and the verdict; plain text."""
    lines = []
    for each in checked:
        worst = max(each.rows, key=lambda row: row.gradient_error / row.tolerance)
        failed = sum(not row.passed for row in each.rows)
        lines.append(
            f"{f'FAIL {failed}' if failed else 'PASS':<8}{len(each.rows):>3} rows, worst {worst.gradient_error:.1e} of "
            f"{worst.tolerance:.0e}, {each.seconds:4.0f} s  {sharding(each.options, world_size)}"
        )
        lines += failures(each.rows, each.options, world_size)
    wrong = sum(any(not row.passed for row in each.rows) for each in checked)
    verdict = f"FAIL: {wrong} of" if wrong else "PASS: every gradient is the unsharded one in"
    return "\n".join([*lines, "", f"{verdict} {len(checked)} shardings"])


def summary_as_json(checked: Sequence[Checked], world_size: int) -> str:
    """A list of what `as_json` says of each."""
    reports = (as_json(each.rows, each.options, world_size) for each in checked)
    return f"[{', '.join(reports)}]"
