"""The fused head's products of exponentials with QuACK, against dense float64 and against our own
kernels.
"""

import math
import warnings

import pytest
import torch
from torch import Tensor

from megatron_pg.head import HeadOptions, linear_token_loss
from tests.gpu import errors, exact_head, waits_refused

pytest.importorskip("quack")
exponentials = pytest.importorskip("megatron_pg.head.hopper.exponentials")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
# Exponentials are rounded once, as the gradient of float32 logits is.
EXACT = 3e-3


class Problem:
    def __init__(self, tokens: int, size: int, columns: int, entropy_coef: float) -> None:
        torch.manual_seed(1)
        self.weight = (torch.randn((columns, size), device="cuda") / size**0.5).bfloat16()
        self.targets = torch.randint(0, columns, (tokens,), device="cuda")
        noise = torch.randn((tokens, size), device="cuda")
        self.hidden = (10 * self.weight[self.targets].float() + noise).bfloat16()
        self.targets[::3] = torch.randint_like(self.targets[::3], columns)
        self.advantages = torch.randn(tokens, device="cuda")
        self.entropy_coef = entropy_coef

    def token_loss(self, log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        part = self.advantages[rows].to(log_probs)
        value = part * (0.1 * log_probs).exp()
        if self.entropy_coef:
            value = value - self.entropy_coef * entropy
        return value.sum() / len(self.targets)

    def found(self, *, defer: bool = True, rows: int | None = None, **options: object):
        hidden = self.hidden.clone().requires_grad_()
        weight = self.weight.clone().requires_grad_()
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight).float(), False
        options |= {"temperature": 0.9, "with_entropy": bool(self.entropy_coef)}
        settings = HeadOptions(fp32_logits=True, **options)
        outputs = linear_token_loss(
            hidden, weight, self.targets, self.token_loss, settings, gradient_rows=rows, defer=defer
        )
        outputs[0].backward(torch.tensor(3.3, device="cuda"))
        return (*(each.detach() for each in outputs), hidden.grad, weight.main_grad)

    def wanted(self) -> list[Tensor]:
        inputs = (self.hidden, self.weight, self.targets, self.token_loss)
        return exact_head(inputs, torch.tensor(3.3, device="cuda"), 0.9)


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each first product with QuACK."""
    rows, plain = [], exponentials.ExponentialProducts.first_product

    def counted(*args: object, **settings: object) -> object:
        found = plain(*args, **settings)  # type: ignore[arg-type]
        rows.append(len(found.targets))
        return found

    monkeypatch.setattr(exponentials.ExponentialProducts, "first_product", counted)
    return rows


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize(
    "tokens, size, columns",
    [(700, 256, 3840), (256, 192, 4096), (300, 1024, 128256)],
    ids=["ragged rows", "whole tiles", "many tiles"],
)
def test_against_float64_and_our_own_kernels(tokens, size, columns, entropy_coef, used):
    problem = Problem(tokens, size, columns, entropy_coef)
    wanted = problem.wanted()
    found = problem.found()
    assert used == [tokens]
    assert entropy_coef or found[2].isnan().all()
    values = (0, 1, 2) if entropy_coef else (0, 1)
    of_values = errors([found[i] for i in values], [wanted[i] for i in values])
    assert max(of_values) <= 1e-5, of_values
    assert max(errors(found[3:], wanted[3:])) <= EXACT, errors(found[3:], wanted[3:])
    own = problem.found(use_quack=False)
    assert used == [tokens]
    assert max(errors(own[3:], found[3:])) <= 2 * EXACT, errors(own[3:], found[3:])


@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_chunks_and_rows_without_gradient(entropy_coef, defer, used):
    problem = Problem(700, 256, 3840, entropy_coef)
    problem.advantages[500:] = 0
    rows, sizes = (None, [256, 256, 188]) if entropy_coef else (500, [256, 244, 200])
    found = problem.found(defer=defer, rows=rows, chunk_tokens=256)
    assert used == sizes
    wanted = problem.wanted()
    # Rounded to bfloat16 again where the loss is not deferred, after the gradient that arrives:
    # 1.7e-3 of a random vector.
    bound = EXACT if defer else math.hypot(EXACT, 1.7e-3)
    assert max(errors(found[3:], wanted[3:])) <= bound, errors(found[3:], wanted[3:])


@pytest.mark.parametrize(
    "name", ["write_exponentials", "write_hidden_gradient", "add_weight_gradient"]
)
def test_a_product_that_fails_hands_over_to_our_own_kernels(name, used, monkeypatch):
    problem, products = Problem(700, 256, 3840, 0.0), exponentials._products
    wanted, calls = problem.wanted(), []
    module = products(exponentials._installed())
    plain = getattr(module, name)

    def failing(*args: object, **settings: object) -> None:
        calls.append(name)
        if len(calls) > 1:
            raise RuntimeError("no kernel")
        plain(*args, **settings)

    monkeypatch.setattr(module, name, failing)
    monkeypatch.setattr(exponentials, "_failures", [])
    exponentials._say.cache_clear()
    with pytest.warns(UserWarning, match="no kernel"):
        found = problem.found(chunk_tokens=256)
    assert max(errors(found[3:], wanted[3:])) <= EXACT, errors(found[3:], wanted[3:])
    assert len(calls) == 2
    found = problem.found(chunk_tokens=256)
    assert len(calls) == 2 and max(errors(found[3:], wanted[3:])) <= EXACT


def test_it_does_not_synchronise(used: list[int]) -> None:
    problem = Problem(700, 256, 3840, 0.0)
    problem.found()
    problem.weight, problem.hidden = problem.weight.clone(), problem.hidden.clone()
    scale = torch.tensor(3.3, device="cuda")
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight).float(), False
    with waits_refused():
        settings = HeadOptions(temperature=0.9, with_entropy=False, fp32_logits=True)
        inputs = (hidden, weight, problem.targets, problem.token_loss)
        loss, *_ = linear_token_loss(*inputs, settings, defer=True)
        loss.backward(scale)
    assert used == [700, 700]


def test_what_it_does_not_take_is_said_once_and_computed(used: list[int]) -> None:
    problem = Problem(100, 256, 3841, 0.0)
    exponentials._say.cache_clear()
    with pytest.warns(UserWarning, match="multiple of 128 columns.* found 3841"):
        found = problem.found()
    assert max(errors(found[3:], problem.wanted()[3:])) <= EXACT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem.found()
    assert not used
