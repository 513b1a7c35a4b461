"""The loss on plain PyTorch data parallelism, which averages gradients: DDP and FSDP2 on gloo.

A small scorer takes the place of a language model, so that the reference is one dense float64 loop
over samples.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megatron_pg import PolicyLossConfig, pack, policy_loss_function
from megatron_pg.loss.padded import padded_totals, reduce_padded
from tests import oracle
from tests.oracle import Objective, PlainSample
from tests.random_steps import VOCAB_SIZE, package_samples, random_step, uneven_totals

from .launch import run_ranks

WORLD_SIZE = 2
DIVISOR = 4.0
STEP = [replace(sample, rollout_id=None) for sample in random_step(11, num_samples=7)]
MICRO_BATCHES = [[[0, 2], [4, 6]], [[1], [3, 5]]]
"""Rows of each micro-batch, by rank; the numbers are the same, as DDP and FSDP2 want them."""


def new_model() -> nn.Module:
    """Logits [tokens, vocabulary] of tokens [tokens]."""
    torch.manual_seed(0)
    layers = nn.Embedding(VOCAB_SIZE, 8), nn.Tanh(), nn.Linear(8, VOCAB_SIZE)
    return nn.Sequential(*layers).double()


def unsynchronized(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Gradients accumulate locally until the last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    return nullcontext() if is_last or isinstance(model, FSDPModule) else model.no_sync()


def divisor_of(aggregation: str) -> float | None:
    return DIVISOR if aggregation == "constant" else None


def packed_loss(model: nn.Module, rows: list[int], aggregation: str, factor: int) -> Tensor:
    config = PolicyLossConfig(
        loss_aggregation=aggregation,
        loss_aggregation_divisor=divisor_of(aggregation),
        pg_metrics="none",
    )
    mine = [row for part in MICRO_BATCHES[dist.get_rank()] for row in part]
    samples = package_samples(STEP)
    totals = uneven_totals([samples[row] for row in mine], data_parallel_group=dist.group.WORLD)
    batch = pack([samples[row] for row in rows])
    loss, _ = policy_loss_function(config, batch, model(batch.tokens), totals=totals)
    return loss * factor


def padded_loss(model: nn.Module, rows: list[int], aggregation: str, factor: int) -> Tensor:
    """The same from a [batch, length] matrix: -min(r A, clip(r) A) by hand, then
    `reduce_padded`.
    """
    mine = [STEP[row] for part in MICRO_BATCHES[dist.get_rank()] for row in part]
    totals = padded_totals(
        padded(mine, "loss_mask"),
        group_index=[sample.group_index for sample in mine],
        data_parallel_group=dist.group.WORLD,
        allow_different_group_sizes=True,
    )
    samples = [STEP[row] for row in rows]
    mask = padded(samples, "loss_mask")
    log_probs = torch.zeros(mask.shape, dtype=torch.float64)
    logits = model(torch.tensor([token for sample in samples for token in sample.tokens]))
    parts = logits.split([len(sample.tokens) for sample in samples])
    for row, (sample, part) in enumerate(zip(samples, parts, strict=True)):
        first, tokens = sample.prompt_length, torch.tensor(sample.tokens)
        scores, targets = part[first - 1 : -1], tokens[first:]
        losses = nn.functional.cross_entropy(scores, targets, reduction="none")
        log_probs[row, : sample.response_length] = -losses
    old, advantages = (padded(samples, name).double() for name in ("old_log_probs", "advantages"))
    ratio = (log_probs - old).clamp(-20, 20).exp()
    return reduce_padded(
        -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages),
        mask,
        totals=totals,
        aggregation=aggregation,
        divisor=divisor_of(aggregation),
        group_index=[sample.group_index for sample in samples],
        data_parallel_size=factor,
    )


def padded(samples: list[PlainSample], name: str) -> Tensor:
    rows = [torch.tensor(getattr(sample, name)) for sample in samples]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


LOSSES: dict[str, Callable[..., Tensor]] = {"packed": packed_loss, "padded": padded_loss}


def gradients_of_a_step(kind: str, loss: str, aggregation: str, factor: int) -> list[Tensor]:
    model: Any = new_model()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    *accumulated, last = MICRO_BATCHES[dist.get_rank()]
    for rows in (*accumulated, last):
        with unsynchronized(model, is_last=rows is last):
            LOSSES[loss](model, rows, aggregation, factor).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]


def worker(kind: str, loss: str) -> dict[tuple[str, int], list[Tensor]]:
    """Gradients by aggregation and factor; 1 is the mutant that forgets the average."""
    return {
        (aggregation, factor): gradients_of_a_step(kind, loss, aggregation, factor)
        for aggregation in oracle.AGGREGATIONS
        for factor in (WORLD_SIZE, 1)
    }


def reference(aggregation: str) -> list[Tensor]:
    model = new_model()
    logits = [model(torch.tensor(sample.tokens)) for sample in STEP]
    objective = Objective(loss_aggregation=aggregation, loss_aggregation_divisor=DIVISOR)
    oracle.policy_loss(STEP, logits, objective).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_the_step(kind, loss) -> None:
    found = run_ranks(worker, WORLD_SIZE, kind, loss)[0]
    for aggregation in oracle.AGGREGATIONS:
        gradients = (found[aggregation, factor] for factor in (WORLD_SIZE, 1))
        for right, wrong, expected in zip(*gradients, reference(aggregation), strict=True):
            # The packed samples carry float32 log-probs and advantages, exactly representable here.
            torch.testing.assert_close(right, expected, rtol=1e-6, atol=1e-9)
            assert not torch.allclose(wrong, expected, rtol=1e-3)
