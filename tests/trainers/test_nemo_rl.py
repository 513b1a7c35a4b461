"""The loss protocol inside NeMo-RL's own unmodified code: every logit's gradient against float64
loops.
"""

import pytest

from tests import oracle
from tests.distributed.launch import run_ranks

from .logit_table import TOLERANCE, difference
from .nemo_rl_step import Case, a_step, expected, gradients
from .sources import needs_tree

pytestmark = needs_tree("NeMo-RL")


def cases(context: int = 1) -> list[Case]:
    """Under context parallelism NeMo-RL asserts packed sequences."""
    packings = [True] if context > 1 else [True, False]
    return [
        *(Case(mode, pack, context) for mode in oracle.AGGREGATIONS for pack in packings),
        *(Case(mode, True, context, "scale") for mode in oracle.AGGREGATIONS),
        Case("prompt_mean", True, context, "windows"),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_logits_gradient_and_none_of_mutants(ranks: int) -> None:
    step, made = a_step(), cases()
    if ranks > 1:
        made += cases(context=ranks)
    for case, *found in zip(made, *run_ranks(gradients, ranks, step, made), strict=True):
        errors = [difference(gradient, expected(case, step)) for gradient in found]
        print(case, errors)
        if case.mutant:
            assert min(errors) > 20 * TOLERANCE, (case, errors)
        else:
            assert max(errors) <= TOLERANCE, (case, errors)
