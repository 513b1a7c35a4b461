"""log_probs_and_entropy with the vocabulary split over gloo ranks, against the unsharded oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head import log_probs_and_entropy
from tests.distributed.launch import run_ranks
from tests.fast.log_probs_oracle import peaked_logits, reference

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
    call = functools.partial(
        log_probs_and_entropy,
        leaf,
        targets,
        tensor_parallel_group=dist.group.WORLD,
        with_entropy=True,
        **SETTINGS,
    )
    (log_probs, entropy), shapes = shapes_gathered(call)
    torch.autograd.backward([log_probs, entropy], gradients)
    return log_probs.detach(), entropy.detach(), leaf.grad, shapes


@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_the_whole_vocabulary(size):
    shards = run_ranks(shard_on_rank, size)
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


def test_a_shard_alone_would_be_seen():
    """Mutant: each rank normalises over its own columns."""
    logits, targets, *gradients = inputs()
    wanted = reference(logits, targets, *gradients, row_mask=MASK)[0]
    shard, local = logits[:, : WIDTH // 2], targets.clamp(max=WIDTH // 2 - 1)
    alone, _ = log_probs_and_entropy(shard, local, row_mask=MASK)
    same_target = MASK & (targets == local) & wanted.isfinite()
    assert same_target.any()
    assert not torch.isclose(alone[same_target].double(), wanted[same_target], rtol=1e-3).any()
