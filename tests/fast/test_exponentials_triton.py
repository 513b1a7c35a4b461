"""Rows as exponentials through Triton's interpreter, the three products in plain torch.

On a GPU `tests/gpu/test_exponentials_cuda.py` has QuACK's products.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head import HeadOptions, linear_token_loss, output_layer
from megatron_pg.head.factor_gradients import FactorGradients
from megatron_pg.head.vocabulary_shard import VocabularyShard
from tests.distributed.launch import run_ranks
from tests.fast.triton_interpreter import INTERPRETED, MARKS

pytestmark = MARKS
if INTERPRETED:
    from megatron_pg.head import rows_triton
    from megatron_pg.head.hopper import exponentials

HIDDEN, STRIP = 24, 64
# The interpreter cuts off what a GPU rounds to bfloat16: 3.4e-3 of a random vector, where rounding
# leaves 1.7e-3.
ROUNDING = 8e-3


def write_exponentials(hidden, weight, targets, temperature, out, **outputs: Tensor) -> None:
    logits = hidden.float() @ weight.float().t()
    binary = logits / temperature * math.log2(math.e)
    tiles = binary.unflatten(1, (outputs["offsets"].shape[1], -1))
    outputs["offsets"].copy_(tiles.amax(2).round())
    exponents = tiles - outputs["offsets"][..., None]
    outputs["sums"].copy_(exponents.exp2().sum(2))
    if outputs["dots"] is not None:
        outputs["dots"].copy_((exponents.exp2() * exponents).sum(2))
    out.copy_(exponents.exp2().flatten(1))
    for row, target in enumerate(targets.tolist()):
        if 0 <= target < len(weight):
            outputs["target_logits"][row] = logits[row, target]


def write_hidden_gradient(left, strips, factors, weight, out) -> None:
    scaled = left.float() * strips.t().float().repeat_interleave(STRIP, 1)
    out.copy_(factors[:, None] * (scaled @ weight.float()))


def add_weight_gradient(left, strips, scaled_hidden, out, *, add: bool) -> None:
    scaled = left.float() * strips.t().float().repeat_interleave(STRIP, 1)
    product = scaled.t() @ scaled_hidden.float()
    out.copy_(out + product if add else product)


def products(
    tile: int, shard: VocabularyShard, with_entropy: bool, **broken: Any
) -> exponentials.ExponentialProducts:
    in_torch = SimpleNamespace(
        STRIP=STRIP, tile_of=lambda columns, with_dots: tile, write_exponentials=write_exponentials,
        write_hidden_gradient=write_hidden_gradient, add_weight_gradient=add_weight_gradient,
    )  # fmt: skip
    vars(in_torch).update(broken)
    return exponentials.ExponentialProducts(in_torch, shard, 0.7, with_entropy)  # type: ignore[arg-type]


def hopper_products(tile: int):
    def found(hidden: Tensor, weight: Tensor, shard: VocabularyShard, _: float, with_entropy: bool):
        return products(tile, shard, with_entropy)

    return found


class Problem:
    def __init__(self, columns: int, tokens: int = 20, gap: float = 0.0) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(columns, HIDDEN).bfloat16()
        self.weight[: columns // 2, 0] -= gap
        self.targets = torch.randint(0, columns, (tokens,))
        hidden = 0.3 * self.weight[self.targets].float() + torch.randn(tokens, HIDDEN)
        if gap:
            hidden[:, 0] = torch.linspace(0.5, 2, tokens)
        self.hidden = hidden.bfloat16()
        self.advantages = torch.randn(tokens)
        self.advantages[3] = 0

    def token_loss(self, entropy_coef: float, log_probs: Tensor, entropy: Tensor, rows: slice):
        part = self.advantages[rows].to(log_probs)
        value = (part * log_probs).sum()
        if entropy_coef:
            value = value - entropy_coef * (part * part * entropy).sum()
        return value / 7

    def of_factors(self, entropy_coef: float, *factors: Tensor, **settings: Any):
        """Outputs of the fused head, and backward of three times its loss."""
        names = ("chunk_tokens", "with_entropy", "tensor_parallel_group")
        head = {name: settings.pop(name) for name in names if name in settings}
        options = HeadOptions(temperature=0.7, fp32_logits=True, **head)
        loss = functools.partial(self.token_loss, entropy_coef)
        outputs = linear_token_loss(*factors, self.targets, loss, options, **settings)
        (3 * outputs[0]).backward()
        return [output.detach() for output in outputs]

    def found(self, entropy_coef: float, *, main_grad: bool, **settings: object):
        hidden = self.hidden.clone().requires_grad_()
        weight = self.weight.clone().requires_grad_()
        if main_grad:
            weight.main_grad = torch.ones(weight.shape)
            weight.grad_added_to_main_grad = False
        outputs = self.of_factors(entropy_coef, hidden, weight, **settings)
        of_weight = weight.main_grad - 1 if main_grad else weight.grad
        return (*outputs, hidden.grad, of_weight)

    def wanted(self, entropy_coef: float) -> tuple[Tensor, ...]:
        hidden = self.hidden.double().requires_grad_()
        weight = self.weight.double().requires_grad_()
        log_p = (hidden @ weight.t() / 0.7).log_softmax(1)
        log_probs = log_p.gather(1, self.targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(1)
        loss = self.token_loss(entropy_coef, log_probs, entropy, slice(None))
        gradients = torch.autograd.grad(3 * loss, (hidden, weight))
        return (*(each.detach() for each in (loss, log_probs, entropy)), *gradients)


def compare(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for value, exact in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=2e-5, atol=2e-5)
    for value, exact in zip(found[3:], wanted[3:], strict=True):
        error = (value.double() - exact).norm() / exact.norm()
        assert error <= ROUNDING, error


@pytest.fixture(autouse=True)
def quack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in tiles of 128, or of the parameter."""
    tile = getattr(request, "param", 128)
    monkeypatch.setattr(exponentials, "_failures", [])
    monkeypatch.setattr(output_layer, "hopper_products", hopper_products(tile))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize(("columns", "quack"), [(384, 192), (640, 128)], indirect=["quack"])
@pytest.mark.parametrize("way", ["deferred", "in forward", "chunks", "rows without gradient"])
def test_gradients(way, columns, entropy_coef):
    problem, settings = Problem(columns), {"defer": way != "in forward"}
    if way == "chunks":
        settings["chunk_tokens"] = 7
    if way == "rows without gradient":
        problem.advantages[13:], settings["gradient_rows"] = 0, 13
    found = problem.found(entropy_coef, main_grad=way != "in forward", **settings)
    compare(found, problem.wanted(entropy_coef))


@pytest.mark.parametrize("change, found", [
    ({"columns": 250}, "a multiple of 128 columns .*, found 250 and 24"),
    ({"dtype": torch.float16}, "bfloat16 hidden states, found torch.float16"),
    ({"temperature": torch.tensor(1.0)}, "which is a tensor here"),
    ({"real": 200}, "56 of the 256 columns of this rank are padding"),
    ({"main_grad": torch.zeros(256, HIDDEN).bfloat16()}, "float32 main_grad, found torch.bf"),
    ({"main_grad": torch.zeros(257 * HIDDEN)[1 : 256 * HIDDEN + 1].view(256, -1)}, "16 bytes"),
    ({"capability": (10, 0)}, "Hopper"),
    ({"temperature": 0.5}, "has 4 others"),
    ({"temperature": 4.0}, ""),
    ({}, ""),
])  # fmt: skip
def test_what_it_takes(change, found, monkeypatch):
    given = {"columns": 256, "dtype": torch.bfloat16, "temperature": 1.0, "main_grad": None}
    given |= {"real": None, "capability": (9, 0), **change}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: given["capability"])
    monkeypatch.setattr(exponentials, "_temperatures", {1.0, 2.0, 3.0, 4.0})
    weight = torch.zeros(given["columns"], HIDDEN, dtype=given["dtype"])
    shard = VocabularyShard.build(len(weight), given["real"], None)
    others = given["temperature"], given["main_grad"]
    reason = exponentials._refusal(weight[:3].clone(), weight, shard, *others)
    assert bool(reason) == bool(found) and re.search(found, reason)


def test_without_entropy():
    problem = Problem(640)
    found = problem.found(0.0, main_grad=True, defer=True, with_entropy=False)
    wanted = problem.wanted(0.0)
    assert found[2].isnan().all()
    compare((*found[:2], wanted[2], *found[3:]), wanted)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_targets_that_are_next_to_impossible(entropy_coef):
    """Tiles a hundred exponents of two and more below the largest: factors are bounded and products
    stay finite.
    """
    problem = Problem(256, gap=60.0)
    wanted = problem.wanted(entropy_coef)
    assert wanted[1].min() < -150 and ((wanted[1] < -60) & (wanted[1] > -150)).any()
    compare(problem.found(entropy_coef, main_grad=True, defer=True), wanted)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_a_row_that_is_no_number_shows_where_it_counts(entropy_coef):
    problem = Problem(256)
    problem.hidden[3] = float("nan")  # advantage 0
    found = problem.found(entropy_coef, main_grad=True, defer=True)
    if entropy_coef == 0:
        problem.hidden[3] = 0
        for value, exact in zip(found[3:], problem.wanted(0.0)[3:], strict=True):
            keep = torch.ones(len(exact), dtype=torch.bool)
            assert (value.double() - exact)[keep].norm() <= ROUNDING * exact.norm()
    problem.hidden[5] = float("nan")
    found = problem.found(entropy_coef, main_grad=True, defer=True)
    assert found[3][5].isnan().all() and found[4].isnan().any()


def test_whole_sequences():
    """One chunk a piece, and a piece of several of which all but the last are multiplied again."""
    problem = Problem(256)
    settings = {"chunk_tokens": 5, "piece_sizes": [0, 13, 7]}
    compare(problem.found(0.0, main_grad=True, defer=True, **settings), problem.wanted(0.0))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_factor_alone(frozen):
    problem = Problem(256)
    learned = "weight" if frozen == "hidden" else "hidden"
    getattr(problem, learned).requires_grad_()
    problem.of_factors(0.0, problem.hidden, problem.weight, defer=True)
    wanted = Problem(256).wanted(0.0)[3 if learned == "hidden" else 4]
    error = (getattr(problem, learned).grad.double() - wanted).norm() / wanted.norm()
    assert getattr(problem, frozen).grad is None and error <= ROUNDING


def on_ranks(quack: tuple[bool, bool], entropy_coef: float, columns: int) -> tuple[Tensor, ...]:
    """On two tensor-parallel ranks, of which `quack` names those with QuACK's products; the others
    have logits.
    """
    rank, problem = dist.get_rank(), Problem(columns)
    if quack[rank]:
        output_layer.hopper_products = hopper_products(128)
    output_layer.row_passes = lambda logits: rows_triton  # type: ignore[assignment]
    hidden = problem.hidden.clone().requires_grad_()
    weight = problem.weight.chunk(2)[rank].clone().requires_grad_()
    settings = {"chunk_tokens": 7, "with_entropy": entropy_coef > 0, "defer": True}
    settings["tensor_parallel_group"] = dist.group.WORLD
    outputs = problem.of_factors(entropy_coef, hidden, weight, **settings)
    return (*outputs, hidden.grad, weight.grad)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("quack", [(True, True), (True, False)], ids=["both", "one of them"])
def test_tensor_parallel_ranks(quack, entropy_coef):
    ranks = run_ranks(on_ranks, 2, quack, entropy_coef, 512)
    of_hidden = sum(rank[3].float() for rank in ranks)
    of_weight = torch.cat([rank[4] for rank in ranks])
    wanted = Problem(512).wanted(entropy_coef)
    for rank in ranks:
        found = [*rank[:2], rank[2] if entropy_coef else wanted[2]]
        compare((*found, of_hidden, of_weight), wanted)


def test_a_target_outside_the_vocabulary_is_nan():
    problem, rows = Problem(256), slice(0, 20)
    problem.targets[2] = 256
    of_shard = products(128, VocabularyShard(0, 256, 256, None), with_entropy=True)
    buffer = torch.empty((128, 256), dtype=torch.bfloat16)
    found = of_shard.first_product(problem.hidden, problem.weight, problem.targets, rows, buffer)
    assert found.statistics().log_probs.isnan().nonzero().flatten().tolist() == [2]


PRODUCTS = {
    "write_exponentials": write_exponentials,
    "write_hidden_gradient": write_hidden_gradient,
    "add_weight_gradient": add_weight_gradient,
}


def failing(name: str, call: int, error: type[Exception] = RuntimeError) -> dict[str, Any]:
    """The product of that name, which fails in that call and, like a compiler, in all later ones,
    before it has written a sum.
    """
    calls = itertools.count(1)

    def product(*args: Any, **settings: Any) -> None:
        if next(calls) < call:
            return PRODUCTS[name](*args, **settings)
        if name != "add_weight_gradient":
            out = args[-1]
            out[: len(out) // 2].fill_(float("nan"))
        raise error("no kernel for this machine")

    return {name: product}


def break_products(monkeypatch: pytest.MonkeyPatch, *args: Any) -> None:
    broken = failing(*args)

    def found(hidden: Tensor, weight: Tensor, shard: VocabularyShard, _: float, with_entropy: bool):
        if exponentials._failures:
            return None
        return products(128, shard, with_entropy, **broken)

    monkeypatch.setattr(output_layer, "hopper_products", found)
    exponentials._say.cache_clear()


WAYS = list(itertools.product(PRODUCTS, [True, False], [None, [0, 5, 8, 7]]))


@pytest.mark.parametrize(
    ("call", "way"), [(1 + (i + i // 4) % 3, way) for i, way in enumerate(WAYS)]
)
def test_a_compiler_that_fails_costs_no_gradient(call, way, monkeypatch):
    """In the first chunk or a later one, every pair of settings: what was added stays, the chunk is
    done again, and it is said once.
    """
    name, main_grad, pieces = way
    problem = Problem(256)
    settings = {
        "main_grad": main_grad,
        "defer": main_grad,
        "chunk_tokens": 7,
        "piece_sizes": pieces,
    }
    wanted = problem.wanted(0.0)
    break_products(monkeypatch, name, call)
    with pytest.warns(UserWarning, match="no kernel for this machine") as said:
        compare(problem.found(0.0, **settings), wanted)
    # Triton's interpreter warns of NaN by numpy's RuntimeWarning.
    assert sum(warning.category is UserWarning for warning in said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compare(problem.found(0.0, **settings), wanted)


@pytest.mark.parametrize("call", [1, 2])
def test_a_compiler_that_fails_with_an_entropy_term(call, monkeypatch):
    problem = Problem(256)
    break_products(monkeypatch, "write_exponentials", call)
    with pytest.warns(UserWarning, match="no kernel"):
        found = problem.found(0.1, main_grad=True, defer=True, chunk_tokens=7)
    compare(found, problem.wanted(0.1))


def test_a_lack_of_memory_is_no_failure_of_the_compiler(monkeypatch):
    break_products(monkeypatch, "add_weight_gradient", 1, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        Problem(256).found(0.0, main_grad=True, defer=True)
    assert not exponentials._failures


def test_mutant_a_sum_that_was_begun_and_not_written_would_be_seen(monkeypatch):
    """Mutant: the sum of a product that failed is taken for one that has begun."""

    def add_to_weight(gradients: FactorGradients, product: Any) -> None:
        add = gradients._sum is not None
        if not add:
            gradients._sum = torch.full(gradients.weight.shape, 5.0)
        product(gradients._sum, add)

    monkeypatch.setattr(FactorGradients, "add_to_weight", add_to_weight)
    problem = Problem(256)
    break_products(monkeypatch, "add_weight_gradient", 1)
    with pytest.warns(UserWarning, match="no kernel"):
        found = problem.found(0.0, main_grad=False, defer=False, chunk_tokens=7)
    with pytest.raises(AssertionError):
        compare(found, problem.wanted(0.0))
