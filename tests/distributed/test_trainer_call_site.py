"""The reducers of `megatron_pg.integrations` through real Megatron, scaled as such a trainer scales
them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_pg import integrations
from megatron_pg.config.custom import load_custom_function
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.head import log_probs_and_entropy
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.loss.objectives import get_objective
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals
from tests.fast.sequences import tokens_and_sums
from tests.oracle import PlainSample
from tests.random_steps import random_step

from .compare import assert_equal, compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .reference import reference_steps
from .steps import DIVISOR, NUM_SAMPLES, Run

SHARDING = Sharding(context=2, data=2)
MODES = {"sample_mean": False, "constant": False, "token_mean": True}
"""The aggregations offered, and the --calculate-per-token-loss that each needs."""


@dataclass(frozen=True)
class TrainerRun(Run):
    """Rollouts of one sample each and, in per-token mode, a token in each: what the call site can
    count.
    """

    @property
    def samples(self) -> list[PlainSample]:
        step = [replace(sample, rollout_id=None) for sample in random_step(3, num_samples=16)]
        if MODES[self.aggregation]:
            step = [sample for sample in step if sum(sample.loss_mask)]
        return step[:NUM_SAMPLES]


def trainer_loss(
    config: PolicyLossConfig, batch: PackedBatch, totals: StepTotals, *, num_microbatches, model
) -> Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """A loss_func as slime and miles build theirs: reducer by path, their own scale, three values
    in both modes.
    """
    path = f"megatron_pg.integrations.{config.loss_aggregation}"
    per_token = model[0].config.calculate_per_token_loss
    context_size = parallel_state.get_context_parallel_world_size()

    def loss_func(output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        log_probs, _ = log_probs_and_entropy(
            output_tensor[0], batch.targets, row_mask=batch.row_mask
        )
        log_probs = log_probs[batch.logit_rows]
        lengths = list(batch.window.total_lengths), list(batch.window.response_lengths)
        masks = [sample.loss_mask for sample in batch.samples]
        function = load_custom_function("custom_pg_loss_reducer_function_path", path)
        outcome = get_objective(config)(config, *tokens_and_sums(config, batch, log_probs))
        loss = function(*lengths, masks, per_token)(outcome.loss)
        scores = (log_probs.detach(), None)
        _, metrics = policy_loss_from_log_probs(config, batch, *scores, totals=totals)
        count = sum(max(sample.num_active_tokens, 1) for sample in batch.samples)
        num_tokens = torch.tensor(count if per_token else 1, dtype=torch.int32)
        if per_token:
            return loss * context_size, num_tokens, metrics
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return loss * num_microbatches / totals.num_rollouts * ranks, num_tokens, metrics

    return loss_func


def off_by_context_parallel(*arguments: Any, **keywords: Any) -> Callable[[Tensor], Any]:
    """The same loss with a factor CP too much."""
    loss_func = trainer_loss(*arguments, **keywords)

    def scaled(output_tensor: Tensor) -> Any:
        loss, num_tokens, metrics = loss_func(output_tensor)
        return loss * 2, num_tokens, metrics

    return scaled


def trainer_steps(aggregation: str) -> list[Outcome | None]:
    os.environ[integrations.DIVISOR_VARIABLE] = str(DIVISOR)
    options = ModelOptions(calculate_per_token_loss=MODES[aggregation])
    chunks = build(SHARDING, options)
    run = TrainerRun(aggregation)
    return [
        train_step(chunks, SHARDING, run, loss=loss)
        for loss in (trainer_loss, off_by_context_parallel)
    ]


@pytest.fixture(scope="module")
def references() -> dict[str, Outcome]:
    runs = [TrainerRun(aggregation) for aggregation in MODES]
    return dict(zip(MODES, run_ranks(reference_steps, 1, ModelOptions(), runs)[0], strict=True))


@pytest.mark.parametrize("aggregation", MODES)
def test_gradients_equal_the_unsharded_reference(aggregation, references):
    steps, expected = run_ranks(trainer_steps, 4, aggregation)[0], references[aggregation]
    # The metrics of such a trainer are its own.
    steps = [replace(step, metrics=expected.metrics) for step in steps]
    assert_equal(steps[:1], [expected])
    assert not compare(steps[1], expected).passed
