"""The Triton kernels of the sparse layer through Triton's interpreter; `test_log_probs_triton` starts the process."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_pg.head import VocabularyShard
from megatron_pg.head.kept import sparse_layer
from tests.fast import test_kept_set as shared

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="run by test_log_probs_triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

if INTERPRETED:
    from megatron_pg.head.kept import pairs_triton


@pytest.mark.parametrize("sizes", shared.SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [(2, 4), (16, 32)], ids=["many tiles", "one tile"])
def test_kernels(tile, dtype, sizes, monkeypatch):
    for name in ("_LOGITS_TILE", "_HIDDEN_TILE", "_WEIGHT_TILE"):
        monkeypatch.setattr(pairs_triton, name, tile)
    monkeypatch.setattr(pairs_triton, "_WEIGHT_PROGRAMS", 3)
    monkeypatch.setattr(sparse_layer, "_COLUMNS_OF_A_PAIR", 1e-9)
    monkeypatch.setattr(sparse_layer, "pair_products", lambda hidden: pairs_triton)
    problem = shared.Problem(sizes, dtype)
    rounding = shared.PRECISIONS[dtype] * (1 if sizes == "sets" else 6)
    shared.check_head(problem, problem.head(chunk_tokens=4), rounding)


def test_columns_of_another_rank_are_left_alone(monkeypatch):
    """The middle shard of three: pairs on either side of it are not read, and their columns get no gradient."""
    monkeypatch.setattr(pairs_triton, "_WEIGHT_PROGRAMS", 3)
    problem = shared.Problem("sets")
    shard = VocabularyShard(start=7, columns=7, vocab_size=21, group=None)
    pairs = shared.kept_set.KeptPairs.build(
        problem.sets, problem.targets, shard, torch.tensor(shared.TEMPERATURE)
    )
    weight = problem.weight[7:15].clone()
    weight[7] = float("nan")  # padding
    logits = pairs_triton.pair_logits(problem.hidden, weight, pairs)
    expected = (problem.hidden[pairs.rows] * weight[pairs.columns]).sum(1)
    assert torch.equal(logits == -torch.inf, ~pairs.is_here)
    torch.testing.assert_close(logits[pairs.is_here], expected[pairs.is_here])
    gradient = torch.where(pairs.is_here, torch.randn(len(logits)), 0.0)
    found, wanted = (torch.ones(8, shared.HIDDEN) for _ in range(2))
    pairs_triton.add_weight_gradient(gradient, problem.hidden, pairs, found)
    shared.kept_set.add_weight_gradient(gradient, problem.hidden, pairs, wanted)
    torch.testing.assert_close(found, wanted)
    assert (found[7] == 1).all()
