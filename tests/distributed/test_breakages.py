"""`megatron-pg check` against ways of breaking Megatron: each is seen."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pg.config.versions import megatron_core_version
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

from .break_check import family, problems_of_group
from .breakage import GROUPS
from .launch import run_ranks

HAS_MULTI_TOKEN = megatron_core_version() >= (0, 19)
FLAGS = "--device cpu --num-layers 1 --num-experts 4" + " --mtp-num-layers 1" * HAS_MULTI_TOKEN


ONE_OF_EACH_CLASS = {
    "CP2": "rotary positions are not those of the context|reduced without context|token count is "
    "not reduced over context",
    "TP2 SP": "targets are one id off|input gradients of columns|sequence parallel gradients are "
    "not",
    "DP2": "ignores the loss scale|learning rate is doubled",
}
"""Breakages of attention, vocabulary, layers, replicas, reductions, counts, schedule and optimizer,
by group."""


@pytest.mark.parametrize("group", ONE_OF_EACH_CLASS)
def test_one_breakage_of_each_class_is_seen(group: str) -> None:
    part = ONE_OF_EACH_CLASS[group]
    assert_seen(group, part, count=len(part.split("|")))


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
def test_breakages_are_seen(group: str) -> None:
    if "multi-token" in group and not HAS_MULTI_TOKEN:
        pytest.skip("multi-token prediction needs megatron-core 0.19")
    assert_seen(group, "")


def assert_seen(group: str, part: str, count: int = 0) -> None:
    processes, flags = GROUPS[group]
    words = ["--device", "cpu", *flags.split()]
    ranks = run_ranks(problems_of_group, processes, words, group, part)
    assert all(rank == ranks[0] for rank in ranks), "the ranks find different things"
    found, problems = ranks[0]
    assert found == count if count else found > 0
    assert problems == []


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


@pytest.mark.full
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
