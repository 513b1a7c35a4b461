"""Runs `megatron-pg check` under each breakage of Megatron, and says which are missed.

test_breakages.py runs one aggregation of each row, in one loss mode if both are alike, of models
with one layer per chunk. All rows, of all groups or of one, with the diagnosis of those that
failed:

    python -m tests.distributed.break_check [--group "TP2 SP"] [--breakage "part"] [--words]

On the GPUs of a job of as many processes as the group has:

    torchrun --nproc-per-node 2 -m tests.distributed.break_check --group "TP2 SP" --device cuda
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pg.check.job import Launch, joined, prepare
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

from .breakage import FAMILY, GROUPS, PER_MICRO_BATCH, PER_TOKEN, Breakage
from .launch import run_ranks

UNBROKEN = "unbroken"


@dataclass(frozen=True)
class Found:
    label: str
    passed: bool
    words: str


def rows_of_breakages(
    flags: Sequence[str], group: str, part: str = "", *, everything: bool = False
) -> dict[str, list[Found]]:
    """The rows of a check without a breakage, and under each of a group's; every rank of its
    processes calls it.

    Args:
        flags: of `megatron-pg check`.
        part: a regular expression, found in the names of the breakages.
        everything: whether to run all aggregations, of a model with more than one layer a chunk.
    """
    if "cuda" not in flags:
        enable_cpu_runtime()
    from megatron_pg.check import step as run
    from megatron_pg.check.options import parse_options

    options, _ = parse_options(flags)
    if not everything:
        options = replace(options, num_layers=options.num_chunks)
    found = {}
    known = remembered_references(run._references)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "initialize_groups", remembered_groups(run.initialize_groups))
        if not everything:
            patch.setattr(run, "AGGREGATIONS", {"sample_mean": run.AGGREGATIONS["sample_mean"]})
        with pytest.MonkeyPatch.context() as unbroken:
            unbroken.setattr(run, "_references", known)
            found[UNBROKEN] = described(run.run_check(options), options)
        for breakage in family():
            if breakage.group != group or not re.search(part, breakage.name):
                continue
            with pytest.MonkeyPatch.context() as broken:
                if breakage.is_around_the_model:
                    broken.setattr(run, "_references", known)
                if not everything:
                    run_what_concerns(breakage, run, broken)
                breakage.apply(broken)
                found[breakage.name] = described(run.run_check(options), options)
    return found


def run_what_concerns(breakage: Breakage, run: Any, patch: pytest.MonkeyPatch) -> None:
    """Leaves out the rows of a check that a breakage does not concern."""
    cases_of = run.cases_of

    def concerned(model: str, options: Any, names: Any, per_token: bool) -> list[Any]:
        rows = cases_of(model, options, names, per_token)
        return [row for row in rows if breakage.concerns(model, row.case.name, per_token)]

    models = {name: run.MODELS[name] for name in run.MODELS if breakage.concerns(name, "gradient")}
    patch.setattr(run, "MODELS", models)
    patch.setattr(run, "cases_of", concerned)


def family() -> list[Breakage]:
    """All breakages; it imports Megatron."""
    for name in ("attention", "layers", "reductions", "schedules"):
        importlib.import_module(f"tests.distributed.breakages_of_{name}")
    return list(FAMILY.values())


def remembered_groups(initialize: Callable[..., None]) -> Callable[..., None]:
    """Megatron's process groups, made once for the same arguments: gloo never gives a group's
    threads back.
    """
    from megatron.core import parallel_state

    known: dict[str, dict[str, Any]] = {}

    def recall(*args: Any, **keywords: Any) -> None:
        key, state = repr((args, keywords)), vars(parallel_state)
        if key not in known:
            initialize(*args, **keywords)
            known[key] = {name: value for name, value in state.items() if name.isupper()}
        state.update(known[key])

    return recall


def remembered_references(references: Callable[..., Any]) -> Callable[..., Any]:
    """The references of a check, made once for the same options and run."""
    known: dict[str, Any] = {}

    def recall(options: Any, runs: Sequence[Any]) -> list[Any]:
        keys = [repr((options, run)) for run in runs]
        if not known.keys() >= {*keys}:
            known.update(zip(keys, references(options, runs), strict=True))
        return [known[key] for key in keys]

    return recall


def described(rows: Sequence[Any], options: Any) -> list[Found]:
    from megatron_pg.check.report import diagnoses

    modes = (PER_MICRO_BATCH, PER_TOKEN)
    return [
        Found(
            f"{row.model} {row.what} {row.aggregation} {modes[row.calculate_per_token_loss]}",
            row.passed,
            words,
        )
        for row, words in zip(rows, diagnoses(rows, options, dist.get_world_size()), strict=True)
    ]


def problems_of(breakage: Breakage, rows: Sequence[Found]) -> list[str]:
    """What is missed, or fails without being concerned; nothing where the check is right about the
    breakage.
    """
    failed = [row for row in rows if not row.passed]
    is_seen = any(re.search(breakage.fails, row.label) for row in failed)
    return [
        *[f"missed: no row of {breakage.fails!r} fails"] * (not is_seen),
        *(f"{row.label!r} fails without words" for row in failed if not row.words),
        *(
            f"{row.label!r} fails, which it does not concern"
            for row in failed
            if re.search(breakage.passes, row.label)
        ),
    ]


def problems_of_group(
    flags: Sequence[str],
    group: str,
    part: str = "",
    everything: bool = False,
    prints_words: bool = False,
) -> tuple[int, list[str]]:
    """How many breakages were run, and their problems; every rank of the group's processes calls
    it.
    """
    found = rows_of_breakages(flags, group, part, everything=everything)
    if prints_words and dist.get_rank() == 0:
        for name, rows in found.items():
            print(f"\n{group}: {name}")
            print(
                *(f"    {row.label}: {'PASS' if row.passed else row.words}" for row in rows),
                sep="\n",
            )
    problems = [
        f"{UNBROKEN}: {row.label} fails: {row.words}"
        for row in found.pop(UNBROKEN)
        if not row.passed
    ]
    for name, rows in found.items():
        problems += [f"{name}: {problem}" for problem in problems_of(FAMILY[name], rows)]
    return len(found), problems


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.break_check")
    parser.add_argument("--group", choices=GROUPS, action="append")
    parser.add_argument("--breakage", default="")
    parser.add_argument("--words", action="store_true", help="Print what is said of failed rows.")
    parser.add_argument("--one-aggregation", action="store_true", help="As in CI.")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    launch, is_rank = Launch.from_environment(), "WORLD_SIZE" in os.environ
    if is_rank:
        prepare(launch, args.device)
    failed = False
    for group in args.group or GROUPS:
        processes, flags = GROUPS[group]
        task = (["--device", args.device, *flags.split()], group, args.breakage)
        task = (*task, not args.one_aggregation, args.words)
        if is_rank:
            with joined(launch, args.device):
                count, problems = problems_of_group(*task)
        else:
            count, problems = run_ranks(problems_of_group, processes, *task)[0]
        failed |= bool(problems)
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"\n{group}: {count} breakages, {len(problems)} problems")
            print(*problems, sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
