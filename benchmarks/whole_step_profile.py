"""Where a whole step's time goes, by head: kernels, launches and what the host waits for, of one profiled step.

    torchrun --nproc-per-node 1 -m benchmarks.whole_step_profile --tokens 8192

The wall time is of a step without the profiler.
"""

import json
import tempfile
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.whole_step import heads, parse_arguments, rollouts, train_step
from benchmarks.whole_step_model import build_trainer
from megatron_pg import pack, step_totals

HEADS = ("no head", "--fused-lm-head", "logits bfloat16, our loss")
ON_THE_GPU = ("kernel", "gpu_memset", "gpu_memcpy")
IN_THE_DRIVER = ("cuda_runtime", "cuda_driver")


def trace_events(profiler: profile) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        with open(file.name) as text:
            events: list[dict[str, Any]] = json.load(text)["traceEvents"]
    return events


def longest(events: list[dict[str, Any]], count: int) -> str:
    """Names, times called and milliseconds, the longest in all first."""
    times: Counter[str] = Counter()
    for event in events:
        times[event["name"][:60]] += event["dur"]
    calls = Counter(event["name"][:60] for event in events)
    return "; ".join(
        f"{name} x{calls[name]} {total / 1e3:.1f}" for name, total in times.most_common(count)
    )


def main() -> None:
    args = parse_arguments()
    trainer = build_trainer(args)
    for tokens in args.tokens:
        micro_batches = rollouts(tokens, trainer.vocab_size)
        totals = step_totals([sample for samples in micro_batches for sample in samples])
        batches = [pack(samples).to(trainer.device) for samples in micro_batches]
        for name in HEADS:
            build = heads(trainer)[name]
            for _ in range(3):
                train_step(trainer, build, batches, totals)
            torch.cuda.synchronize()
            start = time.perf_counter()
            train_step(trainer, build, batches, totals)
            torch.cuda.synchronize()
            wall = time.perf_counter() - start
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                train_step(trainer, build, batches, totals)
                torch.cuda.synchronize()
            events = trace_events(profiler)
            kernels = [event for event in events if event.get("cat") in ON_THE_GPU]
            calls = [event for event in events if event.get("cat") in IN_THE_DRIVER]
            busy = sum(event["dur"] for event in kernels)
            print(
                f"{tokens} tokens, {name}: {1e3 * wall:.0f} ms, kernels {busy / 1e3:.0f} ms, {len(kernels)} launches\n"
                f"  kernels: {longest(kernels, 8)}\n  host: {longest(calls, 8)}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
