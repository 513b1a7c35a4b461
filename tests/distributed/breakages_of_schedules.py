"""Megatron broken around the model: schedules, what pipeline stages send, the loss scale, the token
count.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from .breakage import (
    IN_PER_TOKEN_MODE,
    IN_THE_OTHER_MODE,
    Break,
    Patch,
    around,
    with_argument,
    wrap,
)
from .breakage import breakage as any_breakage

breakage = functools.partial(any_breakage, is_around_the_model=True)


def skip_backward(place: int, stage: int | None = None) -> Break:
    """Leaves out the backward of the micro-batch at a place, on one stage or all; the stage before
    gets zeros.
    """

    def apply(patch: Patch) -> None:
        seen = {"number": 0, "count": 0}

        def forward_step(right, forward_step_func, data, model, count, *args, **keywords):
            seen["count"] = count
            return right(forward_step_func, data, model, count, *args, **keywords)

        def backward_step(right, input_tensor, *args):
            number, count = seen["number"], seen["count"]
            seen["number"] = (number + 1) % count
            is_here = stage in (None, parallel_state.get_pipeline_model_parallel_rank())
            if number != place % count or not is_here:
                return right(input_tensor, *args)
            inputs = input_tensor if isinstance(input_tensor, list) else [input_tensor]
            zeros = [None if each is None else torch.zeros_like(each) for each in inputs]
            return zeros if isinstance(input_tensor, list) else zeros[0]

        wrap(patch, schedules, "forward_step", forward_step)
        wrap(patch, schedules, "backward_step", backward_step)

    return apply


for name, group, skipped in (
    ("last backward is skipped", "DP2", skip_backward(-1)),
    ("first backward is skipped", "DP2", skip_backward(0)),
    ("middle backward is skipped", "DP2", skip_backward(1)),
    ("last backward is skipped on the first stage", "PP2", skip_backward(-1, stage=0)),
    ("last backward is skipped on the last stage", "PP2", skip_backward(-1, stage=1)),
):
    breakage(group, name=name)(skipped)


def scaled_by(argument: str, number: int) -> Break:
    """Has the schedule's factor of a loss made with another number."""
    return with_argument(schedules, "forward_step_calc_loss", argument, lambda _: number)


for name, group, wrong in (
    ("does not divide by M", "DP2", scaled_by("num_microbatches", 1)),
    ("divides by rank 0's M", "DP2", scaled_by("num_microbatches", 5)),
    ("leaves out the factor CP", "CP2", scaled_by("cp_group_size", 1)),
):
    breakage(group, name=f"schedule {name}", **IN_THE_OTHER_MODE)(wrong)


@breakage("DP2", **IN_PER_TOKEN_MODE)
@around(schedules, "forward_step")
def tokens_of_the_last_micro_batch_alone_are_counted(
    right, *args, current_microbatch=None, **keywords
):
    output, num_tokens = right(*args, current_microbatch=current_microbatch, **keywords)
    return output, num_tokens * int(current_microbatch == args[3] - 1)


def is_num_tokens(tensor: Tensor) -> bool:
    """Of what the ranks exchange only the schedule's count is a 0-d int32."""
    return tensor.dtype == torch.int32 and tensor.dim() == 0


@breakage("DP2", **IN_PER_TOKEN_MODE)
@around(dist, "all_reduce")
def token_count_is_not_reduced_over_data_parallelism(right, tensor, *args, **keywords):
    return None if is_num_tokens(tensor) else right(tensor, *args, **keywords)


@breakage("CP2", **IN_PER_TOKEN_MODE)
@around(dist, "all_reduce")
def token_count_is_not_reduced_over_context_parallelism(right, tensor, *args, **keywords):
    if is_num_tokens(tensor):
        keywords["group"] = parallel_state.get_data_parallel_group()
    return right(tensor, *args, **keywords)


@breakage("PP2", **IN_PER_TOKEN_MODE)
@around(dist, "broadcast")
def token_count_is_not_sent_to_the_first_stage(right, tensor, *args, **keywords):
    return None if is_num_tokens(tensor) else right(tensor, *args, **keywords)


@breakage("DP2", **IN_PER_TOKEN_MODE)
@around(DistributedDataParallel, "scale_gradients")
def gradients_are_not_divided_by_the_token_count(*_): ...


@breakage("PP2 VPP2", **IN_PER_TOKEN_MODE)
@around(DistributedDataParallel, "scale_gradients")
def second_chunk_is_not_divided_by_the_token_count(right, chunk, scaling):
    if not getattr(chunk.module, "vp_stage", 0):
        right(chunk, scaling)


@breakage("DP2", fails="loss scale", passes="gradient")
@around(schedules, "backward_step")
def schedule_ignores_the_loss_scale(right, *arguments):
    config = arguments[-1]
    scale, config.grad_scale_func = config.grad_scale_func, None
    try:
        return right(*arguments)
    finally:
        config.grad_scale_func = scale


@breakage("DP2")
@around(schedules, "forward_step")
def first_backward_is_done_twice(right, *args, current_microbatch=None, **keywords):
    loss, num_tokens = right(*args, current_microbatch=current_microbatch, **keywords)
    return (2.0 * loss if current_microbatch == 0 else loss), num_tokens


def each_message(argument: str, change: Callable[[Tensor], Tensor]) -> Break:
    return with_argument(
        *(P2PCommunicator, "_communicate", argument),
        lambda message: None if message is None else change(message),
    )


@breakage("PP2")
def stage_sends_the_activation_before(patch: Patch) -> None:
    kept: list[Tensor] = []

    def change(message: Tensor) -> Tensor:
        stale = message.detach().clone()
        if kept:
            before, count = kept.pop(), message.size(0)
            stale.zero_()[: before.size(0)] = before[:count]
        kept.append(message.detach().clone())
        return stale

    each_message("tensor_send_next", change)(patch)


breakage("PP2", name="gradient is sent back twice as large", passes="loss only")(
    each_message("tensor_send_prev", lambda message: 2.0 * message)
)
