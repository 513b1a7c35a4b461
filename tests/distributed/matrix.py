"""Run the matrix and print its table: `python -m tests.distributed.matrix --help`."""

import argparse
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_pg.config.versions import megatron_core_version
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

from .cases import Case, all_cases
from .compare import METRIC_TOLERANCE, Comparison, compare, gradient_tolerance
from .covering import covering_cases
from .launch import run_ranks
from .models import ModelOptions
from .one_step import Outcome, run_steps
from .reference import reference_steps
from .router_losses import step_with_losses_of_routers
from .steps import Run

PREAMBLE = """\
# The same gradient at any parallelism: the measured table

Each row is a small GPT of real Megatron-Core (DDP, Megatron's schedules, gloo, CPU), sharded as the
second column says. After one step, every gradient is compared with the unsharded model's: one
process, each sample by itself, float64, the loss in plain Python loops (`tests/oracle.py`). An
error is the maximum of `max|g - reference| / max|reference|` over parameters, aggregations and
steps.

A row covers:

- all four aggregations in both precisions. Every second step adds a KL and an entropy term.
- two kinds of samples. *Ragged*: a fully masked sample, one without response, one of a single
  response token, rollouts of two samples, prompt groups spread over data-parallel ranks. *Short*:
  context-parallel ranks without a response token.
- every legal split into micro-batches: equally many of uneven size on all ranks, one more on each
  next data-parallel rank (without expert parallelism, whose ranks exchange tokens in every
  micro-batch), and an empty one.
- per micro-batch and per token, and from DP 2 or CP 2 on also the distributed optimizer, the
  average in the collective, and overlapped reduction.

*Critic* models have a value head and the value loss. *MTP* models predict two further tokens (only
in float32, as Megatron computes that loss). *Replayed* models route tokens to the experts that the
samples give. *Balanced* models have load-balancing losses and a z loss, with padding (float64, to
1e-6, because Megatron computes these losses in float32). Their reference packs each micro-batch
without padding.

Tolerances: float32 1e-6, float64 1e-12, metrics {metric_tolerance:g}. In per-token mode, the token
counts are powers of two, by which Megatron divides in float32 without error.

Reproduce with
`python -m tests.distributed.matrix --all --parallel 8 --markdown docs/records/matrix.md`:
8 launches at a time, of 1 to 8 processes each; without `--parallel` one.
"""


@dataclass(frozen=True)
class Result:
    """One case: how far each of its steps was from the reference."""

    case: Case
    comparisons: tuple[Comparison, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(comparison.passed for comparison in self.comparisons)

    @property
    def worst(self) -> tuple[Run, Comparison]:
        pairs = zip(self.case.runs, self.comparisons, strict=True)
        return max(pairs, key=lambda pair: pair[1].gradient_error)


References = dict[tuple[Any, ...], Outcome]
"""By `Case.reference`."""


def compute_references(cases: list[Case]) -> References:
    wanted: dict[ModelOptions, dict[tuple[Any, ...], None]] = defaultdict(dict)
    for key in (case.reference(run) for case in cases for run in case.runs):
        wanted[key[0]][key] = None
    references: References = {}
    for options, keys in wanted.items():
        outcomes = run_ranks(references_of_model, 1, options, list(keys))[0]
        references |= dict(zip(keys, outcomes, strict=True))
    return references


def references_of_model(options: ModelOptions, keys: list[tuple[Any, ...]]) -> list[Outcome]:
    if options.moe_aux_loss_coeff:
        return [step_with_losses_of_routers(*key)[0] for key in keys]
    return reference_steps(options, [run for _, run in keys])


def run_cases(cases: list[Case], references: References) -> list[Result]:
    """On every rank: build the models, run the steps; rank 0 compares."""
    results = []
    for case in cases:
        started = time.monotonic()
        outcomes = run_steps(case.sharding, case.options, case.runs)
        expected = [references[case.reference(run)] for run in case.runs]
        tolerance = gradient_tolerance(case.options)
        pairs = zip(outcomes, expected, strict=True)
        comparisons = tuple(compare(*pair, tolerance) for pair in pairs if pair[0] is not None)
        results.append(Result(case, comparisons, time.monotonic() - started))
    return results


def run_all(cases: list[Case], parallel: int = 1, per_launch: int = 8) -> Iterator[Result]:
    """Results of the cases, those of one world size together.

    Args:
        parallel: launches at a time, each of as many processes as its cases have ranks.
        per_launch: cases of a launch.
    """
    references = compute_references(cases)
    by_size: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_size[case.sharding.world_size].append(case)
    batches = [
        (size, same_size[first : first + per_launch])
        for size, same_size in sorted(by_size.items())
        for first in range(0, len(same_size), per_launch)
    ]

    def launch(batch: tuple[int, list[Case]]) -> list[Result]:
        return run_ranks(run_cases, *batch, references)[0]

    with ThreadPoolExecutor(parallel) as pool:
        for results in pool.map(launch, batches):
            yield from results


def versions() -> str:
    core = ".".join(map(str, megatron_core_version()))
    return f"Python {platform.python_version()}, torch {torch.__version__}, megatron-core {core}"


def summary(results: list[Result], seconds: float) -> str:
    """One line: how many passed, and the largest errors."""
    steps = sum(len(result.comparisons) for result in results)
    passed = sum(result.passed for result in results)
    worst: dict[str, float] = defaultdict(float)
    for result in results:
        options, key = result.case.options, result.case.precision
        if options.dtype == torch.float64 and options.calculate_per_token_loss:
            key += " per token"
        worst[key] = max(worst[key], result.worst[1].gradient_error)
    errors = ", ".join(f"{key} {error:.1e}" for key, error in sorted(worst.items()))
    return (
        f"{passed} of {len(results)} cases passed ({steps} steps, {seconds:.0f} s on "
        f"{os.cpu_count()} cores); "
        f"largest gradient errors: {errors}. {versions()}."
    )


def markdown(results: list[Result], seconds: float) -> str:
    order = [str(case) for case in all_cases()]
    rows: dict[str, list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda result: order.index(str(result.case))):
        rows[result.case.configuration].append(result)
    lines = [
        PREAMBLE.format(metric_tolerance=METRIC_TOLERANCE),
        summary(results, seconds),
        "",
        "| processes | model and sharding | modes | float32 | float64 |",
        "|---|---|---|---|---|",
    ]
    for configuration, row in rows.items():
        worst: dict[str, float] = {}
        for result in row:
            error = result.worst[1].gradient_error
            worst[result.case.precision] = max(error, worst.get(result.case.precision, 0.0))
        errors = " | ".join(
            f"{worst[precision]:.1e}" if precision in worst else ""
            for precision in ("float32", "float64")
        )
        failed = "" if all(result.passed for result in row) else " FAIL"
        modes = len({result.case.mode for result in row})
        world_size = row[0].case.sharding.world_size
        lines.append(f"| {world_size} | {configuration}{failed} | {modes} | {errors} |")
    return "\n".join(lines) + "\n"


def report(result: Result) -> None:
    run, worst = result.worst
    verdict = "PASS" if result.passed else "FAIL"
    print(f"{verdict} {result.case}: {worst} [{run}] {result.seconds:.1f} s", flush=True)
    for step, comparison in zip(result.case.runs, result.comparisons, strict=True):
        if not comparison.passed:
            print(f"     {step}: {comparison}", flush=True)


def main() -> int:
    """Exit status 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="the whole matrix, not its covering array"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    about = "launches at a time, of 1 to 8 processes each"
    parser.add_argument("--parallel", type=int, default=1, help=about)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    enable_cpu_runtime()
    cases: list[Case] = all_cases() if arguments.all else covering_cases()
    started = time.monotonic()
    results = []
    for result in run_all([c for c in cases if arguments.only in str(c)], arguments.parallel):
        results.append(result)
        report(result)
    seconds = time.monotonic() - started
    print(summary(results, seconds))
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(results, seconds))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
