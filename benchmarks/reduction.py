"""Table: the loss and 12 metrics of 512 ragged samples reduced to numbers: operators, launches and time.

    python -m benchmarks.reduction [--device cpu]

From 13 per-token vectors `[window]` on the device, the loss with its gradient:

- reducer: `get_pg_loss_reducer` built for the micro-batch, masks on the host, and called once a vector;
- loop: `sum(x * mask) / max(sum(mask), 1)` sample by sample, masks on the device, as trainers write it;
- whole policy loss: `policy_loss_from_log_probs`, from log-probs to the loss, its metrics and its gradient, so with
  the objective besides the reduction.

Operators are those that reach a device's backend; launches are kernels and copies that a profiler sees on the GPU.
That none of it makes the host wait is tested in tests/gpu/test_policy_loss_cuda.py.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pg import PolicyLossConfig, Sample, get_pg_loss_reducer, pack, step_totals
from megatron_pg.loss.from_logits import policy_loss_from_log_probs

NUM_SAMPLES, NUM_METRICS, ROUNDS = 512, 12, 20
PROMPT_LENGTH = 64

Call = Callable[[], object]


def ragged_samples() -> list[Sample]:
    """Responses of 1 to 4096 tokens, log-normal with median 500; a tenth of the tokens masked."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(NUM_SAMPLES, generator=generator).exp().mul(500).clamp(1, 4096).long()
    return [
        Sample(
            tokens=torch.zeros(PROMPT_LENGTH + length, dtype=torch.int64),
            response_length=length,
            loss_mask=torch.rand(length, generator=generator) < 0.9,
            advantages=1.0 if index % 2 else -1.0,
            old_log_probs=-torch.rand(length, generator=generator),
            group_index=index // 8,
        )
        for index, length in enumerate(lengths.tolist())
    ]


class Work:
    """The three ways, on one device."""

    def __init__(self, device: str) -> None:
        self.samples = ragged_samples()
        batch = pack(self.samples)
        self.batch = batch.to(device)
        self.totals = step_totals(self.samples)
        self.config = PolicyLossConfig()
        window = batch.window
        self.lengths = window.total_lengths, window.response_lengths
        vectors = [torch.randn(len(window)).to(device) for _ in range(1 + NUM_METRICS)]
        self.loss, self.metrics = vectors[0].requires_grad_(), vectors[1:]
        self.masks = [sample.loss_mask.to(device) for sample in self.samples]
        assert batch.old_log_probs is not None
        self.log_probs = batch.old_log_probs.to(device).requires_grad_()

    def reducer(self) -> list[Tensor]:
        reduce = get_pg_loss_reducer(*self.lengths, [s.loss_mask for s in self.samples])
        loss = reduce(self.loss)
        loss.backward()
        return [loss.detach(), *map(reduce, self.metrics)]

    def loop(self) -> list[Tensor]:
        def reduce(x: Tensor) -> Tensor:
            parts = x.split(list(self.lengths[1]))
            means = [
                (part * mask).sum() / mask.sum().clamp_min(1)
                for part, mask in zip(parts, self.masks, strict=True)
            ]
            return torch.stack(means).sum()

        loss = reduce(self.loss)
        loss.backward()
        return [loss.detach(), *map(reduce, self.metrics)]

    def whole(self) -> Any:
        loss, metrics = policy_loss_from_log_probs(
            self.config, self.batch, self.log_probs, None, totals=self.totals
        )
        loss.backward()
        return metrics


class Operators(TorchDispatchMode):
    """Counts the operators that reach a backend, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        self.count += not function.is_view
        return function(*arguments, **(keywords or {}))


def operators(call: Call) -> int:
    with Operators() as counter:
        call()
    return counter.count


def launches(call: Call) -> int:
    """Kernels, copies and fills on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events() or []
    )


def milliseconds(call: Call, synchronize: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(ROUNDS + 2):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    device = parser.parse_args().device
    work = Work(device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for found, expected in zip(work.reducer(), work.loop(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    print(
        f"{device}, {NUM_SAMPLES} samples, {len(work.log_probs)} response tokens, "
        f"{len(work.whole())} metrics of the whole policy loss\n"
    )
    print("| | operators | launches | ms (fastest, slowest) |\n|---|---|---|---|")
    for name, call in (
        (f"reducer, {1 + NUM_METRICS} vectors", work.reducer),
        (f"loop over samples, {1 + NUM_METRICS} vectors", work.loop),
        ("whole policy loss", work.whole),
    ):
        times = milliseconds(call, synchronize)
        on_gpu = str(launches(call)) if device == "cuda" else ""
        print(
            f"| {name} | {operators(call)} | {on_gpu} "
            f"| {statistics.median(times):.2f} ({times[0]:.2f}, {times[-1]:.2f}) |"
        )


if __name__ == "__main__":
    main()
