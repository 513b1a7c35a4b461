"""Table: the cost of routing replay per micro-batch: host time to pack and move the experts, and
device time per router.

    python -m benchmarks.routing_replay [--device cpu] [--tokens 32768] [--rounds 30]

The shape is Qwen3-30B-A3B: 48 layers, 128 experts, k = 8, hidden size 2048. The samples fill a
micro-batch, as one sample and as samples of 1,024 tokens, at context-parallel size 1 and 2. Host
time covers `pack` and `PackedBatch.to`, with and without experts. Device time covers a router's
choice with and without given experts, and one layer's forward matrix products, which a step runs
three times, in addition to attention, optimizer and communication. Times are medians. The share is
(with - without) / (3 products).
"""

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.timing import Contender, measure
from megatron_pg import Sample, pack
from megatron_pg.megatron.routing_replay import Replay

LAYERS, EXPERTS, TOPK, HIDDEN, EXPERT_HIDDEN = 48, 128, 8, 2048, 768
QUERIES, KEYS_AND_VALUES = 32 * 128, 2 * 4 * 128


def samples_of(tokens: int, length: int, with_experts: bool) -> list[Sample]:
    def experts() -> torch.Tensor:
        scores = torch.rand(length, LAYERS, EXPERTS)
        return scores.topk(TOPK).indices.transpose(0, 1)

    given = experts() if with_experts else None
    fields: dict[str, Any] = {"response_length": length // 2, "loss_mask": [1] * (length // 2)}
    ids = torch.arange(length) % 1000
    one = Sample(ids, **fields, old_log_probs=[-1.0] * (length // 2), routed_experts=given)
    return [one] * (tokens // length)


def host_milliseconds(samples: list[Sample], cp_size: int, device: str, rounds: int) -> float:
    """Return the median time until `pack` and `to` return."""
    times = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        pack(samples, cp_size=cp_size, pad_to_multiple=cp_size).to(device)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def device_milliseconds(tokens: int, rounds: int) -> None:
    scores = torch.randn(tokens, EXPERTS, device="cuda").softmax(1)
    experts = torch.rand(tokens, LAYERS, EXPERTS // 8, device="cuda").topk(TOPK).indices
    experts = experts.to(torch.uint8)[:, 7]
    config = SimpleNamespace(recompute_granularity=None, recompute_modules=None)
    replay = Replay(SimpleNamespace(config=config, layer_number=8))
    replay.begin_step()

    def choose(given: torch.Tensor | None) -> object:
        replay.take(given)
        return replay.get_replay_topk(
            scores, TOPK, default_compute_topk=lambda s, k, **_: s.topk(k, dim=1)
        )

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    products = [
        (bf16(tokens, HIDDEN), bf16(HIDDEN, QUERIES + KEYS_AND_VALUES)),
        (bf16(tokens, QUERIES), bf16(QUERIES, HIDDEN)),
        (bf16(tokens * TOPK, HIDDEN), bf16(HIDDEN, 2 * EXPERT_HIDDEN)),
        (bf16(tokens * TOPK, EXPERT_HIDDEN), bf16(EXPERT_HIDDEN, HIDDEN)),
    ]
    contenders = [
        Contender("with", lambda: choose(experts)),
        Contender("without", lambda: choose(None)),
        Contender("products", lambda: [a @ b for a, b in products]),
    ]
    time_of = {timing.name: timing.median for timing in measure(contenders, rounds)}
    share = (time_of["with"] - time_of["without"]) / (3 * time_of["products"])
    print("\n| device, one layer | ms |\n|---|---|")
    for name, value in time_of.items():
        print(f"| {name} | {value:.3f} |")
    print(f"\nshare of a layer's products: {100 * share:.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    print("| samples of | CP | without, ms | with, ms | more, ms |\n|---|---|---|---|---|")
    for length in (args.tokens, 1024):
        for cp_size in (1, 2):
            times = []
            for with_experts in (False, True):
                # Each rank has `tokens` tokens.
                samples = samples_of(args.tokens * cp_size, length, with_experts)
                times.append(host_milliseconds(samples, cp_size, args.device, args.rounds))
            row = f"{times[0]:.2f} | {times[1]:.2f} | {times[1] - times[0]:.2f}"
            print(f"| {length} | {cp_size} | {row} |")
    if args.device == "cuda":
        device_milliseconds(args.tokens, args.rounds)


if __name__ == "__main__":
    main()
