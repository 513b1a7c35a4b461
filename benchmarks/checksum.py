"""What the aggregation checksum costs before a loss call: hashes of the samples, coefficients of the window.

    python -m benchmarks.checksum

A micro-batch of 8,192 tokens, 16 samples of a prompt of 64 tokens and a response of 448. Beside them stands what it takes to
build and to pack the samples; medians, all on the host. Within a loss call the checksum is three rows of a sum over tokens
that is made anyway (`benchmarks.loss_launches`).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megatron_pg import Sample, pack
from megatron_pg.step.batch import coefficients_of_window
from megatron_pg.step.identity import store_hashes

NUM_SAMPLES, PROMPT, RESPONSE, ROUNDS = 16, 64, 448, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()

    def microseconds(call: Callable[[], object]) -> float:
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times[1:])

    tokens = torch.randint(151936, (NUM_SAMPLES, PROMPT + RESPONSE))
    mask = torch.rand(NUM_SAMPLES, RESPONSE) < 0.9

    def build() -> list[Sample]:
        values = torch.full((RESPONSE,), -1.0)
        return [
            Sample(each, RESPONSE, active, 1.0, old_log_probs=values)
            for each, active in zip(tokens, mask, strict=True)
        ]

    samples = build()
    window = pack(samples).window

    def hashes() -> None:
        for sample in samples:
            vars(sample).pop("hashed_fields", None)
        store_hashes(samples)

    def coefficients() -> None:
        coefficients_of_window(window)

    for name, call, other, what in (
        ("hashes of the samples", hashes, build, "building them"),
        ("coefficients of the window", coefficients, lambda: pack(samples), "packing it"),
    ):
        own, beside = microseconds(call), microseconds(other)
        print(f"{name}: {own:.0f} us; {what} takes {beside:.0f} us")


if __name__ == "__main__":
    main()
