"""Timeline of training steps: the time for which the GPU stands idle while the host is in the loss or in packing.

    torchrun --nproc-per-node 1 -m benchmarks.step_timeline --tokens 8192 [--model 8b] [--output timeline.json]

The models, rollouts and settings of `whole_step`, but for the micro-batches: four a step, of eight samples each, packed and
moved where Megatron asks for them. Steps follow one another without a wait. torch's profiler records what the GPU does and
which call launched it, and nothing of the host's own work, which it would slow down; the host's times are taken around the
functions below and meet the profiler's clock at a kernel that is launched for it.

"idle" is time in which nothing runs on the GPU. "waited for": the part of it in which the host is inside of packing, of the
loss before the model (`PolicyStep.head`), or of the loss itself. "ahead": the work that is queued on the GPU as the host
enters it; where that is longer than the host stays, the GPU cannot wait for it.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks import whole_step
from benchmarks.idle_time import (
    ON_THE_GPU,
    Activity,
    Interval,
    Span,
    activities_of,
    ahead,
    idle_times,
    overlap,
    union,
)
from benchmarks.whole_step_model import Trainer, build_trainer
from megatron_pg import PolicyLossConfig, Sample, StepTotals, pack, step_totals
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.megatron import PolicyStep
from megatron_pg.megatron.policy_step import MicroBatchHead
from megatron_pg.megatron.schedule import run_micro_batches

SAMPLES, MICRO_BATCHES = 8, 4
WARM_UP, TIMED, PROFILED = 2, 6, 3
SETTINGS: dict[str, tuple[PolicyLossConfig, dict[str, Any]]] = {
    "`--fused-lm-head`": (PolicyLossConfig(fused_lm_head=True), {}),
    "`--fused-lm-head --policy-loss gspo`": (
        PolicyLossConfig(fused_lm_head=True, policy_loss="gspo"),
        {},
    ),
    "logits, bfloat16": (PolicyLossConfig(), {"fp32_output": False}),
}
"""The loss, and further arguments of the model."""


class Host:
    """The spans of the host, by its own clock until `align`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = time.perf_counter_ns() * 1e-6
        yield
        self.spans.append(Span(name, begin, time.perf_counter_ns() * 1e-6))

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return call(*args, **kwargs)

        return recorded

    @contextlib.contextmanager
    def watch_the_loss(self) -> Iterator[None]:
        """Record `MicroBatchLoss`: a call is the loss with its metrics, `loss` that of a chunk or piece alone."""
        own = {name: getattr(MicroBatchLoss, name) for name in ("__call__", "loss")}
        for name, call in own.items():
            setattr(MicroBatchLoss, name, self.around("loss", call))
        try:
            yield
        finally:
            for name, call in own.items():
                setattr(MicroBatchLoss, name, call)

    def align(self, clock: Span, launched: float) -> list[Span]:
        """Move the spans to the profiler's clock, by the call that launched one kernel."""
        shift = launched - clock.begin
        return [Span(name, begin + shift, end + shift) for name, begin, end in self.spans]


def rollouts(tokens: int, vocab_size: int) -> list[list[Sample]]:
    """Return the samples of each micro-batch, of unequal lengths that fill it."""
    shares = torch.linspace(0.5, 1.5, SAMPLES)
    parts = tuple((shares / shares.sum()).tolist())
    return whole_step.rollouts(tokens, vocab_size, [parts] * MICRO_BATCHES)


def train_step(
    trainer: Trainer,
    setting: tuple[PolicyLossConfig, dict[str, Any]],
    micro_batches: list[list[Sample]],
    totals: StepTotals,
    host: Host,
) -> None:
    """Run one optimizer step, which packs as it goes."""
    config, arguments = setting
    # What the schedule asks of a micro-batch before it is packed.
    sizes = [sum(sample.total_length for sample in samples) for samples in micro_batches]
    parts = [
        SimpleNamespace(samples=samples, window=SimpleNamespace(num_tokens=size))
        for samples, size in zip(micro_batches, sizes, strict=True)
    ]

    def head(part: Any) -> MicroBatchHead:
        with host.span("packing"):
            batch = pack(part.samples).to(trainer.device)
        with host.span("before the model"):
            found = step.head(batch)
        return replace(found, model_inputs=found.model_inputs | arguments)

    with host.span("step"):
        trainer.model.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        with host.span("before the model"):
            step = PolicyStep(
                config,
                totals=totals,
                num_microbatches=len(parts),
                model=trainer.model,
                vocab_size=trainer.vocab_size,
            )
        run_micro_batches(head, parts, [trainer.model])  # type: ignore[arg-type]
        trainer.optimizer.step()


def trace_events(profiler: profile) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events: list[dict[str, Any]] = json.loads(Path(file.name).read_text())["traceEvents"]
    return events


class Profile(NamedTuple):
    """Profiled steps without the first: what the GPU did, the host's spans, and the most called kernels."""

    activities: list[Activity]
    spans: list[Span]
    kernels: str

    @property
    def window(self) -> Interval:
        """From the begin of the second step to the end of the last one's work."""
        steps = [span for span in self.spans if span.name == "step"]
        return steps[1].begin, max(activity.end for activity in self.activities)

    def of(self, name: str) -> list[Span]:
        begin, end = self.window
        return [span for span in self.spans if span.name == name and begin <= span.begin < end]


def profiled(run: Callable[[Host], None], host: Host) -> Profile:
    """Profile steps that `run` runs."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        with host.span("clock"):
            torch.cuda._sleep(1000)
        with host.watch_the_loss():
            for _ in range(PROFILED):
                run(host)
        torch.cuda.synchronize()
    events = trace_events(profiler)
    activities, launched = activities_of(events)
    clock = next(span for span in host.spans if span.name == "clock")
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ON_THE_GPU:
            times[event["name"][:50]] += event["dur"]
    longest = "; ".join(f"{name} {t / 1e3 / PROFILED:.1f}" for name, t in times.most_common(6))
    return Profile(activities, host.align(clock, launched), longest)


NAMES = ("packing", "before the model", "loss")


def row(name: str, profile: Profile, seconds: list[float]) -> str:
    """Return a row of the table: milliseconds a step, and of each of NAMES those of the host and of the GPU."""
    steps, (begin, end) = PROFILED - 1, profile.window
    idle = idle_times(profile.activities, begin, end)
    total = sum(right - left for left, right in idle)
    cells = [name, f"{1e3 * statistics.median(seconds):.0f}", f"{(end - begin) / steps:.0f}"]
    cells.append(f"{total / steps:.1f}")
    for kind in NAMES:
        spans = profile.of(kind)
        waited = overlap(idle, [(span.begin, span.end) for span in spans]) / steps
        host = [span.end - span.begin for span in spans]
        queued = [ahead(profile.activities, span) for span in spans]
        late = sum(lead < time for lead, time in zip(queued, host, strict=True))
        cells.append(
            f"{waited:.2f}; {statistics.median(host):.2f}, {max(host):.2f}; "
            f"{min(queued):.1f}, {statistics.median(queued):.1f}; {late} of {len(spans)}"
        )
    return "| " + " | ".join(cells) + " |"


def drawn(profile: Profile) -> dict[str, Any]:
    """Return the last step for a figure: milliseconds from its begin, gaps below 20 us of the GPU filled."""
    begin = [span for span in profile.spans if span.name == "step"][-1].begin
    end = profile.window[1]
    busy = union([(a.begin, a.end) for a in profile.activities if a.end > begin], 0.02)
    spans = [span for span in profile.spans if span.begin >= begin and span.name != "step"]
    return {
        "milliseconds": round(end - begin, 3),
        "gpu": [[round(left - begin, 3), round(right - begin, 3)] for left, right in busy],
        "host": [[s.name, round(s.begin - begin, 3), round(s.end - begin, 3)] for s in spans],
    }


def measure(
    trainer: Trainer, tokens: int, names: list[str]
) -> Iterator[tuple[str, Profile, list[float]]]:
    """Yield each setting's profile and the seconds of its steps without the profiler."""
    micro_batches = rollouts(tokens, trainer.vocab_size)
    totals = step_totals([sample for samples in micro_batches for sample in samples])
    for name in names:

        def run(host: Host, name: str = name) -> None:
            train_step(trainer, SETTINGS[name], micro_batches, totals, host)

        for _ in range(WARM_UP):
            run(Host())
        torch.cuda.synchronize()
        seconds = []
        for _ in range(TIMED):
            start = time.perf_counter()
            run(Host())
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        yield name, profiled(run, Host()), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="the last step of each setting, as JSON")
    args = whole_step.parse_arguments(parser)
    trainer, figures = build_trainer(args), {}
    explained = "GPU waited, ms a step; host, median and most; ahead, least and median; calls longer than that"
    for tokens in args.tokens:
        print(
            f"\n{args.model}, {MICRO_BATCHES} micro-batches of {tokens} tokens. Cells: {explained}\n"
        )
        heads = ["setting", "ms a step", "profiled", "GPU idle", *NAMES]
        print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
        kernels = []
        for name, found, seconds in measure(trainer, tokens, list(SETTINGS)):
            print(row(name, found, seconds), flush=True)
            kernels.append(
                f"{name}: {len(found.activities) // PROFILED} launches, ms a step: {found.kernels}"
            )
            figures[f"{args.model}, {tokens}, {name}"] = drawn(found)
        print("", *kernels, sep="\n", flush=True)
    if args.output:
        args.output.write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
