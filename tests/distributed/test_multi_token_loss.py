"""The loss that Megatron adds to the policy's for multi-token prediction keeps its intended
gradient.

On a Megatron-Core that scales it otherwise: the same gradient, or a refusal in words. The losses of
its routers leave out padding.
"""

from dataclasses import replace
from typing import Any

import pytest
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction

from megatron_pg.config.versions import derives_multi_token_labels
from megatron_pg.megatron import experts

from .cases import AHEAD
from .compare import assert_equal, compare
from .launch import run_ranks
from .models import Sharding
from .one_step import Outcome, run_steps
from .reference import reference_steps
from .steps import Run
from .test_auxiliary_loss import OPTIONS, nothing, sharded_step

needs_multi_token = pytest.mark.skipif(
    not derives_multi_token_labels(), reason="multi-token prediction without labels: 0.19 and later"
)
AHEAD_RUN = Run(regularized=True)


def scaled_in_the_schedule(factor: float) -> None:
    """As pull request 3959 of NVIDIA/Megatron-LM has it: the schedule's scale carries the
    factor.
    """
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
        (scaled_in_the_schedule, "it multiplies by 3.0 instead of 1 or 2"),
        (other_arguments, "unexpected keyword"),
    ],
)
def test_another_factor_is_refused_on_every_rank(change, words) -> None:
    for found in run_ranks(second_step, 2, change, 3.0, Sharding(context=2)):
        assert found.startswith("--mtp-num-layers with --context-parallel-size 2")
        assert words in found


def a_shifted_mask() -> None:
    experts._shifts_padding_mask = lambda layer: False


@needs_multi_token
@pytest.mark.parametrize(
    ("name", "mutate"),
    [("CP2", nothing), ("TP2+SP", nothing), ("PP2 CP2", nothing), ("CP2", a_shifted_mask)],
)
def test_routers_of_multi_token_prediction_leave_out_padding(name, mutate) -> None:
    """Against one process, whose packs need no padding."""
    options = replace(OPTIONS, mtp_num_layers=1)
    sharding = Sharding.named(name)
    whole = run_ranks(sharded_step, 1, "", False, nothing, options)[0]
    outcome = run_ranks(sharded_step, sharding.world_size, name, False, mutate, options)[0]
    if mutate is nothing:
        assert_equal([outcome], [whole])
    else:
        assert compare(outcome, whole).gradient_error > 1e-2
