"""The time to plan a step, and how close the packing is to the lower bound, on one core without an
accelerator.

    python -m benchmarks.planning [--samples 100000]

The lower bound on micro-batches is ceil(tokens / budget). Efficiency is the bound over the planned
number. 1 is optimal, and may be unreachable (two sequences of 0.6 budgets cannot share a
micro-batch).
"""

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_pg import Sample
from megatron_pg.step import plan_bins, plan_step

BUDGET = 16384
Lengths = NDArray[np.int64]


def length_distributions(num_samples: int) -> dict[str, Lengths]:
    rng = np.random.default_rng(0)

    def clipped(values: NDArray[np.float64]) -> Lengths:
        return np.clip(values, 1, BUDGET).astype(np.int64)

    return {
        "log-normal, median 500": clipped(rng.lognormal(np.log(500), 1.0, num_samples)),
        "uniform, 1 to 16384": rng.integers(1, BUDGET + 1, num_samples),
        "uniform, 4000 to 9000": rng.integers(4000, 9001, num_samples),
        "constant, 700": np.full(num_samples, 700, dtype=np.int64),
        "short, 1 to 300": rng.integers(1, 301, num_samples),
    }


def seconds(work: Callable[[Any], object], inputs: Iterable[Any]) -> float:
    """Return the best time over the inputs, in processor time, because the machine may be
    shared.
    """
    best = float("inf")
    for each in inputs:
        start = time.process_time()
        work(each)
        best = min(best, time.process_time() - start)
    return best


def samples_with(lengths: Lengths) -> list[Sample]:
    """Make samples of these lengths in groups of eight, with advantages and two kinds of log-probs.
    Samples of one length share their tensors.
    """
    of_length = {}
    for length in np.unique(lengths).tolist():
        tokens, values = torch.zeros(length, dtype=torch.int64), torch.full((length - 1,), -1.0)
        log_probs = {"old_log_probs": values, "rollout_log_probs": values}
        of_length[length] = Sample(tokens, length - 1, torch.ones(length - 1), 1.0, **log_probs)
    samples = []
    for index, length in enumerate(lengths.tolist()):
        sample = object.__new__(Sample)
        sample.__dict__.update(of_length[length].__dict__, group_index=index // 8)
        samples.append(sample)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    num_samples = parser.parse_args().samples
    torch.set_num_threads(1)
    print(f"{num_samples} samples, {BUDGET} tokens per micro-batch")
    print("| lengths | seconds | micro-batches | lower bound | efficiency | longest | shortest |")
    print("|---|---|---|---|---|---|---|")
    for name, lengths in length_distributions(num_samples).items():
        elapsed = seconds(lambda lengths: plan_bins(lengths, BUDGET), [lengths] * 3)
        loads = [int(lengths[members].sum()) for members in plan_bins(lengths, BUDGET)]
        bound = -(-int(lengths.sum()) // BUDGET)
        print(
            f"| {name} | {elapsed:.2f} | {len(loads)} | {bound} | {bound / len(loads):.4f} "
            f"| {max(loads)} | {min(loads)} |"
        )
    lengths = length_distributions(num_samples)["log-normal, median 500"]
    # Samples cache their hashes, so make new ones.
    fresh = (samples_with(lengths) for _ in range(3))
    elapsed = seconds(
        lambda samples: plan_step(samples, max_tokens_per_microbatch=BUDGET, cp_size=2), fresh
    )
    print(f"plan_step of {num_samples} samples, totals and hashes included: {elapsed:.2f} s")


if __name__ == "__main__":
    main()
