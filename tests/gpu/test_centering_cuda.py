"""Score centering on a GPU: the row passes' kernels and QuACK's products, against float64 loops."""

import pytest
import torch
from torch import Tensor

from megatron_pg.head import Centering, HeadOptions, linear_token_loss
from tests.fast.test_centering_head import SET_WAYS, WEIGHTS, Centered, OverSets, first_scores
from tests.fast.test_distillation_head import WAYS, check

# 1 minus the probability of a head has fewer digits than the probability.
PRECISIONS = {torch.float64: 1e-12, torch.float32: 6e-5, torch.bfloat16: 0.06}
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_values_and_gradients(
    weights: tuple[str, float, float], way: str, dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and weights[0] == "mask":
        pytest.skip("a ratio at a bound of the mask falls on either side")
    problem = Centered(weights, dtype, "cuda")
    check(problem, way, first_scores([WAYS[way](problem)]), PRECISIONS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", SET_WAYS)
@pytest.mark.parametrize("weights", WEIGHTS[:2], ids=str)
def test_values_and_gradients_over_sets(
    weights: tuple[str, float, float], way: str, dtype: torch.dtype
) -> None:
    problem = OverSets(weights, dtype, "cuda")
    check(problem, way, first_scores([SET_WAYS[way](problem)]), PRECISIONS[dtype])


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("use_quack", [False, True])
def test_float32_logits(use_quack: bool, with_entropy: bool) -> None:
    """Among the rows some have no gradient to the log-prob, no head, or neither."""
    if use_quack:
        pytest.importorskip("quack")
    tokens, size, columns, k = 300, 256, 1024, 16
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    weight = (normal(columns, size) / size**0.5).bfloat16()
    hidden = (2 * normal(tokens, size)).bfloat16()
    with torch.no_grad():
        log_p = (hidden.double() @ weight.double().t() / 0.9).log_softmax(1)
        log_q, ids = (log_p + 0.4 * normal(tokens, columns)).topk(k)
        log_q -= log_q.logsumexp(1, keepdim=True) + 0.2
    ids[5:9] = -1
    targets = ids[:, 3].clamp(min=0).clone()
    targets[::2] = torch.arange(0, tokens, 2, device="cuda") % columns
    to_scores = normal(3, tokens).double()
    to_scores[0, 3:7] = 0.0
    to_scores[2, 6:8] = 0.0
    if not with_entropy:
        to_scores[1] = 0.0
    scorer = Centering(ids, log_q)

    def token_loss(log_probs: Tensor, entropy: Tensor, score: Tensor, rows: slice) -> Tensor:
        total = (to_scores[0, rows] * log_probs).sum() + (to_scores[2, rows] * score[0]).sum()
        return total + (to_scores[1, rows] * entropy).sum() if with_entropy else total

    factors = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    options = HeadOptions(
        fp32_logits=True, use_quack=use_quack, with_entropy=with_entropy, temperature=0.9,
        chunk_tokens=128,
    )  # fmt: skip
    loss, *found = linear_token_loss(
        *factors, targets, token_loss, options, defer=True, scorer=scorer
    )
    loss.backward()

    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    log_p = (exact[0] @ exact[1].t() / 0.9).log_softmax(1)
    inside = ids >= 0
    of_head = log_p.gather(1, ids.clamp(min=0))
    p, q = (torch.where(inside, x.detach().exp(), 0.0) for x in (of_head, log_q))
    rho = (1 - q.sum(1)).clamp(min=0) / (1 - p.sum(1)).clamp(min=1e-6)
    value = ((q - rho[:, None] * p) * of_head).sum(1)
    of_target = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    wanted = (to_scores * torch.stack([of_target, entropy, value])).sum()
    wanted.backward()
    assert (found[2][0] - value).abs().max() < 2e-2
    for own, other in zip(factors, exact, strict=True):
        error = (own.grad.double() - other.grad).norm() / other.grad.norm()
        assert error < 4e-3, error


def test_mutant_without_single_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_pg.head import vocabulary_shard

    monkeypatch.setattr(vocabulary_shard.ColumnGradients, "write", lambda *_: None)
    with pytest.raises(AssertionError):
        test_float32_logits(False, False)
