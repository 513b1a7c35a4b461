"""log_probs_and_entropy against the float64 plain-loop oracle, whole and with the vocabulary over
gloo ranks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head import log_probs_and_entropy, rows_torch
from tests.distributed.launch import run_ranks
from tests.fast.log_probs_oracle import peaked_logits, reference
from tests.fast.refusals import assert_refused

# Half a unit in the last place of the stored gradient, plus float32 arithmetic.
ROUNDING = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-10,
    torch.float32: 4e-6,
    torch.float64: 1e-12,
}
SMALLEST = {torch.bfloat16: 1e-9, torch.float16: 6e-8, torch.float32: 1e-9, torch.float64: 1e-15}


def run(
    logits: Tensor, targets: Tensor, grad_log_probs: Tensor, grad_entropy: Tensor, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(leaf, targets, with_entropy=True, **options)
    gradients = grad_log_probs.to(log_probs), grad_entropy.to(log_probs)
    torch.autograd.backward([log_probs, entropy], gradients)
    return log_probs.detach(), entropy.detach(), leaf.grad


def incoming(tokens: int, seed: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, generator=generator), 0.3 * torch.randn(tokens, generator=generator)


def assert_matches(found, expected, dtype: torch.dtype, scale: float = 1.0) -> None:
    statistics_rounding = 1e-12 if dtype == torch.float64 else 2e-6
    for name, value, wanted in zip(("log_probs", "entropy"), found[:2], expected[:2], strict=True):
        error = (value.double() - wanted).abs()
        bound = statistics_rounding * (1 + scale * wanted.abs())
        assert (error <= bound).all(), (name, error.max())
    error = (found[2].double() - expected[2]).abs()
    floor = statistics_rounding * 2
    bound = ROUNDING[dtype] * expected[2].abs() + floor * expected[2].abs().amax() * 0.1
    assert (error <= bound + SMALLEST[dtype]).all(), ("gradient", (error - bound).max())


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(dtype, temperature):
    logits, targets = peaked_logits(9, 37, dtype=dtype)
    targets = targets.clamp(max=32)
    gradients = incoming(9)
    found = run(logits, targets, *gradients, temperature=temperature, vocab_size=33)
    expected = reference(logits, targets, *gradients, temperature=temperature, vocab_size=33)
    assert_matches(found, expected, dtype)
    assert found[0].dtype == found[1].dtype == rows_torch.wide_dtype(dtype)
    assert found[2].dtype == dtype
    assert (found[2][:, 33:] == 0).all()


def test_padding_columns_take_no_part_even_with_nan():
    logits, targets = peaked_logits(5, 16)
    targets = targets.clamp(max=11)
    logits[:, 12:] = torch.tensor([math.nan, math.inf, 1e30, -math.inf])
    gradients = incoming(5)
    found = run(logits, targets, *gradients, vocab_size=12)
    assert_matches(found, reference(logits, targets, *gradients, vocab_size=12), torch.float32)
    assert (found[2][:, 12:] == 0).all()


def test_extreme_logits():
    logits, targets = peaked_logits(8, 21)
    logits = logits.sign() * 1e4 + logits
    logits[0] = 1e4
    logits[1] = -1e4
    logits[2, 3:] = -math.inf
    targets[2] = 1
    gradients = incoming(8)
    found = run(logits, targets, *gradients)
    expected = reference(logits, targets, *gradients)
    expected[2].nan_to_num_(nan=0.0)  # autograd of exp at -inf times -inf; the limit is 0
    assert torch.isfinite(found[2]).all()
    assert_matches(found, expected, torch.float32)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_rows_are_zero_and_their_logits_harmless(poison):
    logits, targets = peaked_logits(6, 19)
    mask = torch.tensor([True, False, True, False, True, True])
    logits[1], logits[3, 4] = poison, poison
    targets[3] = -1
    gradients = incoming(6)
    gradients[0][1] = math.nan
    found = run(logits, targets, *gradients, row_mask=mask)
    expected = reference(logits, targets, *gradients, row_mask=mask)
    assert_matches(found, expected, torch.float32)
    for value in found:
        assert (value[~mask] == 0).all()


def test_rows_of_zero_incoming_gradient_get_zero_even_with_nan():
    logits, targets = peaked_logits(4, 19)
    logits[2, 5] = math.nan
    gradients = incoming(4)
    for gradient in gradients:
        gradient[2] = 0
    gradient = run(logits, targets, *gradients)[2]
    assert (gradient[2] == 0).all() and torch.isfinite(gradient).all()


def test_nan_at_an_active_row_stays_visible():
    logits, targets = peaked_logits(4, 19)
    logits[2, 5] = math.nan
    log_probs, entropy, gradient = run(logits, targets, *incoming(4))
    assert log_probs.isnan().tolist() == entropy.isnan().tolist() == [False, False, True, False]
    assert gradient[2].isnan().any() and torch.isfinite(gradient[[0, 1, 3]]).all()


@pytest.mark.parametrize("target", [-1, 12, 15, 10**9, 10**12])
def test_target_outside_the_vocabulary_is_nan(target):
    logits, targets = peaked_logits(3, 16)
    targets = targets.clamp(max=11)
    targets[1] = target
    log_probs, _ = log_probs_and_entropy(logits, targets, vocab_size=12)
    assert log_probs.isnan().tolist() == [False, True, False]


def test_one_output_alone_can_be_differentiated():
    logits, targets = peaked_logits(5, 16)
    weights, zeros = incoming(5)[0], torch.zeros(5)
    for which in (0, 1):
        leaf = logits.clone().requires_grad_()
        log_probs_and_entropy(leaf, targets, with_entropy=True)[which].backward(weights)
        gradients = (weights, zeros) if which == 0 else (zeros, weights)
        expected = reference(logits, targets, *gradients)[2]
        torch.testing.assert_close(leaf.grad.double(), expected, rtol=1e-5, atol=1e-6)
    assert log_probs_and_entropy(logits, targets)[1] is None


def test_chunks_of_rows_change_nothing(monkeypatch):
    logits, targets = peaked_logits(11, 16)
    whole = run(logits, targets, *incoming(11))
    monkeypatch.setattr(rows_torch, "_CHUNK_ELEMENTS", 16 * 3)
    for value, chunked in zip(whole, run(logits, targets, *incoming(11)), strict=True):
        assert torch.equal(value, chunked)


def test_temperature_may_be_a_tensor():
    logits, targets = peaked_logits(5, 16)
    number = run(logits, targets, *incoming(5), temperature=0.6)
    tensor = run(logits, targets, *incoming(5), temperature=torch.tensor([0.6]))
    for value, other in zip(number, tensor, strict=True):
        assert torch.equal(value, other)


def test_no_tokens_stay_connected_to_the_graph():
    leaf = torch.zeros(0, 16, requires_grad=True)
    found = log_probs_and_entropy(leaf, torch.zeros(0, dtype=torch.int64), with_entropy=True)
    torch.cat(found).sum().backward()
    assert leaf.grad.shape == (0, 16)


def test_strided_logits():
    logits, targets = peaked_logits(12, 40)
    view, gradients = logits[::2, 3:35], incoming(6)
    targets = targets[:6].clamp(max=31)
    found = run(view, targets, *gradients)
    assert_matches(found, reference(view, targets, *gradients), torch.float32)


@pytest.mark.parametrize(("change", "message"), [
    ({"logits": torch.zeros(2, 3, 4)}, "logits must be"),
    ({"logits": torch.zeros(3, 4, dtype=torch.int64)}, "logits must be"),
    ({"targets": torch.zeros(2, dtype=torch.int64)}, "targets must be"),
    ({"targets": torch.zeros(3, dtype=torch.int32)}, "targets must be"),
    ({"row_mask": torch.ones(3)}, "row_mask must be"),
    ({"row_mask": torch.ones(4, dtype=torch.bool)}, "row_mask must be"),
    ({"temperature": 0.0}, "temperature must be"),
    ({"temperature": math.nan}, "temperature must be"),
    ({"temperature": -1}, "temperature must be"),
    ({"temperature": torch.ones(3)}, "temperature must be"),
    ({"vocab_size": 5}, "vocab_size must be"),
    ({"vocab_size": 0}, "vocab_size must be"),
])  # fmt: skip
def test_bad_input(change, message):
    arguments = {"logits": torch.zeros(3, 4), "targets": torch.zeros(3, dtype=torch.int64)}
    assert_refused(message, log_probs_and_entropy, **{**arguments, **change})


def test_second_derivative_is_refused():
    logits, targets = peaked_logits(6, 12)
    loss = log_probs_and_entropy(logits.requires_grad_(), targets)[0].sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, logits, create_graph=True)


TOKENS, WIDTH, VOCAB_SIZE, TEMPERATURE = 7, 32, 21, 0.8
MASK = torch.tensor([True, True, False, True, True, True, False])
SETTINGS = {"temperature": TEMPERATURE, "row_mask": MASK, "vocab_size": VOCAB_SIZE}


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, targets = peaked_logits(TOKENS, WIDTH, seed=3)
    logits[2, 1] = float("nan")
    logits[3, :8] = -float("inf")  # a whole shard without mass
    logits[4] -= 1e4  # beside which a shard of padding alone must not count as logits of 0
    targets = torch.tensor([0, 7, 8, 20, 16, 15, 4])
    generator = torch.Generator().manual_seed(5)
    return logits, targets, *torch.randn(2, TOKENS, generator=generator).unbind()


def shapes_gathered(call: Callable[[], Any]) -> tuple[Any, list[tuple[int, ...]]]:
    """The result of the call, and the shapes that it handed to all-gathers."""
    shapes: list[tuple[int, ...]] = []
    original = dist.all_gather_into_tensor

    def counted(out: Tensor, local: Tensor, **options: object) -> object:
        shapes.append(tuple(local.shape))
        return original(out, local, **options)

    dist.all_gather_into_tensor = counted
    try:
        return call(), shapes
    finally:
        dist.all_gather_into_tensor = original


def shard_on_rank() -> tuple[Tensor, Tensor, Tensor | None, list[tuple[int, ...]]]:
    logits, targets, *gradients = inputs()
    leaf = logits.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_()
    settings = {**SETTINGS, "tensor_parallel_group": dist.group.WORLD, "with_entropy": True}
    call = functools.partial(log_probs_and_entropy, leaf, targets, **settings)
    (log_probs, entropy), shapes = shapes_gathered(call)
    torch.autograd.backward([log_probs, entropy], gradients)
    return log_probs.detach(), entropy.detach(), leaf.grad, shapes


def check_shards(shards: list) -> None:
    logits, targets, *gradients = inputs()
    log_probs, entropy, gradient = reference(logits, targets, *gradients, **SETTINGS)
    gradient.nan_to_num_(nan=0.0)  # of the oracle's exp at -inf; the limit is 0
    for found_log_probs, found_entropy, _, shapes in shards:
        torch.testing.assert_close(found_log_probs.double(), log_probs, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(found_entropy.double(), entropy, rtol=2e-6, atol=2e-6)
        assert torch.equal(found_log_probs, shards[0][0]), "ranks must agree bit for bit"
        assert torch.equal(found_entropy, shards[0][1]), "ranks must agree bit for bit"
        assert shapes == [(TOKENS, 4)], "one all-gather of the statistics and nothing else"
    found_gradient = torch.cat([shard[2] for shard in shards], 1)
    torch.testing.assert_close(found_gradient.double(), gradient, rtol=5e-6, atol=2e-6)
    assert (found_gradient[~MASK] == 0).all() and (found_gradient[:, VOCAB_SIZE:] == 0).all()


@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_the_whole_vocabulary(size):
    check_shards(run_ranks(shard_on_rank, size))


def test_mutant_a_shard_alone_would_be_seen():
    """Mutant: each rank normalises over its own columns."""
    logits, targets, *gradients = inputs()
    wanted = reference(logits, targets, *gradients, row_mask=MASK)[0]
    shard, local = logits[:, : WIDTH // 2], targets.clamp(max=WIDTH // 2 - 1)
    alone, _ = log_probs_and_entropy(shard, local, row_mask=MASK)
    same_target = MASK & (targets == local) & wanted.isfinite()
    assert same_target.any()
    assert not torch.isclose(alone[same_target].double(), wanted[same_target], rtol=1e-3).any()
