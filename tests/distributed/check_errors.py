"""How far ``megatron-pg check`` stays from its tolerances, by sharding and depth, on a CPU:
`python -m tests.distributed.check_errors --markdown docs/records/check_errors.md`."""

import argparse
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

from .launch import run_ranks
from .models import ModelOptions, Sharding, check_options

SHARDINGS = (
    "one process, TP2, TP2+SP, PP2, PP2 VPP2, CP2, DP2, DP3, CP4, TP2+SP CP2, PP2 VPP2 CP2, CP2 "
    "DP3, "
    "TP8, TP2+SP PP2 CP2, PP8, CP2 DP4, MoE one process, MoE EP2 DP2, MoE CP2 EP2, MoE TP2+SP EP2, "
    "MoE PP2 VPP2 EP2 DP2, MoE TP2+SP CP2 EP4 DP2"
).split(", ")
LAYERS = (2, 8, 16)
COLUMNS = (*("end to end fp32", "tied fp32", "loss only fp32"), *("end to end bf16", "tied bf16"))
LIMITS = {"fp32": 5e-7, "bf16": 2e-2 / 1.5}


def sum_in_order() -> None:
    """Have every weight's gradient be a plain float32 sum in the order of the tokens, as the GEMMs
    of some machines are.
    """
    product = torch.Tensor.matmul

    def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        # Megatron's backward: the transposed gradient of a layer's output times the layer's input.
        if torch.is_grad_enabled() or left.dim() != 2 or left.stride(0) != 1:
            return product(left, right)
        total = left.new_zeros(len(left), right.shape[1])
        for column, row in zip(left.unbind(1), right, strict=True):
            total.addr_(column, row)
        return total

    torch.Tensor.matmul = matmul  # type: ignore[method-assign,assignment]


def largest_errors(name: str, num_layers: int, in_order: bool) -> dict[str, float]:
    """The largest gradient error of each model and dtype; every rank calls it."""
    from megatron_pg.check.step import run_check

    if in_order:
        sum_in_order()
    experts = ModelOptions(mixture_of_experts=name.startswith("MoE"))
    options = check_options(Sharding.named(name), experts)
    worst: dict[str, float] = {}
    for dtype in ("fp32", "bf16"):
        for row in run_check(replace(options, num_layers=num_layers, dtype=dtype)):
            key = f"{row.model} {row.dtype}"
            worst[key] = max(worst.get(key, 0.0), row.gradient_error)
    return worst


def main() -> int:
    """Exit status 1 where an error is more than half its tolerance, or two thirds in bf16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="lines of these shardings; 'MoE ...' too")
    parser.add_argument("--in-order", action="store_true", help=sum_in_order.__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    enable_cpu_runtime()
    from .matrix import versions

    started = time.monotonic()
    table = [
        "| processes | model and sharding | layers | " + " | ".join(COLUMNS) + " |",
        "|---" * (3 + len(COLUMNS)) + "|",
    ]
    print("\n".join(table), flush=True)
    failed = False
    for name, num_layers in itertools.product(arguments.only or SHARDINGS, arguments.layers):
        sharding = Sharding.named(name)
        if num_layers % sharding.num_chunks:
            continue
        errors = run_ranks(
            largest_errors, sharding.world_size, name, num_layers, arguments.in_order
        )[0]
        numbers = " | ".join(f"{errors[column]:.1e}" for column in COLUMNS)
        table.append(f"| {sharding.world_size} | {name} | {num_layers} | {numbers} |")
        failed |= any(not errors[column] <= LIMITS[column.split()[-1]] for column in COLUMNS)
        print(table[-1], flush=True)
    table += ["", f"{versions()}; {time.monotonic() - started:.0f} s on a CPU."]
    print(table[-1])
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join(table) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
