"""The load-balancing loss of a mixture of experts keeps its intended gradient in both loss modes.

Intended: the gradient of the mean over the micro-batches of all data-parallel ranks, whatever the
policy loss is divided by. Every micro-batch here has the same number of tokens, and no padding.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_pg.config.versions import (
    moe_auxiliary_loss_under_context_parallel_is_right,
    per_token_moe_under_context_parallel_is_right,
)
from megatron_pg.megatron import packed_seq_params
from megatron_pg.step.batch import pack
from tests import oracle
from tests.oracle import PlainSample
from tests.random_steps import package_samples, random_sample
from tests.step_loss import step_loss

from .compare import assert_equal, compare
from .launch import RankError, run_ranks
from .models import ModelOptions, Sharding, build_model, gather_gradients, initialize_groups
from .one_step import LossFactory, Outcome, build, train_step
from .steps import NUM_SAMPLES, Run

DATA_SIZE = 2
RUN = Run("sample_mean")
OPTIONS = ModelOptions(mixture_of_experts=True, moe_aux_loss_coeff=0.5, dtype=torch.float64)


MICRO_BATCHES = [
    part for rank in range(DATA_SIZE) for part in RUN.micro_batches(DATA_SIZE, rank, 1)
]
NUM_TOKENS = 24
"""Of each micro-batch."""


def equal_micro_batches() -> list[PlainSample]:
    """Samples whose micro-batches, cut uniformly over two ranks, all have as many tokens."""
    rng = random.Random(11)
    lengths = {index: NUM_TOKENS // len(part) - 3 for part in MICRO_BATCHES for index in part}
    return [
        random_sample(rng, prompt_length=3, response_length=lengths[index], group_index=index % 3)
        for index in range(NUM_SAMPLES)
    ]


def reference_step() -> Outcome:
    """One process: every micro-batch packed by itself, their auxiliary losses averaged."""
    initialize_groups(Sharding())
    (model,) = build_model(Sharding(), OPTIONS)
    plain = equal_micro_batches()
    samples = package_samples(plain)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 / len(MICRO_BATCHES)))
    logits: dict[int, Tensor] = {}
    for indices in MICRO_BATCHES:
        batch = pack([samples[index] for index in indices])
        assert batch.window.local_tokens == NUM_TOKENS
        inputs = batch.tokens[None], batch.position_ids[None], None
        output = model(*inputs, packed_seq_params=packed_seq_params(batch))[0]
        lengths = [len(plain[index].tokens) for index in indices]
        logits.update(zip(indices, output.split(lengths), strict=True))
    result = oracle.policy_loss(plain, [logits[i] for i in range(len(plain))], RUN.objective)
    with model.no_sync():
        result.loss.backward()
    metrics = {"loss": result.loss.item(), "pg_loss": result.pg_loss.item()}
    return Outcome(gather_gradients([model]) or {}, metrics | {"aggregation_checksum": 1.0})


def active_tokens_for_all_tokens(config, batch, totals, **keywords):
    """Mutant: n of per-token mode is the active tokens, by which Megatron does not scale the rest."""
    right = step_loss(config, batch, totals, **keywords)

    def loss_func(output: Tensor) -> Any:
        loss, tokens, metrics = right(output)
        scale = totals.num_active_tokens / totals.num_tokens
        return loss * scale, torch.full_like(tokens, batch.num_active_tokens), metrics

    return loss_func


def sharded_step(sharding: Sharding, per_token: bool, loss: LossFactory | None = None) -> Any:
    chunks = build(sharding, replace(OPTIONS, calculate_per_token_loss=per_token))
    return train_step(chunks, sharding, RUN, loss, samples=equal_micro_batches())


@pytest.fixture(scope="module")
def reference() -> Outcome:
    return run_ranks(reference_step, 1)[0]


@pytest.mark.parametrize("name", ["DP2", "EP2 DP2", "CP2 DP2", "CP2 EP2 DP2"])
@pytest.mark.parametrize("per_token", [False, True], ids=["per_micro_batch", "per_token"])
def test_auxiliary_gradient_is_the_mean_over_micro_batches(name, per_token, reference) -> None:
    sharding = Sharding.named(name)
    task = (sharded_step, sharding.world_size, sharding, per_token)
    if per_token and sharding.context > 1 and not per_token_moe_under_context_parallel_is_right():
        with pytest.raises(RankError, match="NotImplementedError: --calculate-per-token-loss"):
            run_ranks(*task)
        return
    if sharding.context > 1 and not moe_auxiliary_loss_under_context_parallel_is_right():
        pytest.skip("Megatron itself scales it by 1 / CP here, whatever the loss function returns")
    assert_equal(run_ranks(*task)[:1], [reference])


def test_counting_active_tokens_in_per_token_mode_is_caught(reference) -> None:
    task = (Sharding(data=2), True, active_tokens_for_all_tokens)
    outcome = run_ranks(sharded_step, 2, *task)[0]
    assert compare(outcome, reference).gradient_error > 1e-2
