"""The Triton kernels of the divergence through Triton's interpreter; `test_log_probs_triton` starts the process."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_pg.head.distill import teacher
from tests.fast import test_distillation_head as shared

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="run by test_log_probs_triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

if INTERPRETED:
    from megatron_pg.head.distill import divergence_triton


@pytest.mark.parametrize("tile", [4, 32], ids=["many tiles", "one tile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", shared.DIVERGENCES, ids=str)
@pytest.mark.parametrize("way", shared.WAYS)
def test_kernels(way, kind, dtype, tile, monkeypatch):
    monkeypatch.setattr(divergence_triton, "_TILE", tile)
    monkeypatch.setattr(teacher, "divergence_passes", lambda pair: divergence_triton)
    problem = shared.Problem(kind, "hidden", dtype)
    shared.check(problem, way, [shared.WAYS[way](problem)], shared.PRECISIONS[dtype])
