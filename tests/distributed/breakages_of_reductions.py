"""Megatron broken after the model: DDP, finalisation of gradients, the optimizer."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer
from megatron.core.optimizer import optimizer as optimizers
from torch import Tensor

from megatron_pg.megatron import training_loop

from .breakage import IN_PER_TOKEN_MODE, IN_THE_OTHER_MODE, PER_TOKEN, Break, Patch, around, wrap
from .breakage import breakage as any_breakage

# The package's attribute of this name is the function.
finalization = importlib.import_module("megatron.core.distributed.finalize_model_grads")
EXPERTS = "expert_parallel_buffers"
BucketGroup = param_and_grad_buffer._ParamAndGradBucketGroup
FP32Optimizer = optimizers.FP32Optimizer

LATER = "gspo|loss scale|recompute|update"
"""Of each model, the rows after its first step."""
breakage = functools.partial(any_breakage, is_around_the_model=True)


def each_bucket_reduction(spoil: Callable[[Tensor, Tensor], Any]) -> Break:
    """Has `spoil(reduced, own)` change each bucket after its reduction; own is this rank's
    share.
    """

    @around(BucketGroup, "start_grad_sync")
    @functools.wraps(spoil)
    def start_grad_sync(right, group, *args, **keywords):
        own = [bucket.grad_data * bucket.gradient_scaling_factor for bucket in group.buckets]
        right(group, *args, **keywords)
        for bucket, share in zip(group.buckets, own, strict=True):
            spoil(bucket.grad_data, share)

    return start_grad_sync


@breakage("DP2")
@each_bucket_reduction
def gradients_are_not_reduced(reduced, own):
    reduced.copy_(own)


@breakage("DP2")
@each_bucket_reduction
def one_part_of_the_gradients_is_not_reduced(reduced, own):
    part = slice(reduced.numel() // 4, reduced.numel() // 2)
    reduced[part] = own[part]


@breakage("DP2")
@each_bucket_reduction
def gradients_are_reduced_in_bfloat16(reduced, own):
    reduced.copy_(reduced.to(torch.bfloat16))


@breakage("DP2")
@each_bucket_reduction
def gradients_are_those_of_the_first_rank(reduced, own):
    reduced.copy_(dist.get_world_size() * own)
    dist.broadcast(reduced, 0)


@breakage("DP2 distributed optimizer")
@each_bucket_reduction
def reduce_scatter_drops_the_second_shard(reduced, own):
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 1:
        reduced.chunk(size)[rank].copy_(own.chunk(size)[rank])


@breakage("DP2")
@around(DistributedDataParallel, "_make_backward_post_hook")
def gradients_are_accumulated_in_bfloat16(right, ddp, parameter):
    hook = right(ddp, parameter)

    def wrong(*unused: Any) -> None:
        hook(*unused)
        parameter.main_grad.copy_(parameter.main_grad.to(torch.bfloat16))

    return wrong


@breakage("bf16", passes="loss only|fp32")
@around(DistributedDataParallel, "_make_backward_post_hook")
def gradients_of_bf16_are_not_accumulated(right, ddp, parameter):
    hook = right(ddp, parameter)

    def wrong(*unused: Any) -> None:
        if parameter.dtype == torch.bfloat16:
            parameter.main_grad.zero_()
        hook(*unused)

    return wrong


def each_wrapped_model(change: Callable[[Any], None]) -> Break:
    """Has every model changed once DDP has it, as the reference never is."""

    @around(DistributedDataParallel, "__init__")
    @functools.wraps(change)
    def init(right, ddp, *args, **keywords):
        right(ddp, *args, **keywords)
        change(ddp)

    return init


@breakage("DP2", passes="loss only")
@each_wrapped_model
def dropout_is_left_on(ddp):
    for module in ddp.modules():
        if hasattr(module, "hidden_dropout"):
            module.hidden_dropout = 0.1


@breakage("DP2", passes="loss only")
@each_wrapped_model
def second_rank_has_other_parameters(ddp):
    for name, parameter in ddp.named_parameters():
        if "linear_fc1.weight" in name:
            parameter.data.mul_(1.0 + 0.5 * dist.get_rank())


@breakage("PP2 VPP2")
@around(DistributedDataParallel, "__init__")
def second_chunk_is_scaled_twice(right, ddp, *args, **keywords):
    right(ddp, *args, **keywords)
    for buffer in ddp.buffers if keywords["disable_bucketing"] else ():
        for bucket in buffer.buckets:
            bucket.gradient_scaling_factor *= 2.0


@breakage("CP2")
@around(BucketGroup, "start_grad_sync")
def gradients_are_reduced_without_context_parallelism(right, group, *args, **keywords):
    group.data_parallel_group = parallel_state.get_data_parallel_group()
    return right(group, *args, **keywords)


@breakage("DP2 overlap", fails=LATER)
@around(BucketGroup, "register_grad_ready")
def overlapped_reduction_starts_a_micro_batch_early(right, group, *args, **keywords):
    if not group.is_first_batch:  # which counts the parameters
        group.is_last_microbatch = True
    return right(group, *args, **keywords)


def bucket_factor(factor: float, buffers: str = "buffers") -> Break:

    @each_wrapped_model
    def scale(ddp):
        for buffer in getattr(ddp, buffers):
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = factor

    def apply(patch: Patch) -> None:
        # `PolicyStep` refuses a factor of the other loss mode before the check could see it.
        patch.setattr(training_loop, "_require_wrapper", lambda *_: None)
        scale(patch)

    return apply


for name, group, wrong, rows in (
    ("averaged in per-token mode", "DP2", bucket_factor(0.5), IN_PER_TOKEN_MODE),
    ("summed in the other mode", "DP2", bucket_factor(1.0), IN_THE_OTHER_MODE),
    ("not scaled for experts", "EP2", bucket_factor(1.0, EXPERTS), {"passes": PER_TOKEN}),
):
    breakage(group, name=f"gradients are {name}", **rows)(wrong)


@breakage("DP2", fails=LATER)
@around(param_and_grad_buffer._ParamAndGradBuffer, "reset")
def gradients_of_the_step_before_are_kept(*_): ...


@breakage("TP2 SP", passes="loss only")
@around(finalization, "_allreduce_non_tensor_model_parallel_grads")
def sequence_parallel_gradients_are_not_reduced(*_, **keywords): ...


@breakage("PP2", fails="tied", passes="loss only|end to end")
@around(finalization, "_allreduce_word_embedding_grads")
def tied_embeddings_are_not_reduced(*_, **keywords): ...


@breakage("DP2 distributed optimizer", fails="update")
@around(BucketGroup, "start_param_sync")
def parameters_are_not_gathered_after_the_update(*_, **keywords): ...


@breakage("TP2 SP", passes="loss only")
@around(finalization, "_allreduce_non_tensor_model_parallel_grads")
def sequence_parallel_biases_are_not_reduced(right, model, *args, **keywords):
    biases = [
        parameter
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if name.endswith(("linear_proj.bias", "linear_fc2.bias"))
    ]
    for bias in biases:
        bias.sequence_parallel = False
    right(model, *args, **keywords)
    for bias in biases:
        bias.sequence_parallel = True


def norm_of(group_of: Callable[[], Any]) -> Break:
    """Has the gradient norm reduced over another group."""

    @around(optimizers, "get_grad_norm_fp32")
    def get_grad_norm_fp32(right, gradients, *args, **keywords):
        return right(gradients, *args, **keywords | {"grad_stats_parallel_group": group_of()})

    return get_grad_norm_fp32


norm_of_a_shard = norm_of(parallel_state.get_tensor_model_parallel_group)
norm_of_this_rank = norm_of(parallel_state.get_data_parallel_group)
"""Where the data-parallel group has but one rank."""
for name, group, wrong in (
    ("of one shard", "DP2 distributed optimizer", norm_of_a_shard),
    ("not reduced over tensor parallelism", "TP2 SP", norm_of_this_rank),
    ("not reduced over the pipeline", "PP2", norm_of_this_rank),
):
    breakage(group, name=f"gradient norm is {name}", fails="update")(wrong)


@breakage("TP2 SP", fails="update")
@around(tensor_parallel, "param_is_not_tensor_parallel_duplicate")
def gradient_norm_counts_replicas_twice(*args, **keywords):
    return True


def each_optimizer_step(wrong: Callable[..., Any]) -> Break:
    """Has `wrong(step, groups)` run in the place of each update; groups are torch's parameter
    groups.
    """

    @functools.wraps(wrong)
    def apply(patch: Patch) -> None:
        def step_with_ready_grads(right, owner):
            return wrong(lambda: right(owner), owner.optimizer.param_groups)

        for owner in (FP32Optimizer, optimizers.MixedPrecisionOptimizer):
            wrap(patch, owner, "step_with_ready_grads", step_with_ready_grads)

    return apply


@breakage("DP2", fails="update")
@each_optimizer_step
def learning_rate_is_doubled(step, groups):
    for group in groups:
        group["lr"] *= 2.0
    result = step()
    for group in groups:
        group["lr"] /= 2.0
    return result


@breakage("DP2", fails="update")
@each_optimizer_step
def weight_decay_is_dropped(step, groups):
    for group in groups:
        group["weight_decay"] = 0.0
    return step()


@breakage("DP2", fails="update")
@each_optimizer_step
def optimizer_skips_a_parameter(step, groups):
    parameter = groups[0]["params"][0]
    before = parameter.detach().clone()
    result = step()
    parameter.data.copy_(before)
    return result


@breakage("DP2", fails="update", passes="gradient")
@around(FP32Optimizer, "prepare_grads")
def one_gradient_of_the_step_is_stale(right, owner):
    gradients = [parameter.main_grad for parameter in owner.get_parameters()]
    # Of a hundredth of the largest norm: the norm of all shows it, and the parameter more.
    share = 0.01 * max(float(gradient.norm()) for gradient in gradients)
    min(gradients, key=lambda gradient: abs(float(gradient.norm()) - share)).mul_(1.5)
    return right(owner)
