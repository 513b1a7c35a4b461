"""The divergence from a teacher on a GPU, against plain float64 loops."""

import pytest
import torch

from tests.fast import test_distillation_head as shared

pytest.importorskip("megatron_pg.head.distill.divergence_triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("teacher", shared.TEACHERS)
@pytest.mark.parametrize("divergence", shared.DIVERGENCES, ids=str)
@pytest.mark.parametrize("way", shared.WAYS)
def test_values_and_gradients(way, divergence, teacher, dtype):
    problem = shared.Problem(divergence, teacher, dtype, "cuda")
    shared.check(problem, way, [shared.WAYS[way](problem)], shared.PRECISIONS[dtype])
