"""The Triton kernels of the sparse layer and of the divergence, through Triton's interpreter."""

import pytest
import torch

from megatron_pg.head import VocabularyShard
from megatron_pg.head.distill import teacher
from megatron_pg.head.kept import sparse_layer
from tests.fast import test_distillation_head as distillation
from tests.fast import test_kept_set as kept_set
from tests.fast.triton_interpreter import INTERPRETED, MARKS

pytestmark = MARKS

if INTERPRETED:
    from megatron_pg.head.distill import divergence_triton
    from megatron_pg.head.kept import pairs_triton


@pytest.mark.parametrize("tile", [4, 32], ids=["many tiles", "one tile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", distillation.DIVERGENCES, ids=str)
@pytest.mark.parametrize("way", distillation.WAYS)
def test_divergence(way, kind, dtype, tile, monkeypatch):
    monkeypatch.setattr(divergence_triton, "_TILE", tile)
    monkeypatch.setattr(teacher, "choose", lambda *_: divergence_triton)
    problem = distillation.Problem(kind, "hidden", dtype)
    ranks = [distillation.WAYS[way](problem)]
    distillation.check(problem, way, ranks, distillation.PRECISIONS[dtype])


@pytest.mark.parametrize("sizes", kept_set.SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [(2, 4, 1), (16, 32, 1)], ids=["many tiles", "one tile"])
def test_sparse_layer(tile, dtype, sizes, monkeypatch):
    for name in ("_LOGITS_TILE", "_HIDDEN_TILE", "_WEIGHT_TILE"):
        monkeypatch.setattr(pairs_triton, name, tile)
    monkeypatch.setattr(pairs_triton, "_WEIGHT_PROGRAMS", 3)
    monkeypatch.setattr(sparse_layer, "_COLUMNS_OF_A_PAIR", 1e-9)
    monkeypatch.setattr(sparse_layer, "choose", lambda *_: pairs_triton)
    problem = kept_set.Problem(sizes, dtype)
    rounding = kept_set.PRECISIONS[dtype] * (1 if sizes == "sets" else 6)
    kept_set.check_head(problem, problem.head(chunk_tokens=4), rounding)


def test_columns_of_another_rank_are_left_alone(monkeypatch):
    """The middle shard of three: pairs on either side of it are not read, and their columns get no
    gradient.
    """
    monkeypatch.setattr(pairs_triton, "_WEIGHT_PROGRAMS", 3)
    problem = kept_set.Problem("sets")
    shard = VocabularyShard(start=7, columns=7, vocab_size=21, group=None)
    pairs = kept_set.kept_set.KeptPairs.build(
        problem.sets, problem.targets, shard, torch.tensor(kept_set.TEMPERATURE)
    )
    weight = problem.weight[7:15].clone()
    weight[7] = float("nan")  # padding
    logits = pairs_triton.pair_logits(problem.hidden, weight, pairs)
    expected = (problem.hidden[pairs.rows] * weight[pairs.columns]).sum(1)
    assert torch.equal(logits == -torch.inf, ~pairs.is_here)
    torch.testing.assert_close(logits[pairs.is_here], expected[pairs.is_here])
    gradient = torch.where(pairs.is_here, torch.randn(len(logits)), 0.0)
    found, wanted = (torch.ones(8, kept_set.HIDDEN) for _ in range(2))
    pairs_triton.add_weight_gradient(gradient, problem.hidden, pairs, found)
    kept_set.kept_set.add_weight_gradient(gradient, problem.hidden, pairs, wanted)
    torch.testing.assert_close(found, wanted)
    assert (found[7] == 1).all()
