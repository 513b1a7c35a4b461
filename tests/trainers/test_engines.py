"""The loss protocol inside engines' own unmodified code: every logit's gradient against float64 loops."""

import pytest

from megatron_pg.config.versions import has_megatron_training
from tests import oracle
from tests.distributed.launch import run_ranks

from .engines import FOLDERS, Case, a_step, expected, gradients
from .logit_table import TOLERANCE, difference
from .sources import TRAINERS


def cases(engine: str) -> list[Case]:
    return [
        *(Case(engine, mode, packed) for mode in oracle.AGGREGATIONS for packed in (True, False)),
        *(Case(engine, mode, mutant="scale") for mode in oracle.AGGREGATIONS),
        Case(engine, "prompt_mean", mutant="windows"),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("engine", FOLDERS)
def test_every_logits_gradient_and_none_of_mutants(engine: str, ranks: int) -> None:
    folder = FOLDERS[engine]
    if not (TRAINERS / folder).is_dir() or not has_megatron_training():
        pytest.skip(f"needs {folder}'s source (TRAINERS=<folder with a checkout named {folder}>)")
    step = a_step()
    for case, *found in zip(
        cases(engine), *run_ranks(gradients, ranks, step, cases(engine)), strict=True
    ):
        errors = [difference(gradient, expected(case, step)) for gradient in found]
        if case.mutant:
            assert min(errors) > 20 * TOLERANCE, (case, errors)
        else:
            assert max(errors) <= TOLERANCE, (case, errors)
