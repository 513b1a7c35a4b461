"""A timeline of steps whose successors are planned and packed in a thread, beside the same with both in turn."""

import time
from collections.abc import Sequence

import torch

from benchmarks.scale.planning import sample_of
from benchmarks.scale.played import heavy_tailed
from megatron_pg import Sample
from megatron_pg.step import PackedStep, plan_ahead

STEPS, SAMPLES, BUDGET = 4, 16, 2**18
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def samples_of(step: int) -> list[Sample]:
    return [sample_of(int(n), 8 * i) for i, n in enumerate(heavy_tailed(SAMPLES, step))]


def compute(packed: PackedStep, weight: torch.Tensor) -> None:
    """Stand in for a step of the model: products of matrices, and a read of the packed tokens."""
    for batch in packed.batches:
        total = batch.tokens.sum() + weight[0, 0].long() * 0
        for _ in range(100 if DEVICE == "cuda" else 4):
            weight @ weight
        del total
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def run(
    steps: Sequence[list[Sample]], is_ahead: bool
) -> tuple[float, list[tuple[float, float, float]]]:
    """Return the seconds of all steps, and when each began to wait for its plan, had it, and ended."""
    weight = torch.randn(
        8192 if DEVICE == "cuda" else 768, 8192 if DEVICE == "cuda" else 768, device=DEVICE
    )
    spans, start = [], time.perf_counter()
    upcoming = plan_ahead(steps[0], device=DEVICE, max_tokens_per_microbatch=BUDGET)
    for number in range(len(steps)):
        begun = time.perf_counter() - start
        packed = upcoming.wait()
        planned = time.perf_counter() - start
        following = steps[number + 1 : number + 2]
        if following and is_ahead:
            upcoming = plan_ahead(following[0], device=DEVICE, max_tokens_per_microbatch=BUDGET)
        compute(packed, weight)
        if following and not is_ahead:
            upcoming = plan_ahead(following[0], device=DEVICE, max_tokens_per_microbatch=BUDGET)
        spans.append((begun, planned, time.perf_counter() - start))
    return time.perf_counter() - start, spans


def main() -> None:
    run([samples_of(0)], True)
    print(f"\n**{STEPS} steps of {SAMPLES} samples on {DEVICE}: ms of the clock**\n")
    print("| planning | step | waits for its plan | runs | ends at |\n|---|---|---|---|---|")
    for is_ahead in (False, True):
        seconds, spans = run([samples_of(step) for step in range(STEPS)], is_ahead)
        name = "in a thread, one step ahead" if is_ahead else "between the steps"
        for number, (begun, planned, end) in enumerate(spans):
            waits, runs, at = (1e3 * x for x in (planned - begun, end - planned, end))
            print(f"| {name} | {number} | {waits:.1f} | {runs:.1f} | {at:.1f} |")
        print(f"| {name} | all | | | {1e3 * seconds:.1f} |")
