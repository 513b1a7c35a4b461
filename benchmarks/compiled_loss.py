"""Table: `loss/compiled.py` against plain `torch.compile(dynamic=True)` of the same functions.

    python -m benchmarks.compiled_loss [--device cpu] [--rounds 100] [--settings basic gspo]

7,764 response tokens in 8 samples. A row is `policy_loss_from_log_probs`, forward and backward, for
one setting and one way to run the tensor functions in `MicroBatchLoss`:

- operators: no compiler.
- ours: `loss/compiled.py`, a trace of loss and gradient, compiled once per setting.
- plain: `torch.compile(dynamic=True)`, with a second compiled graph in backward.
- plain, grad: with `torch.func.grad_and_value` inside, so that forward computes the gradient.
- tensor guards: "plain, grad" that checks only tensors before a call.

Launches are kernels, copies and fills per micro-batch. Host time is the time until the call
returns, with an empty queue. The first call includes compilation, with empty caches. Recompilations
are new graphs for 20 further micro-batches of different sizes. The difference is the largest
difference of gradients and metrics to operators, relative to the largest value. Times are medians.
On a CPU, a launch is an operator, which is not counted if compiled.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.loss_launches import (
    SETTINGS,
    TOKENS,
    Work,
    launches,
    milliseconds,
    recompiled,
    synchronize,
)
from megatron_pg.loss import compiled
from megatron_pg.loss.compiled import Function, Outputs, Tensors
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.reducer import weighted_sum
from megatron_pg.loss.resolved import resolve

NUM_SAMPLES = 8
OURS = compiled.bind
Bind = Callable[..., Callable[[], Outputs]]


@dataclass
class NoBatch:
    side_channels: dict[str, object] = field(default_factory=dict)


class Plain:
    """A replacement of `compiled.bind` that calls `torch.compile` once per function and setting."""

    def __init__(self, grad_inside: bool = False, tensor_guards: bool = False) -> None:
        self.grad_inside = grad_inside
        guards = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        self.options = {"options": guards} if tensor_guards else {}
        self.programs: dict[Any, Callable[[Tensors], Outputs]] = {}

    def __call__(
        self, function: Any, settings: Any, tensors: Tensors, differentiated: Sequence[str]
    ) -> Callable[[], Outputs]:
        present = {name: x.contiguous() for name, x in tensors.items() if x is not None}
        names = [name for name in differentiated if name in present and self.grad_inside]
        key = function.__func__, settings, tuple(present)
        if key not in self.programs:
            page = page_of(function.__func__, settings)
            page = with_gradient(page, names) if names else page
            self.programs[key] = torch.compile(page, dynamic=True, **self.options)
        program = self.programs[key]
        if not names:
            return lambda: program(present)
        leaves = [present[name] for name in names]
        present = {name: x.detach() for name, x in present.items()}
        return lambda: compiled.Differentiated.apply(lambda: program(present), *leaves)


def page_of(function: Any, settings: Any) -> Function:
    """Bind a function of `MicroBatchLoss` to only settings."""
    loss = MicroBatchLoss.__new__(MicroBatchLoss)
    loss.resolved, loss._reduce = resolve(settings), weighted_sum
    loss.batch = NoBatch()  # type: ignore[assignment]
    page: Function = function.__get__(loss)
    return page


def with_gradient(page: Function, names: Sequence[str]) -> Function:
    """Make the function return its first result's gradients after it."""

    def call(tensors: Mapping[str, Tensor]) -> Outputs:
        def of_leaves(leaves: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor | None]]:
            loss, *others = page({**tensors, **leaves})
            return loss, others

        leaves = {name: tensors[name] for name in names}
        found = torch.func.grad_and_value(of_leaves, has_aux=True)(leaves)
        gradients, (loss, others) = found
        return loss, *(gradients[name] for name in names), *others

    return call


def variants() -> dict[str, Bind]:
    return {
        "operators": lambda function, settings, tensors, names: lambda: function(tensors),
        "ours": OURS,
        "plain": Plain(),
        "plain, grad": Plain(grad_inside=True),
        "tensor guards": Plain(grad_inside=True, tensor_guards=True),
    }


def results_of(work: Work) -> list[Tensor]:
    """Return the metrics and gradients of one call, float64 on the host."""
    metrics: Any = work.loss()
    found = [metrics.pairs, metrics.maxima, work.log_probs.grad, work.entropy.grad]
    return [x.detach().double().cpu() for x in found if x is not None]


def largest_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    if len(found) != len(wanted):
        return float("inf")
    pairs = zip(found, wanted, strict=True)
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


def measured(
    setting: str, device: str, rounds: int, wanted: list[Tensor], is_compiled: bool
) -> str:
    """Return a row's cells after setting and variant."""
    from torch._dynamo.utils import counters

    work = Work(NUM_SAMPLES, TOKENS, setting, device)
    start = time.perf_counter()
    found = results_of(work)
    first = time.perf_counter() - start
    wanted = wanted or found
    breaks = sum(counters["graph_break"].values())
    host, whole = milliseconds(work.loss, device, rounds)
    count = "" if is_compiled and device == "cpu" else str(launches(work.loss, device)[0])
    again = recompiled(lambda n, tokens: Work(n, tokens, setting, device)) if is_compiled else 0
    cells = f"{count} | {host:.2f} | {whole:.2f} | {first:.1f} | {again} | {breaks} | "
    return cells + f"{largest_difference(found, wanted):.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--settings", nargs="+", default=["basic", "everything", "gspo"])
    parser.add_argument("--variants", nargs="+", default=list(variants()))
    parser.add_argument("--seconds", type=float, default=280, help="no row starts later")
    args = parser.parse_args()
    device, begin = args.device, time.perf_counter()
    torch._inductor.config.force_disable_caches = True
    compiled.DEVICES = {device}
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {TOKENS} response tokens, {NUM_SAMPLES} samples\n")
    heads = "| setting | as | launches | host ms | done ms | first call s | recompilations |"
    print(f"{heads} graph breaks | difference |\n|---|---|---|---|---|---|---|---|---|")
    # Initialize CUDA and single operators' kernels, once per process.
    compiled.bind = variants()["operators"]  # type: ignore[assignment]
    for setting in args.settings:
        Work(NUM_SAMPLES, TOKENS, setting, device).loss()
    reasons = set[str]()
    for setting in args.settings:
        assert setting in SETTINGS
        compiled.bind = variants()["operators"]  # type: ignore[assignment]
        wanted = results_of(Work(NUM_SAMPLES, TOKENS, setting, device))
        for name in args.variants:
            if time.perf_counter() - begin > args.seconds:
                print(f"| {setting} | {name} | not run: {args.seconds:.0f} s have passed |")
                continue
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
            compiled._programs.clear()
            compiled.bind = variants()[name]  # type: ignore[assignment]
            try:
                cells = measured(setting, device, args.rounds, wanted, name != "operators")
            except Exception as error:
                cells = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]} |"
            print(f"| {setting} | {name} | {cells}", flush=True)
            reasons |= set(torch._dynamo.utils.counters["graph_break"])
            synchronize(device)
    for reason in sorted(reasons):
        print(f"\ngraph break: {' '.join(reason.split())[:300]}")


if __name__ == "__main__":
    main()
