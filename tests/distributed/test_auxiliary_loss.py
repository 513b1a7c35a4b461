"""The losses that Megatron adds to the policy's keep their intended gradient.

That of load balancing in a mixture of experts, in both loss modes: the gradient of the mean over the micro-batches of all
data-parallel ranks, whatever the policy loss is divided by. Every micro-batch here has the same number of tokens, and no
padding. That of multi-token prediction on a Megatron-Core that scales it otherwise: the same gradient, or a refusal in words.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_pg.config.versions import (
    derives_multi_token_labels,
    moe_auxiliary_loss_under_context_parallel_is_right,
    per_token_moe_under_context_parallel_is_right,
)
from megatron_pg.megatron import packed_seq_params
from megatron_pg.step.batch import pack
from tests import oracle
from tests.oracle import PlainSample
from tests.random_steps import package_samples, random_sample
from tests.step_loss import step_loss

from .cases import AHEAD
from .compare import assert_equal, compare
from .launch import RankError, run_ranks
from .models import ModelOptions, Sharding, build_model, gather_gradients, initialize_groups
from .one_step import LossFactory, Outcome, build, run_steps, train_step
from .reference import reference_steps
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


needs_multi_token = pytest.mark.skipif(
    not derives_multi_token_labels(), reason="multi-token prediction without labels: 0.19 and later"
)
AHEAD_RUN = Run(regularized=True)


def scaled_in_the_schedule(factor: float) -> None:
    """As pull request 3959 of NVIDIA/Megatron-LM has it: the schedule's scale carries the factor."""
    right, scaler = schedules.forward_step_calc_loss, multi_token_prediction.MTPLossAutoScaler

    def wrong(*args: Any, **keywords: Any) -> Any:
        result = right(*args, **keywords)
        scaler.set_loss_scale(scaler.main_loss_backward_scale * factor)
        return result

    schedules.forward_step_calc_loss = wrong


def scaled_in_the_loss(factor: float) -> None:
    """As pull request 7498 says that it does: the loss itself, outside of per-token mode."""
    right = multi_token_prediction.process_mtp_loss

    def wrong(*args: Any, config: Any, **keywords: Any) -> Any:
        if not config.calculate_per_token_loss:
            scale = config.mtp_loss_scaling_factor * factor
            config = replace(config, mtp_loss_scaling_factor=scale)
        return right(*args, config=config, **keywords)

    gpt_model.process_mtp_loss = multi_token_prediction.process_mtp_loss = wrong


def other_arguments(factor: float) -> None:
    """A Megatron-Core that cannot be measured."""
    right = schedules.forward_step_calc_loss
    schedules.forward_step_calc_loss = lambda *args, of_another_name=None: right(*args)


def second_step(change: Any, factor: float, sharding: Sharding) -> Outcome | str | None:
    """The outcome on rank 0 of the step that is not measured, or what was refused on this rank."""
    change(factor)
    try:
        return run_steps(sharding, AHEAD, [AHEAD_RUN, AHEAD_RUN])[1]
    except NotImplementedError as error:
        return str(error)


@needs_multi_token
@pytest.mark.parametrize("name", ["CP2", "PP2 CP2", "TP2 CP2"])
@pytest.mark.parametrize(
    ("change", "factor"),
    [(scaled_in_the_schedule, 2.0), (scaled_in_the_loss, 2.0), (scaled_in_the_loss, 1.0)],
    ids=["the schedule's", "the loss's", "as in 0.19"],
)
def test_the_gradient_is_the_same_where_megatron_multiplies_by_cp(change, factor, name) -> None:
    sharding = Sharding.named(name)
    expected = run_ranks(reference_steps, 1, AHEAD.unsharded, [AHEAD_RUN])[0]
    found = run_ranks(second_step, sharding.world_size, change, factor, sharding)[0]
    assert_equal([found], expected)


@needs_multi_token
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scaled_in_the_schedule, "it multiplies by 3.0, and not by 1 or 2"),
        (other_arguments, "unexpected keyword"),
    ],
)
def test_another_factor_is_refused_on_every_rank(change, words) -> None:
    for found in run_ranks(second_step, 2, change, 3.0, Sharding(context=2)):
        assert found.startswith("--mtp-num-layers with --context-parallel-size 2")
        assert words in found
