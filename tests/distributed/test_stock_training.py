"""The two lines, added to an unchanged megatron.training train step, give the reference's
gradients.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator, initialize_rerun_state_machine
from megatron.training import arguments, global_vars, training

import megatron_pg as pg
from megatron_pg import PackedBatch
from megatron_pg.megatron import PolicyStep
from tests.random_steps import package_samples, uneven_totals

from .compare import gradient_tolerance
from .launch import run_ranks
from .models import (
    ModelOptions,
    Sharding,
    build_model,
    gather_gradients,
    initialize_groups,
    relative_error,
)
from .one_step import Outcome
from .reference import reference_steps
from .steps import AGGREGATIONS, DIVISOR, Run

pytestmark = pytest.mark.full

COMMAND_LINE = """
    train --num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 --train-iters 1
    --lr 1e-3 --lr-decay-style constant --context-parallel-size 2 --distributed-backend gloo
    --transformer-impl local --tokenizer-type NullTokenizer --vocab-size 16
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
    --attention-backend unfused --eval-iters 0
"""
"""A Megatron launch line as its users write it; --global-batch-size 2 makes two micro-batches a
step."""


def stock_step(
    run: Run, flags: Sequence[str], cut: tuple[int, int]
) -> tuple[Outcome | None, dict[str, float]]:
    """The gradients that train_step leaves behind (on rank 0), and what it returns to be logged.

    The first micro-batch ends before one sample, and the second begins with another.
    """
    sharding = Sharding(context=2)
    args = _parsed(flags)
    config = pg.PolicyLossConfig.from_args(args)
    initialize_groups(sharding)
    options = ModelOptions(calculate_per_token_loss=args.calculate_per_token_loss)
    chunks = build_model(sharding, options)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=args.lr, clip_grad=0.0), chunks)
    scheduler = training.get_optimizer_param_scheduler(optimizer)
    model_config = chunks[0].config
    model_config.finalize_model_grads_func = finalize_model_grads

    samples = package_samples(run.samples)
    micro_batches = [samples[: cut[0]], samples[cut[1] :]]
    count = get_num_microbatches()
    step = PolicyStep(config, totals=uneven_totals(samples), num_microbatches=count, model=chunks)

    def batches() -> Iterator[PackedBatch]:
        rank = torch.distributed.get_rank()
        for part in micro_batches:
            yield pg.pack(part, cp_rank=rank, cp_size=2)

    def forward_step(data_iterator: Iterator[PackedBatch], model: Any) -> tuple[Any, Any]:
        batch = next(data_iterator)
        head = step.head(batch)
        return model(**head.model_inputs), head.loss_func

    logged, skipped, *_ = training.train_step(
        forward_step,
        RerunDataIterator(batches()),
        chunks,
        optimizer,
        scheduler,
        model_config,
        get_forward_backward_func(),
        iteration=0,
    )
    if skipped:
        raise RuntimeError("train_step skipped the step")
    # The optimizer's step changes parameters and leaves the gradients in their buffers.
    gradients = gather_gradients(chunks)
    outcome = None if gradients is None else Outcome(gradients, {})
    return outcome, {name: float(value) for name, value in logged.items()}


def _parsed(flags: Sequence[str]) -> Any:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # validate_args wants it under CP
    sys.argv = [*COMMAND_LINE.split(), *flags]
    args = arguments.parse_args(extra_args_provider=pg.add_policy_loss_args)
    args = pg.validate_policy_loss_args(args)
    args = arguments.validate_args(args)
    global_vars.set_global_variables(args, build_tokenizer=False)
    initialize_rerun_state_machine()
    return args


def run_stock(aggregation: str, cut: object, *flags: str) -> tuple[object, dict[str, float]]:
    divisor = ["--pg-loss-divisor", str(DIVISOR)] if aggregation == "constant" else []
    flags = ("--loss-aggregation", aggregation, *divisor, *flags)
    return run_ranks(stock_step, 2, Run(aggregation), flags, cut)[0]


@pytest.mark.parametrize("flags", [[], ["--fused-lm-head"]], ids=["logits", "fused"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_stock_train_step_has_the_reference_gradients(aggregation: str, flags: list[str]) -> None:
    """Its check of losses for NaN and its rerun state machine are on: they see no loss that
    backward fills in.
    """
    outcome, logged = run_stock(aggregation, (5, 5), *flags)
    (reference,) = run_ranks(reference_steps, 1, ModelOptions(), [Run(aggregation)])[0]
    tolerance = gradient_tolerance(ModelOptions())
    for name, gradient in outcome.gradients.items():
        assert relative_error(gradient, reference.gradients[name]) < tolerance, name
    for name in ("loss", "pg_loss", "aggregation_checksum", "new_logprobs", "ratio_new_old"):
        expected = reference.metrics[name]
        assert logged[name] == pytest.approx(expected, rel=2e-6, abs=2e-6), name


@pytest.mark.parametrize("cut, too_large", [((6, 5), True), ((5, 6), False)])
def test_the_logged_checksum_names_a_sample_trained_on_twice_or_never(cut, too_large):
    _, logged = run_stock("sample_mean", cut)
    assert abs(logged["aggregation_checksum"] - 1) > 0.01
    assert (logged["aggregation_checksum"] > 1) == too_large
