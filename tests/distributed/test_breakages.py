"""`megatron-pg check` against ways of breaking Megatron: each is seen, and named for what it is."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

from .break_check import family, problems_of_group
from .breakage import GROUPS
from .launch import run_ranks

FLAGS = "--device cpu --num-layers 1 --num-experts 4 --mtp-num-layers 1"


@pytest.mark.parametrize("group", GROUPS)
def test_breakages_are_seen_and_named(group: str) -> None:
    processes, flags = GROUPS[group]
    ranks = run_ranks(problems_of_group, processes, ["--device", "cpu", *flags.split()], group)
    assert all(rank == ranks[0] for rank in ranks), "the ranks find different things"
    count, problems = ranks[0]
    assert count > 0 and problems == []


def references(mistakes: tuple[str, ...]) -> list[list[Any]]:
    enable_cpu_runtime()
    from megatron_pg.check import step
    from megatron_pg.check.options import parse_options

    from .breakages_of_attention import each_attention

    mistake_of = {
        "none": [],
        "all around the model": [each.apply for each in family() if each.is_around_the_model],
        "attention": [each_attention(lambda attend, *inputs: 2.0 * attend(*inputs))],
    }
    options, _ = parse_options(FLAGS.split())
    step.initialize_groups(options, sharded=False)
    tasks = [
        (replace(options, **model.changes), runs)
        for name, model in step.MODELS.items()
        for mode in (False, True)
        if model.is_run(options)
        and (runs := [*step.cases_of(name, options, ["sample_mean"], mode)])
    ]
    found = []
    for mistake in mistakes:
        with pytest.MonkeyPatch.context() as patch:
            for apply in mistake_of[mistake]:
                apply(patch)
            found.append([row for task in tasks for row in step._references(*task)])
    return found


def test_the_reference_is_the_same_under_all_breakages_around_the_model() -> None:
    """So that they share one. A mistake of the attention, which it calls, changes it."""
    right, around, attention = run_ranks(
        references, 2, ("none", "all around the model", "attention")
    )[0]

    def is_right(rows: list[Any]) -> bool:
        return all(
            row.loss == reference.loss
            and all(map(torch.equal, row.gradients.values(), reference.gradients.values()))
            for row, reference in zip(rows, right, strict=True)
        )

    assert is_right(around) and not is_right(attention)
