"""The plain output layer with float32 logits, against dense float64 products: value, and all
gradients.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_pg.head import factor_gradients, float32_logits, from_hidden
from tests.fast.refusals import assert_refused

TOKENS, HIDDEN, COLUMNS = (3, 2), 24, 10
FLOAT32, BFLOAT16 = 2.0**-22, 2.0**-8
"""Of the sum of the magnitudes of what is added up."""


@dataclass(frozen=True)
class Case:
    """Operands that `dtype` holds exactly, and the gradient of the logits, rounded to it or not."""

    dtype: torch.dtype = torch.bfloat16
    bias: bool = True
    main_grad: bool = True
    exact_gradient: bool = True

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(*TOKENS, HIDDEN, generator=generator).to(self.dtype)
        weight = torch.randn(COLUMNS, HIDDEN, generator=generator).to(self.dtype)
        bias = torch.randn(COLUMNS, generator=generator).to(self.dtype) if self.bias else None
        gradient = torch.randn(*TOKENS, COLUMNS, generator=generator)
        if self.exact_gradient:
            gradient = gradient.to(self.dtype).float()
        return hidden, weight, bias, gradient


Sums = dict[str, tuple[Tensor, Tensor]]
"""Of each tensor its float64 elements, and the sums of the magnitudes of their terms."""


def dense(case: Case) -> Sums:
    hidden, weight, bias, gradient = (
        tensor if tensor is None else tensor.double() for tensor in case.tensors()
    )
    rows, slopes = hidden.reshape(-1, HIDDEN), gradient.reshape(-1, COLUMNS)
    products = {"logits": (rows, weight.T), "hidden": (slopes, weight), "weight": (slopes.T, rows)}
    products["bias"] = torch.ones(1, len(rows)).double(), slopes
    sums = {
        name: (left @ right, left.abs() @ right.abs()) for name, (left, right) in products.items()
    }
    if bias is not None:
        logits, magnitudes = sums["logits"]
        sums["logits"] = logits + bias, magnitudes + bias.abs()
    return sums


def found(case: Case) -> dict[str, Tensor]:
    """Logits and gradients; the weight's is what two calls add to a `main_grad` of 1, halved, where
    there is one.
    """
    hidden, weight, bias, gradient = case.tensors()
    leaves = [each.requires_grad_() for each in (hidden, weight, bias) if each is not None]
    calls = 1
    if case.main_grad:
        calls = 2
        weight.main_grad = torch.ones(weight.shape)
        weight.grad_added_to_main_grad = False
    for _ in range(calls):
        for leaf in leaves:
            leaf.grad = None
        logits = float32_logits(hidden, weight, bias)
        assert logits.shape == (*TOKENS, COLUMNS) and logits.dtype == torch.float32
        logits.backward(gradient)
    assert all(leaf.grad.dtype == case.dtype for leaf in leaves)
    of_weight = weight.grad
    if case.main_grad:
        assert weight.grad_added_to_main_grad
        of_weight = (weight.main_grad - 1) / 2
    return {
        "logits": logits.detach().view(-1, COLUMNS),
        "hidden": hidden.grad.view(-1, HIDDEN),
        "weight": of_weight,
    } | ({} if bias is None else {"bias": bias.grad[None]})


def wrong(case: Case) -> set[str]:
    """What is farther from the exact sums than the roundings that it is allowed."""
    expected = dense(case)
    rounded = {"hidden", "bias"} if case.main_grad else {"hidden", "bias", "weight"}
    far = set()
    for name, values in found(case).items():
        exact, size = expected[name]
        allowed = FLOAT32
        if case.dtype == torch.bfloat16 and (
            name in rounded or (name == "weight" and not case.exact_gradient)
        ):
            allowed = BFLOAT16
        # `main_grad` starts at 1, whose own rounding is no part of the sum.
        if ((values.double() - exact).abs() > allowed * (size + 1)).any():
            far.add(name)
    return far


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("main_grad", [True, False], ids=["main_grad", "no main_grad"])
@pytest.mark.parametrize("exact_gradient", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("chunk_tokens", [4, None])
def test_value_and_gradients_are_exact_but_for_rounding(
    dtype, bias, main_grad, exact_gradient, chunk_tokens, monkeypatch
):
    if chunk_tokens is not None:
        monkeypatch.setattr(from_hidden, "chunk_rows", lambda *_: chunk_tokens)
    assert not wrong(Case(dtype, bias, main_grad, exact_gradient))


def in_the_operands_dtype(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    product = left @ right
    out.add_(product) if add else out.copy_(product)


@pytest.mark.parametrize(
    ("module", "damage"),
    [("from_hidden", {"logits"}), ("factor_gradients", {"weight"})],
    ids=["logits rounded to bfloat16", "gradient of the weight in bfloat16"],
)
def test_mutant_a_product_in_the_dtype_of_its_operands_would_be_seen(module, damage, monkeypatch):
    modules = {"from_hidden": from_hidden, "factor_gradients": factor_gradients}
    monkeypatch.setattr(modules[module], "multiply", in_the_operands_dtype)
    assert wrong(Case()) == damage


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_factor_gets_no_gradient(frozen):
    hidden, weight, _, gradient = Case().tensors()
    expected = dense(Case())
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    (weight if frozen == "hidden" else hidden).requires_grad_()
    float32_logits(hidden, weight).backward(gradient)
    if frozen == "weight":
        assert weight.grad is None and not weight.main_grad.any()
        exact, size = expected["hidden"]
        values = hidden.grad.view(-1, HIDDEN).double()
        assert ((values - exact).abs() <= BFLOAT16 * size).all()
    else:
        assert hidden.grad is None
        exact, size = expected["weight"]
        assert ((weight.main_grad.double() - exact).abs() <= FLOAT32 * size).all()


def test_no_tokens_and_what_does_not_fit():
    weight = torch.ones(COLUMNS, HIDDEN, requires_grad=True)
    logits = float32_logits(torch.ones(0, 1, HIDDEN), weight)
    logits.sum().backward()
    assert logits.shape == (0, 1, COLUMNS) and not weight.grad.any()
    hidden = torch.ones(2, HIDDEN)
    assert_refused("must share one float dtype", float32_logits, hidden.bfloat16(), weight)
    assert_refused("found (2, 3) and", float32_logits, torch.ones(2, 3), weight)
    loss, words = (
        float32_logits(hidden, weight).sum(),
        "float32_logits cannot be differentiated twice",
    )
    again = {"create_graph": True, "error": RuntimeError}
    assert_refused(words, torch.autograd.grad, loss, weight, **again)
