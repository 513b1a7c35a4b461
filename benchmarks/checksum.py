"""What the aggregation checksum costs: within a loss call, and before it.

    python -m benchmarks.checksum [--device cpu] [--vocabulary 151936]

A micro-batch of 8,192 tokens, 16 samples of a prompt of 64 tokens and a response of 448, logits given. Within the call are
the sums of weights times coefficients, and the three pairs on their way to the device: all of the checksum, the sum of the
weights included. Before it, once a sample, are its hashes, and once a micro-batch the coefficients of its window; beside
them stands what it takes to build and to pack the samples. Medians; the loss call is forward and backward, with metrics.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megatron_pg import (
    AGGREGATIONS,
    PolicyLossConfig,
    Sample,
    pack,
    policy_loss_function,
    step_totals,
)
from megatron_pg.loss.checksum import checksums
from megatron_pg.loss.reducer import Reduction, WeightedSum, _weight_sums, token_weights

NUM_SAMPLES, PROMPT, RESPONSE, ROUNDS, CALLS = 16, 64, 448, 50, 20
HASHES = ("identity", "prompt_hash", "active_coefficients")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocabulary", type=int, default=151936)
    args = parser.parse_args()
    device = torch.device(args.device)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def microseconds(call: Callable[[], object]) -> float:
        times = []
        for _ in range(ROUNDS if device.type == "cuda" or call is not loss_call else 3):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times[1:])

    tokens = torch.randint(args.vocabulary, (NUM_SAMPLES, PROMPT + RESPONSE))
    mask = torch.rand(NUM_SAMPLES, RESPONSE) < 0.9

    def build() -> list[Sample]:
        values = torch.full((RESPONSE,), -1.0)
        return [
            Sample(each, RESPONSE, active, 1.0, old_log_probs=values)
            for each, active in zip(tokens, mask, strict=True)
        ]

    samples = build()
    batch, totals, config = pack(samples), step_totals(samples), PolicyLossConfig()
    on_device = batch.to(device)
    mode = AGGREGATIONS["sample_mean"]
    masks = [sample.loss_mask for sample in samples]
    weights = token_weights(batch.window, masks, mode, None, mode.denominators(totals, samples))
    logits = torch.randn(
        batch.window.local_tokens, args.vocabulary, device=device, dtype=torch.bfloat16
    ).requires_grad_()

    def loss_call() -> None:
        logits.grad = None
        loss, _ = policy_loss_function(config, on_device, logits, totals=totals)
        loss.backward()

    def within() -> None:
        for _ in range(CALLS):  # nothing here waits for the device
            sums = _weight_sums(mode, batch, totals, 1.0, weights)
            checksums(Reduction(WeightedSum(weights), 1, sums), 1.0, device)

    def hashes() -> None:
        for sample in samples:
            for name in HASHES:
                vars(sample).pop(name, None)
            for name in HASHES:
                getattr(sample, name)

    def coefficients() -> None:
        torch.cat([sample.token_coefficients for sample in samples])[batch.window.response_indices]

    whole = microseconds(loss_call)
    print(f"{args.device}, vocabulary {args.vocabulary}: a loss call takes {whole / 1e3:.2f} ms")
    inside = microseconds(within) / CALLS
    print(f"the checksum within it: {inside:.0f} us, {100 * inside / whole:.2f} %")
    for name, call, other, what in (
        ("hashes of the samples", hashes, build, "building them"),
        ("coefficients of the window", coefficients, lambda: pack(samples), "packing it"),
    ):
        own, beside = microseconds(call), microseconds(other)
        print(f"{name}: {own:.0f} us; {what} takes {beside:.0f} us")


if __name__ == "__main__":
    main()
