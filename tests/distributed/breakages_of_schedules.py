"""Megatron broken around the model: schedules, what pipeline stages send, the loss scale, the token count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from .breakage import PER_MICRO_BATCH, PER_TOKEN, Patch, breakage, nothing, with_argument, wrap

TOKEN_COUNT = "num_tokens|token count"
BACKWARD = "backward of a micro-batch"


def each_backward(patch: Patch, wrong: Callable[..., Any]) -> None:
    """Has `wrong(backward, number, last, input_tensor)` run for each micro-batch's backward on this stage."""
    seen = {"number": 0, "count": 0}

    def forward_step(right, forward_step_func, data, model, count, *args, **keywords):  # type: ignore[no-untyped-def]
        seen["count"] = count
        return right(forward_step_func, data, model, count, *args, **keywords)

    def backward_step(right, input_tensor, *args):  # type: ignore[no-untyped-def]
        number = seen["number"]
        seen["number"] = (number + 1) % seen["count"]
        return wrong(lambda: right(input_tensor, *args), number, seen["count"] - 1, input_tensor)

    wrap(patch, schedules, "forward_step", forward_step)
    wrap(patch, schedules, "backward_step", backward_step)


def skip_backward(patch: Patch, is_skipped: Callable[[int, int], bool]) -> None:
    """Leaves out the backward of micro-batches by (number, last); the stage before gets zeros."""

    def wrong(backward: Any, number: int, last: int, input_tensor: Any) -> Any:
        if not is_skipped(number, last):
            return backward()
        inputs = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        zeros = [None if each is None else torch.zeros_like(each) for each in inputs]
        return zeros if isinstance(input_tensor, list) else zeros[0]

    each_backward(patch, wrong)


def on_stage(stage: int) -> bool:
    return parallel_state.get_pipeline_model_parallel_rank() == stage


@breakage("DP2", "micro-batch", "backward")
def last_backward_is_skipped(patch: Patch) -> None:
    skip_backward(patch, lambda number, last: number == last)


@breakage("DP2", "micro-batch", "backward")
def first_backward_is_skipped(patch: Patch) -> None:
    skip_backward(patch, lambda number, last: number == 0)


@breakage("DP2", "micro-batch", "backward")
def middle_backward_is_skipped(patch: Patch) -> None:
    skip_backward(patch, lambda number, last: number == 1)


@breakage("PP2", "micro-batch", "backward")
def last_backward_is_skipped_on_the_first_stage(patch: Patch) -> None:
    skip_backward(patch, lambda number, last: number == last and on_stage(0))


@breakage("PP2", "micro-batch", "backward")
def last_backward_is_skipped_on_the_last_stage(patch: Patch) -> None:
    skip_backward(patch, lambda number, last: number == last and on_stage(1))


@breakage("DP2", r"\bM\b", fails=PER_MICRO_BATCH, passes=PER_TOKEN)
def schedule_does_not_divide_by_the_number_of_micro_batches(patch: Patch) -> None:
    with_argument(patch, schedules, "forward_step_calc_loss", "num_microbatches", lambda count: 1)


@breakage(
    "DP2", "M of another", "5 and 6", fails=PER_MICRO_BATCH, passes=PER_TOKEN, never=(BACKWARD,)
)
def schedule_divides_by_the_micro_batches_of_the_first_rank(patch: Patch) -> None:
    with_argument(patch, schedules, "forward_step_calc_loss", "num_microbatches", lambda count: 5)


@breakage("CP2", "1/2 = 1/CP", fails=PER_MICRO_BATCH, passes=PER_TOKEN)
def schedule_without_the_context_parallel_factor(patch: Patch) -> None:
    with_argument(patch, schedules, "forward_step_calc_loss", "cp_group_size", lambda size: 1)


@breakage("DP2", TOKEN_COUNT, fails=PER_TOKEN, passes=PER_MICRO_BATCH)
def tokens_of_the_last_micro_batch_alone_are_counted(patch: Patch) -> None:
    def forward_step(right, *args, current_microbatch=None, **keywords):  # type: ignore[no-untyped-def]
        output, num_tokens = right(*args, current_microbatch=current_microbatch, **keywords)
        return output, num_tokens * int(current_microbatch == args[3] - 1)

    wrap(patch, schedules, "forward_step", forward_step)


def is_num_tokens(tensor: Tensor) -> bool:
    """Of what the ranks exchange only the schedule's count is a 0-d int32."""
    return tensor.dtype == torch.int32 and tensor.dim() == 0


def count_reduced_over(patch: Patch, group_of: Callable[[], Any] | None) -> None:
    """Has the token count reduced over another group, or over none."""

    def all_reduce(right, tensor, *args, **keywords):  # type: ignore[no-untyped-def]
        if is_num_tokens(tensor):
            if group_of is None:
                return None
            keywords["group"] = group_of()
        return right(tensor, *args, **keywords)

    wrap(patch, dist, "all_reduce", all_reduce)


@breakage("DP2", TOKEN_COUNT, fails=PER_TOKEN, passes=PER_MICRO_BATCH)
def token_count_is_not_reduced_over_data_parallelism(patch: Patch) -> None:
    count_reduced_over(patch, None)


@breakage("CP2", TOKEN_COUNT, fails=PER_TOKEN, passes=PER_MICRO_BATCH)
def token_count_is_not_reduced_over_context_parallelism(patch: Patch) -> None:
    count_reduced_over(patch, parallel_state.get_data_parallel_group)


@breakage("PP2", "stage 0", TOKEN_COUNT, fails=PER_TOKEN, passes=PER_MICRO_BATCH, never=(BACKWARD,))
def token_count_is_not_sent_to_the_first_stage(patch: Patch) -> None:
    def broadcast(right, tensor, *args, **keywords):  # type: ignore[no-untyped-def]
        return None if is_num_tokens(tensor) else right(tensor, *args, **keywords)

    wrap(patch, dist, "broadcast", broadcast)


@breakage("DP2", TOKEN_COUNT, fails=PER_TOKEN, passes=PER_MICRO_BATCH)
def gradients_are_not_divided_by_the_token_count(patch: Patch) -> None:
    nothing(patch, DistributedDataParallel, "scale_gradients")


@breakage("PP2 VPP2", "chunk", TOKEN_COUNT, fails=PER_TOKEN, passes=PER_MICRO_BATCH)
def second_chunk_is_not_divided_by_the_token_count(patch: Patch) -> None:
    def scale_gradients(right, chunk, scaling):  # type: ignore[no-untyped-def]
        if not getattr(chunk.module, "vp_stage", 0):
            right(chunk, scaling)

    wrap(patch, DistributedDataParallel, "scale_gradients", scale_gradients)


@breakage("DP2", "loss scale", fails="loss scale", passes="gradient")
def schedule_ignores_the_loss_scale(patch: Patch) -> None:
    def backward_step(right, input_tensor, output_tensor, gradient, config):  # type: ignore[no-untyped-def]
        scale, config.grad_scale_func = config.grad_scale_func, None
        try:
            return right(input_tensor, output_tensor, gradient, config)
        finally:
            config.grad_scale_func = scale

    wrap(patch, schedules, "backward_step", backward_step)


@breakage("DP2", BACKWARD)
def first_backward_is_done_twice(patch: Patch) -> None:
    def forward_step(right, *args, current_microbatch=None, **keywords):  # type: ignore[no-untyped-def]
        loss, num_tokens = right(*args, current_microbatch=current_microbatch, **keywords)
        return (2.0 * loss if current_microbatch == 0 else loss), num_tokens

    wrap(patch, schedules, "forward_step", forward_step)


def each_message(patch: Patch, argument: str, change: Callable[[Tensor], Tensor]) -> None:
    """Has stages send something else."""

    def changed(message: Tensor | None) -> Tensor | None:
        return None if message is None else change(message)

    with_argument(patch, P2PCommunicator, "_communicate", argument, changed)


@breakage("PP2", "pipeline|stage", "activation")
def stage_sends_the_activation_before(patch: Patch) -> None:
    kept: list[Tensor] = []

    def change(message: Tensor) -> Tensor:
        stale = message.detach().clone()
        if kept:
            before, count = kept.pop(), message.size(0)
            stale.zero_()[: before.size(0)] = before[:count]
        kept.append(message.detach().clone())
        return stale

    each_message(patch, "tensor_send_next", change)


@breakage("PP2", "stage 0", "2 times", passes="loss only")
def gradient_is_sent_back_twice_as_large(patch: Patch) -> None:
    each_message(patch, "tensor_send_prev", lambda message: 2.0 * message)
