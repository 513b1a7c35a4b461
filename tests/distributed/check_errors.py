"""How far ``megatron-pg check`` stays from its tolerances, by sharding and depth, on a CPU:
`python -m tests.distributed.check_errors --markdown docs/records/check_errors.md`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .launch import run_ranks

SHORT = {
    "TP": "--tensor-model-parallel-size",
    "PP": "--pipeline-model-parallel-size",
    "VPP": "--virtual-pipeline-model-parallel-size",
    "CP": "--context-parallel-size",
    "EP": "--expert-model-parallel-size",
}
SHARDINGS: list[tuple[int, str]] = [
    (1, ""),
    (2, "TP2"),
    (2, "TP2+SP"),
    (2, "PP2"),
    (2, "PP2 VPP2"),
    (2, "CP2"),
    (2, "DP2"),
    (3, "DP3"),
    (4, "CP4"),
    (4, "TP2+SP CP2"),
    (4, "PP2 VPP2 CP2"),
    (6, "CP2 DP3"),
    (8, "TP8"),
    (8, "TP2+SP PP2 CP2"),
    (8, "PP8"),
    (8, "CP2 DP4"),
]
EXPERT_SHARDINGS: list[tuple[int, str]] = [
    (1, ""),
    (2, "EP2 DP2"),
    (2, "CP2 EP2"),
    (2, "TP2+SP EP2"),
    (4, "PP2 VPP2 EP2 DP2"),
    (8, "TP2+SP CP2 EP4 DP2"),
]
LAYERS = (2, 8, 16)


@dataclass(frozen=True)
class Line:
    """One sharding and depth."""

    processes: int
    sharding: str
    experts: bool
    layers: int

    @property
    def flags(self) -> list[str]:
        """Those of the command, without device and dtype."""
        flags = ["--num-layers", str(self.layers)]
        if self.experts:
            flags += ["--num-experts", "4"]
        for part in self.sharding.split():
            name = part.rstrip("0123456789") if "+" not in part else "TP"
            if name == "DP":
                continue
            flags += [SHORT[name], part.removesuffix("+SP").removeprefix(name)]
            if part.endswith("+SP"):
                flags.append("--sequence-parallel")
        return flags

    @property
    def exists(self) -> bool:
        """Whether the layers fill the pipeline."""
        sizes = {part.rstrip("0123456789"): part for part in self.sharding.split()}
        chunks = 1
        for name in ("PP", "VPP"):
            chunks *= int(sizes.get(name, f"{name}1").removeprefix(name))
        return self.layers % chunks == 0

    def __str__(self) -> str:
        return f"{'MoE ' if self.experts else ''}{self.sharding or 'one process'}"


def lines() -> list[Line]:
    """Every line of the table."""
    every = [
        Line(processes, sharding, experts, layers)
        for experts, shardings in ((False, SHARDINGS), (True, EXPERT_SHARDINGS))
        for processes, sharding in shardings
        for layers in LAYERS
    ]
    return [line for line in every if line.exists]


def largest_errors(flag_sets: list[list[str]]) -> list[dict[str, float]]:
    """The largest gradient error of each model and dtype; every rank calls it."""
    from megatron_pg.check.options import parse_options
    from megatron_pg.check.step import run_check

    found = []
    for flags in flag_sets:
        worst: dict[str, float] = {}
        for dtype in ("fp32", "bf16"):
            options, _ = parse_options(["--device", "cpu", "--dtype", dtype, *flags])
            for row in run_check(options):
                key = f"{row.model} {row.dtype}"
                worst[key] = max(worst.get(key, 0.0), row.gradient_error)
        found.append(worst)
    return found


def measure(chosen: list[Line]) -> Iterator[tuple[Line, dict[str, float]]]:
    """One launch for each sharding."""
    for head in dict.fromkeys((line.processes, line.sharding, line.experts) for line in chosen):
        same = [each for each in chosen if (each.processes, each.sharding, each.experts) == head]
        flags = [each.flags for each in same]
        errors = run_ranks(largest_errors, head[0], flags)[0]
        yield from zip(same, errors, strict=True)


COLUMNS = (*("end to end fp32", "tied fp32", "loss only fp32"), *("end to end bf16", "tied bf16"))
LIMITS = {"fp32": 5e-7, "bf16": 2e-2 / 1.5}


def main() -> int:
    """Exit status 1 where an error is more than half its tolerance, or two thirds in bf16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="lines of these shardings; 'MoE ...' too")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    from .matrix import versions

    started = time.monotonic()
    table = [
        "| processes | model and sharding | layers | " + " | ".join(COLUMNS) + " |",
        "|---" * (3 + len(COLUMNS)) + "|",
    ]
    print("\n".join(table), flush=True)
    failed = False
    chosen = [
        each
        for each in lines()
        if each.layers in arguments.layers and (not arguments.only or str(each) in arguments.only)
    ]
    for line, errors in measure(chosen):
        numbers = " | ".join(f"{errors[column]:.1e}" for column in COLUMNS)
        table.append(f"| {line.processes} | {line} | {line.layers} | {numbers} |")
        failed |= any(not errors[column] <= LIMITS[column.split()[-1]] for column in COLUMNS)
        print(table[-1], flush=True)
    table += ["", f"{versions()}; {time.monotonic() - started:.0f} s on a CPU."]
    print(table[-1])
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join(table) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
