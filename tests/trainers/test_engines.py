"""The loss protocol inside engines' own unmodified code: every logit's gradient against float64 loops."""

import pytest

from megatron_pg.config.versions import has_megatron_training
from tests import oracle
from tests.distributed.launch import run_ranks

from .engines import FOLDERS, Case, a_step, expected, gradients
from .logit_table import TOLERANCE, difference
from .sources import TRAINERS

WITH_CONTEXT = {"nemo_rl": [True]}
"""Engines that run under context parallelism here, packed or not: the others refuse it, or cut nothing themselves."""


def cases(engine: str, context: int = 1) -> list[Case]:
    packings = WITH_CONTEXT[engine] if context > 1 else [True, False]
    return [
        *(Case(engine, mode, pack, context) for mode in oracle.AGGREGATIONS for pack in packings),
        *(Case(engine, mode, True, context, "scale") for mode in oracle.AGGREGATIONS),
        Case(engine, "prompt_mean", True, context, "windows"),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("engine", FOLDERS)
def test_every_logits_gradient_and_none_of_mutants(engine: str, ranks: int) -> None:
    folder = FOLDERS[engine]
    if not (TRAINERS / folder).is_dir() or not has_megatron_training():
        pytest.skip(f"needs {folder}'s source (TRAINERS=<folder with a checkout named {folder}>)")
    step, made = a_step(), cases(engine)
    if ranks > 1 and engine in WITH_CONTEXT:
        made += cases(engine, context=ranks)
    for case, *found in zip(made, *run_ranks(gradients, ranks, step, made), strict=True):
        errors = [difference(gradient, expected(case, step)) for gradient in found]
        print(case, errors)
        if case.mutant:
            assert min(errors) > 20 * TOLERANCE, (case, errors)
        else:
            assert max(errors) <= TOLERANCE, (case, errors)
