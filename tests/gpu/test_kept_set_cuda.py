"""The kept set on a GPU: the sparse layer's kernels and the gathers from logits, against
float64.
"""

import pytest
import torch
from torch import Tensor

from megatron_pg.head import HeadOptions, Ragged, linear_log_probs_and_entropy
from megatron_pg.head.kept import sparse_layer
from megatron_pg.head.ragged import offsets_of
from tests.fast import test_kept_set as shared

pytest.importorskip("megatron_pg.head.kept.pairs_triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@pytest.fixture(params=[1e-9, 1e9], ids=["sparse", "dense"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(sparse_layer, "_LEAST_DENSE_ROWS", 1)
    monkeypatch.setattr(sparse_layer, "_COLUMNS_OF_A_PAIR", request.param)
    return request.param


@pytest.mark.parametrize("sizes", shared.SIZES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_head(layer: float, sizes: str, dtype: torch.dtype) -> None:
    problem = shared.Problem(sizes, dtype, "cuda")
    # Dense products round their logits to bfloat16.
    rounding = ROUNDING[dtype] * (8 if layer > 1 or sizes != "sets" else 1)
    shared.check_head(problem, problem.head(chunk_tokens=4), rounding)


@pytest.mark.parametrize("sizes", shared.SIZES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_from_logits(sizes: str, dtype: torch.dtype) -> None:
    problem = shared.Problem(sizes, dtype, "cuda")
    log_probs, entropy, gradient = problem.from_logits()
    shared.close(log_probs, problem.of_logits[0], 1e-5)
    shared.close(entropy, problem.of_logits[1], 1e-5)
    shared.close(gradient[:, : shared.VOCAB_SIZE], problem.of_logits[2], ROUNDING[dtype])
    assert (gradient[:, shared.VOCAB_SIZE :] == 0).all()


def gradients(dtype: torch.dtype, kept: Ragged, targets: Tensor, *factors: Tensor) -> list[Tensor]:
    """Log-probs, entropy and the gradients, the weight's in `main_grad`."""
    hidden, weight = (each.detach().to(dtype).requires_grad_() for each in factors)
    weight.main_grad = torch.zeros(
        weight.shape, device="cuda", dtype=torch.promote_types(dtype, torch.float32)
    )
    weight.grad_added_to_main_grad = False
    found = linear_log_probs_and_entropy(
        hidden, weight, targets, HeadOptions(temperature=0.9), kept=kept
    )
    (found[0] @ found[0].detach().sin() + found[1].square().sum()).backward()
    return [*(each.detach() for each in found), hidden.grad, weight.main_grad]


def test_long_sets_and_an_id_that_all_rows_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, rows beyond a tile, and one column of the weight with a pair of every row; the
    same bits each time.
    """
    monkeypatch.setattr(sparse_layer, "_COLUMNS_OF_A_PAIR", 1e-9)
    torch.manual_seed(0)
    tokens, size, columns = 300, 1000, 5003
    hidden = torch.randn(tokens, size, device="cuda").bfloat16()
    weight = (torch.randn(columns, size, device="cuda") / 32).bfloat16()
    order = torch.rand(tokens, columns, device="cuda").argsort(1)
    sizes = 1 + torch.arange(tokens) * 7 % 331
    rows = [
        [17, *(ids[ids != 17][: int(n) - 1]).tolist()] for ids, n in zip(order, sizes, strict=True)
    ]
    kept = Ragged(torch.tensor(sum(rows, []), device="cuda"), offsets_of(sizes))
    targets = torch.tensor([row[len(row) // 2] for row in rows], device="cuda")
    found = gradients(torch.bfloat16, kept, targets, hidden, weight)
    again = gradients(torch.bfloat16, kept, targets, hidden, weight)
    wanted = gradients(torch.float64, kept, targets, hidden, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for each, expected, rounding in zip(found, wanted, (1e-5, 1e-5, 2.0**-8, 1e-5), strict=True):
        shared.close(each, expected.cpu(), rounding)
