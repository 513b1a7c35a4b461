"""Table: the cost of a micro-batch's loss without the head: launches, host and device time,
compiled and not.

    python -m benchmarks.loss_launches [--device cpu] [--rounds 100]

7,764 response tokens in 8 and in 64 samples. Per setting: `policy_loss_from_log_probs`, forward and
backward, with generated kernels as on a GPU and operator by operator. Then `policy_loss_function`
on given logits, packing and moving a micro-batch, and the recompilations for 20 micro-batches of
different sizes. Host time is the time until the call returns, with an empty queue. Device time is
the sum over a profile's launches, including copies. Times are medians. On a CPU, launches are
operators, and there is no device time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_pg import PolicyLossConfig, Sample, pack, policy_loss_function, step_totals
from megatron_pg.loss import compiled
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.step.batch import PackedBatch
from tests.dispatches import CountDispatches

TOKENS, PROMPT = 7764, 64
SETTINGS: dict[str, dict[str, Any]] = {
    "basic": {},
    "none": {"pg_metrics": "none"},
    "everything": {
        "kl_loss_coef": 0.1, "entropy_coef": 0.01, "use_tis": True, "pg_metrics": "with_entropy",
    },
    "gspo": {"policy_loss": "gspo"},
    "gspo_by_turn": {"policy_loss": "gspo", "sequence_unit": "turn"},
}  # fmt: skip
"""`everything` has entropy, KL, TIS, all metrics, and samples with every kind of log-probs."""

Call = Callable[[], object]


class Work:
    """One micro-batch and the measured calls."""

    def __init__(self, num_samples: int, tokens: int, setting: str, device: str) -> None:
        generator = torch.Generator().manual_seed(num_samples)
        fields = ["old_log_probs"]
        fields += ["ref_log_probs", "rollout_log_probs"] * (setting == "everything")
        lengths = [tokens // num_samples] * num_samples
        lengths[-1] += tokens - sum(lengths)
        self.samples = [
            Sample(
                torch.randint(1000, (PROMPT + length,), generator=generator),
                length,
                torch.rand(length, generator=generator) < 0.9,
                1.0 if index % 2 else -1.0,
                turn_ids=torch.arange(length) // 50,
                **{name: -torch.rand(length, generator=generator) for name in fields},  # type: ignore[arg-type]
            )
            for index, length in enumerate(lengths)
        ]
        self.config, self.device = PolicyLossConfig(**SETTINGS[setting]), device
        self.totals = step_totals(self.samples)
        self.batch = pack(self.samples).to(device)
        old = self.batch.old_log_probs
        assert old is not None
        noise = 0.1 * torch.randn(tokens, generator=generator).to(device)
        self.log_probs = (old + noise).requires_grad_()
        self.entropy = torch.rand(tokens, generator=generator).to(device).requires_grad_()

    def loss(self) -> object:
        self.log_probs.grad = self.entropy.grad = None
        entropy = self.entropy if self.config.needs_entropy else None
        loss, metrics = policy_loss_from_log_probs(
            self.config, self.batch, self.log_probs, entropy, totals=self.totals
        )
        loss.backward()
        return metrics

    def of_logits(self, columns: int) -> Call:
        tokens = self.batch.window.local_tokens
        logits = torch.randn(tokens, columns, device=self.device).bfloat16().requires_grad_()

        def call() -> object:
            # Copy, because the gradient overwrites the logits: one pass more than in training.
            loss, metrics = policy_loss_function(
                self.config, self.batch, logits.clone(), totals=self.totals
            )
            logits.grad = None
            loss.backward()
            return metrics

        return call

    def packed(self) -> PackedBatch:
        return pack(self.samples).to(self.device)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Call, device: str, rounds: int) -> tuple[float, float]:
    """Return the medians until the call returns and until the device is done."""
    host, whole = [], []
    for _ in range(rounds + 3):
        synchronize(device)
        start = time.perf_counter()
        call()
        host.append(1e3 * (time.perf_counter() - start))
        synchronize(device)
        whole.append(1e3 * (time.perf_counter() - start))
    return statistics.median(host[3:]), statistics.median(whole[3:])


def launches(call: Call, device: str) -> tuple[int, float, list[str]]:
    """Return the number of kernels, copies and fills, their milliseconds and names."""
    if device == "cpu":
        with CountDispatches() as counter:
            call()
        return len(counter.names), 0.0, []
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        synchronize(device)
    on_device = torch.autograd.DeviceType.CUDA
    events = [e for e in profiler.events() or [] if e.device_type == on_device]
    return len(events), 1e-3 * sum(e.device_time for e in events), [e.name for e in events]


def recompiled(work: Callable[[int, int], Work]) -> int:
    """Return the number of new graphs for 20 micro-batches of different sizes."""
    from torch._dynamo.utils import counters

    work(8, TOKENS).loss()
    before = counters["stats"]["unique_graphs"], len(compiled._programs)
    for index in range(20):
        num_samples = 1 + index % 9
        work(num_samples, 37 + num_samples * (1 + 911 * index)).loss()
    after = counters["stats"]["unique_graphs"], len(compiled._programs)
    return sum(after) - sum(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--columns", type=int, default=151936, help="columns of the given logits")
    parser.add_argument("--names", action="store_true", help="list the launches of compiled calls")
    args = parser.parse_args()
    device = args.device
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {TOKENS} response tokens\n")
    print("| setting | samples | as | launches | host ms | device ms | first call s |")
    print("|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        for num_samples in (8, 64):
            for devices in ({device}, set[str]()):
                compiled.DEVICES = devices
                work = Work(num_samples, TOKENS, setting, device)
                start = time.perf_counter()
                work.loss()
                synchronize(device)
                first = time.perf_counter() - start
                host, _ = milliseconds(work.loss, device, args.rounds)
                how = "compiled" if devices else "operators"
                if devices and device == "cpu":  # compiled operators cannot be counted
                    print(f"| {setting} | {num_samples} | {how} | | {host:.2f} | | {first:.2f} |")
                    continue
                count, on_device, names = launches(work.loss, device)
                print(
                    f"| {setting} | {num_samples} | {how} | {count} | {host:.2f} | {on_device:.3f} "
                    f"| {first:.2f} |",
                    flush=True,
                )
                if args.names and devices and num_samples == 8:
                    print(*(f"    {name[:100]}" for name in names), sep="\n")
    failed = [key for key, program in compiled._programs.items() if program is None]
    print(f"\n{len(compiled._programs)} programs, {len(failed)} that could not be compiled")
    for devices in ({device}, set[str]()):
        compiled.DEVICES = devices
        call = Work(8, TOKENS, "basic", device).of_logits(args.columns)
        host, whole = milliseconds(call, device, min(args.rounds, 20))
        how = "compiled" if devices else "operators"
        print(
            f"policy_loss_function on given logits [{TOKENS + 8 * PROMPT}, {args.columns}], {how}, "
            f"with a copy of them: "
            f"{whole:.2f} ms, host {host:.2f} ms"
        )
    for num_samples in (8, 64):
        work = Work(num_samples, TOKENS, "everything", device)
        host, whole = milliseconds(work.packed, device, args.rounds)
        print(
            f"packing {num_samples} samples and moving them: host {host:.2f} ms, done after "
            f"{whole:.2f}"
        )
    compiled.DEVICES = {device}
    for setting in SETTINGS:
        count = recompiled(lambda n, tokens, s=setting: Work(n, tokens, s, device))  # type: ignore[misc]
        print(f"20 micro-batches of different sizes, {setting}: {count} recompilations")


if __name__ == "__main__":
    main()
