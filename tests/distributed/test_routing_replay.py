"""Routing replay: the gradient of a model whose routers take given experts, at every sharding, and mutants of it.

The oracle packs without padding on one process and routes in plain loops: a given token's experts are the engine's, any other's
the largest logits; probabilities are the softmax of their logits.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg.megatron import compute_log_probs
from megatron_pg.megatron import packed_seq_params, routing_replay
from megatron_pg.step import batch as batches
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.sample import Sample
from tests import oracle
from tests.random_steps import package_samples

from .compare import assert_equal, compare
from .launch import run_ranks
from .models import (
    NUM_EXPERTS,
    ModelOptions,
    Sharding,
    build_model,
    gather_gradients,
    initialize_groups,
)
from .one_step import Outcome, build, train_step
from .steps import Run

TOPK = 3
RUN = Run(regularized=True)
DENSE_BETWEEN = (0, 1, 1, 0)
OPTIONS = ModelOptions(mixture_of_experts=True, dtype=torch.float64, num_layers=4)


def chosen(layers: int) -> list[list[list[list[int]]]]:
    """The engine's experts of every sample [layers][total_length][k], none of the last token."""
    rng = random.Random(3)
    return [
        [
            [rng.sample(range(NUM_EXPERTS), TOPK) for _ in sample.tokens[:-1]] + [[-1] * TOPK]
            for _ in range(layers)
        ]
        for sample in RUN.samples
    ]


def layers_of(options: ModelOptions) -> list[int]:
    pattern = options.moe_layer_freq or (1,) * options.num_layers
    return [layer for layer, has_experts in enumerate(pattern) if has_experts]


def reference_step(options: ModelOptions, layers: int) -> Outcome:
    """One process: every router's `routing` replaced by plain loops over the given experts."""
    initialize_groups(Sharding())
    (model,) = build_model(Sharding(), options)
    experts, plain = chosen(layers), RUN.samples
    batch = pack(package_samples(plain))
    counts = [0, 0]
    routers = [module for module in model.modules() if hasattr(module, "apply_z_loss")]
    given = layers_of(options) if layers == options.num_layers else range(layers)
    for layer, router in zip(given, routers, strict=True):
        rows = [row for sample in experts for row in sample[layer]]

        def routing(logits: Tensor, *_: Any, rows=rows, **__: Any) -> Any:
            logits = logits.flatten(0, 1)
            probs = torch.zeros_like(logits)
            for token, row in enumerate(rows):
                own = logits[token].topk(TOPK).indices.tolist()
                ids = own if row[0] < 0 else row
                if row[0] >= 0:
                    counts[0] += len(set(own) & set(row))
                    counts[1] += TOPK
                # Megatron's routers round to float32.
                probs[token, ids] = logits[token, ids].softmax(0, dtype=torch.float32).double()
            return probs, probs > 0

        router.routing = routing
    inputs = batch.tokens[None], batch.position_ids[None], None
    output = model(*inputs, packed_seq_params=packed_seq_params(batch))[0]
    logits = list(output.split([len(sample.tokens) for sample in plain]))
    result = oracle.policy_loss(plain, logits, RUN.objective)
    with model.no_sync():
        result.loss.backward()
    metrics = {"loss": result.loss.item(), "pg_loss": result.pg_loss.item()}
    metrics |= {"aggregation_checksum": 1.0, "router_agreement": counts[0] / counts[1]}
    return Outcome(gather_gradients([model]) or {}, metrics)


def with_experts(samples: list[Sample], layers: int) -> list[Sample]:
    """The samples of a micro-batch with their experts, found by tokens and mask."""
    experts = {
        (*sample.tokens, *sample.loss_mask): ids
        for sample, ids in zip(RUN.samples, chosen(layers), strict=True)
    }
    return [
        replace(s, routed_experts=experts[(*s.tokens.tolist(), *s.loss_mask.int().tolist())])
        for s in samples
    ]


def sharded_step(
    name: str, options: ModelOptions, layers: int, mutate: Callable[[], None] = lambda: None
) -> Any:
    mutate()
    run = replace(RUN, replay_routing=True)

    def packed(samples: list[Sample], **layout: Any) -> PackedBatch:
        return pack(with_experts(samples, layers), **layout)

    sharding = Sharding.named(name)
    return train_step(build(sharding, options), sharding, run, pack_batch=packed)


@functools.cache
def reference(options: ModelOptions, layers: int) -> Outcome:
    return run_ranks(reference_step, 1, replace(options, recompute=None), layers)[0]


SHARDINGS = [
    "one process",
    *("CP2", "CP4", "TP2+SP", "PP2", "PP2 VPP2", "DP2 EP2", "TP2+SP CP2", "CP2 EP2 DP2"),
]


@pytest.mark.parametrize("recompute", [None, "full", "moe"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_routers_take_the_experts_of_the_engine(name, recompute) -> None:
    options = replace(OPTIONS, recompute=recompute)
    world_size = Sharding.named(name).world_size
    outcome = run_ranks(sharded_step, world_size, name, options, 4)[0]
    assert_equal([outcome], [reference(options, 4)], tolerance=1e-12)


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("name", ["PP2", "PP2 VPP2", "CP2"])
def test_layers_without_experts_between(name, layers) -> None:
    options = replace(OPTIONS, moe_layer_freq=DENSE_BETWEEN, recompute="full")
    world_size = Sharding.named(name).world_size
    outcome = run_ranks(sharded_step, world_size, name, options, layers)[0]
    assert_equal([outcome], [reference(options, layers)], tolerance=1e-12)
