"""Megatron broken after the model: DDP, finalisation of gradients, the optimizer."""

from __future__ import annotations

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

from .breakage import PER_MICRO_BATCH, PER_TOKEN, Patch, breakage, nothing, wrap

# The package's attribute of this name is the function.
finalization = importlib.import_module("megatron.core.distributed.finalize_model_grads")
BucketGroup = param_and_grad_buffer._ParamAndGradBucketGroup

REPLICAS_OF_DATA = "replicas disagree.*data-parallel"
BACKWARD = "backward of a micro-batch"
LATER = "gspo|loss scale|recompute|update"
"""Of each model, the rows after its first step."""


def each_bucket_reduction(patch: Patch, spoil: Callable[[Any, Tensor, Tensor], None]) -> None:
    """Has `spoil(bucket_group, reduced, own)` change each bucket after its reduction; own is this rank's share."""

    def start_grad_sync(right, group, *args, **keywords):  # type: ignore[no-untyped-def]
        own = [bucket.grad_data * bucket.gradient_scaling_factor for bucket in group.buckets]
        right(group, *args, **keywords)
        for bucket, share in zip(group.buckets, own, strict=True):
            spoil(group, bucket.grad_data, share)

    wrap(patch, BucketGroup, "start_grad_sync", start_grad_sync)


@breakage("DP2", REPLICAS_OF_DATA)
def gradients_are_not_reduced(patch: Patch) -> None:
    each_bucket_reduction(patch, lambda group, reduced, own: reduced.copy_(own))


@breakage("DP2", REPLICAS_OF_DATA)
def one_part_of_the_gradients_is_not_reduced(patch: Patch) -> None:
    def spoil(group: Any, reduced: Tensor, own: Tensor) -> None:
        part = slice(reduced.numel() // 4, reduced.numel() // 2)
        reduced[part] = own[part]

    each_bucket_reduction(patch, spoil)


@breakage("DP2", "bf16|bfloat16", never=(BACKWARD,))
def gradients_are_reduced_in_bfloat16(patch: Patch) -> None:
    each_bucket_reduction(
        patch, lambda group, reduced, own: reduced.copy_(reduced.to(torch.bfloat16))
    )


@breakage("DP2", "bf16|bfloat16", never=(BACKWARD,))
def gradients_are_accumulated_in_bfloat16(patch: Patch) -> None:
    def make(right, ddp, parameter):  # type: ignore[no-untyped-def]
        hook = right(ddp, parameter)

        def wrong(*unused: Any) -> None:
            hook(*unused)
            parameter.main_grad.copy_(parameter.main_grad.to(torch.bfloat16))

        return wrong

    wrap(patch, DistributedDataParallel, "_make_backward_post_hook", make)


@breakage("DP2", "gradients of one rank")
def gradients_are_those_of_the_first_rank(patch: Patch) -> None:
    def spoil(group: Any, reduced: Tensor, own: Tensor) -> None:
        reduced.copy_(dist.get_world_size() * own)
        dist.broadcast(reduced, 0)

    each_bucket_reduction(patch, spoil)


def each_wrapped_model(patch: Patch, change: Callable[[Any], None]) -> None:
    """Has every model changed once DDP has it, as the reference never is."""

    def init(right, ddp, *args, **keywords):  # type: ignore[no-untyped-def]
        right(ddp, *args, **keywords)
        change(ddp)

    wrap(patch, DistributedDataParallel, "__init__", init)


@breakage("DP2", "dropout", passes="loss only")
def dropout_is_left_on(patch: Patch) -> None:
    def change(ddp: Any) -> None:
        for module in ddp.modules():
            if hasattr(module, "hidden_dropout"):
                module.hidden_dropout = 0.1

    each_wrapped_model(patch, change)


@breakage("DP2", "data-parallel rank.*other parameters", passes="loss only")
def second_rank_has_other_parameters(patch: Patch) -> None:
    def change(ddp: Any) -> None:
        for name, parameter in ddp.named_parameters():
            if "linear_fc1.weight" in name:
                parameter.data.mul_(1.0 + 0.5 * dist.get_rank())

    each_wrapped_model(patch, change)


@breakage("PP2 VPP2", "chunk", "2 times", never=(BACKWARD,))
def second_chunk_is_scaled_twice(patch: Patch) -> None:
    def init(right, ddp, *args, **keywords):  # type: ignore[no-untyped-def]
        right(ddp, *args, **keywords)
        for buffer in ddp.buffers if keywords["disable_bucketing"] else ():
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor *= 2.0

    wrap(patch, DistributedDataParallel, "__init__", init)


@breakage("CP2", "replicas disagree.*context-parallel")
def gradients_are_reduced_without_context_parallelism(patch: Patch) -> None:
    def start_grad_sync(right, group, *args, **keywords):  # type: ignore[no-untyped-def]
        group.data_parallel_group = parallel_state.get_data_parallel_group()
        return right(group, *args, **keywords)

    wrap(patch, BucketGroup, "start_grad_sync", start_grad_sync)


@breakage("DP2 distributed optimizer", "reduc", "--use-distributed-optimizer", never=(BACKWARD,))
def reduce_scatter_drops_the_second_shard(patch: Patch) -> None:
    def spoil(group: Any, reduced: Tensor, own: Tensor) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if rank == 1:
            reduced.chunk(size)[rank].copy_(own.chunk(size)[rank])

    each_bucket_reduction(patch, spoil)


@breakage("DP2 overlap", "--overlap-grad-reduce", fails=LATER)
def overlapped_reduction_starts_a_micro_batch_early(patch: Patch) -> None:
    def register_grad_ready(right, group, *args, **keywords):  # type: ignore[no-untyped-def]
        if not group.is_first_batch:  # which counts the parameters
            group.is_last_microbatch = True
        return right(group, *args, **keywords)

    wrap(patch, BucketGroup, "register_grad_ready", register_grad_ready)


def bucket_factors(
    patch: Patch, change: Callable[[Any, float], float], buffers: str = "buffers"
) -> None:
    """Has DDP scale its buckets by `change(config, factor)`."""
    # `PolicyStep` refuses a factor of the other loss mode before the check could see it.
    patch.setattr(training_loop, "_require_wrapper", lambda *_: None)

    def init(right, ddp, config, *args, **keywords):  # type: ignore[no-untyped-def]
        right(ddp, config, *args, **keywords)
        for buffer in getattr(ddp, buffers):
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = change(config, bucket.gradient_scaling_factor)

    wrap(patch, DistributedDataParallel, "__init__", init)


@breakage("DP2", "1/2 = 1/DP", "DDP", fails=PER_TOKEN, passes=PER_MICRO_BATCH)
def gradients_are_averaged_in_per_token_mode(patch: Patch) -> None:
    bucket_factors(patch, lambda config, factor: 0.5)


@breakage("DP2", "2 = DP", fails=PER_MICRO_BATCH, passes=PER_TOKEN)
def gradients_are_summed_in_the_other_mode(patch: Patch) -> None:
    bucket_factors(patch, lambda config, factor: 1.0)


@breakage("EP2", "expert", "2 = ", fails="end to end", passes=PER_TOKEN)
def gradients_of_experts_are_not_scaled(patch: Patch) -> None:
    bucket_factors(patch, lambda config, factor: 1.0, "expert_parallel_buffers")


@breakage("DP2", "step before", "zero_grad", fails=LATER)
def gradients_of_the_step_before_are_kept(patch: Patch) -> None:
    nothing(patch, param_and_grad_buffer._ParamAndGradBuffer, "reset")


@breakage("bf16", "bf16", passes="loss only|fp32")
def gradients_of_bf16_are_not_accumulated(patch: Patch) -> None:
    def make(right, ddp, parameter):  # type: ignore[no-untyped-def]
        hook = right(ddp, parameter)

        def wrong(*unused: Any) -> None:
            if parameter.dtype == torch.bfloat16:
                parameter.main_grad.zero_()
            hook(*unused)

        return wrong

    wrap(patch, DistributedDataParallel, "_make_backward_post_hook", make)


@breakage("TP2 SP", "replicas disagree.*tensor-parallel", "norm", passes="loss only")
def sequence_parallel_gradients_are_not_reduced(patch: Patch) -> None:
    nothing(patch, finalization, "_allreduce_non_tensor_model_parallel_grads")


@breakage("TP2 SP", "replicas disagree.*tensor-parallel", "bias", passes="loss only")
def sequence_parallel_biases_are_not_reduced(patch: Patch) -> None:
    def reduce(right, model, *args, **keywords):  # type: ignore[no-untyped-def]
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

    wrap(patch, finalization, "_allreduce_non_tensor_model_parallel_grads", reduce)


@breakage("PP2", "replicas disagree", "tied|embedding", fails="tied", passes="loss only|end to end")
def tied_embeddings_are_not_reduced(patch: Patch) -> None:
    nothing(patch, finalization, "_allreduce_word_embedding_grads")


def norm_of_this_rank_alone(patch: Patch) -> None:
    """Has the gradient norm reduced over one rank, where the data-parallel group has but one."""

    def get_grad_norm_fp32(right, gradients, *args, **keywords):  # type: ignore[no-untyped-def]
        keywords["grad_stats_parallel_group"] = parallel_state.get_data_parallel_group()
        return right(gradients, *args, **keywords)

    wrap(patch, optimizers, "get_grad_norm_fp32", get_grad_norm_fp32)


@breakage(
    "DP2 distributed optimizer", "gradient norm", "data-parallel", fails="update", never=("twice",)
)
def gradient_norm_is_of_one_shard(patch: Patch) -> None:
    def get_grad_norm_fp32(right, gradients, *args, **keywords):  # type: ignore[no-untyped-def]
        keywords["grad_stats_parallel_group"] = parallel_state.get_tensor_model_parallel_group()
        return right(gradients, *args, **keywords)

    wrap(patch, optimizers, "get_grad_norm_fp32", get_grad_norm_fp32)


@breakage("TP2 SP", "gradient norm", "tensor-parallel", fails="update", never=("twice",))
def gradient_norm_is_not_reduced_over_tensor_parallelism(patch: Patch) -> None:
    norm_of_this_rank_alone(patch)


@breakage("PP2", "gradient norm", "pipeline", fails="update", never=("twice",))
def gradient_norm_is_not_reduced_over_the_pipeline(patch: Patch) -> None:
    norm_of_this_rank_alone(patch)


@breakage("TP2 SP", "gradient norm", "replica", "twice", fails="update", never=("not summed",))
def gradient_norm_counts_replicas_twice(patch: Patch) -> None:
    patch.setattr(
        tensor_parallel, "param_is_not_tensor_parallel_duplicate", lambda *args, **keywords: True
    )


def each_optimizer_step(patch: Patch, wrong: Callable[..., Any]) -> None:
    """Has `wrong(step, groups)` run in the place of each update; groups are torch's parameter groups."""

    def step_with_ready_grads(right, owner):  # type: ignore[no-untyped-def]
        return wrong(lambda: right(owner), owner.optimizer.param_groups)

    for owner in (optimizers.FP32Optimizer, optimizers.MixedPrecisionOptimizer):
        wrap(patch, owner, "step_with_ready_grads", step_with_ready_grads)


@breakage("DP2", "2 times", "learning rate", fails="update", never=("= DP",))
def learning_rate_is_doubled(patch: Patch) -> None:
    def wrong(step: Any, groups: Any) -> Any:
        for group in groups:
            group["lr"] *= 2.0
        result = step()
        for group in groups:
            group["lr"] /= 2.0
        return result

    each_optimizer_step(patch, wrong)


@breakage("DP2", "weight decay", fails="update")
def weight_decay_is_dropped(patch: Patch) -> None:
    def wrong(step: Any, groups: Any) -> Any:
        for group in groups:
            group["weight_decay"] = 0.0
        return step()

    each_optimizer_step(patch, wrong)


@breakage("DP2", "stale", fails="update", passes="gradient", never=("twice", "not summed"))
def one_gradient_of_the_step_is_stale(patch: Patch) -> None:
    def prepare_grads(right, owner):  # type: ignore[no-untyped-def]
        gradients = [parameter.main_grad for parameter in owner.get_parameters()]
        # Of a hundredth of the largest norm: the norm of all shows it, and the parameter more.
        share = 0.01 * max(float(gradient.norm()) for gradient in gradients)
        min(gradients, key=lambda gradient: abs(float(gradient.norm()) - share)).mul_(1.5)
        return right(owner)

    wrap(patch, optimizers.FP32Optimizer, "prepare_grads", prepare_grads)


@breakage("DP2", "not updated|skipped|did not (move|change)", fails="update")
def optimizer_skips_a_parameter(patch: Patch) -> None:
    def wrong(step: Any, groups: Any) -> Any:
        parameter = groups[0]["params"][0]
        before = parameter.detach().clone()
        result = step()
        parameter.data.copy_(before)
        return result

    each_optimizer_step(patch, wrong)


@breakage("DP2 distributed optimizer", "update|gather", fails="update")
def parameters_are_not_gathered_after_the_update(patch: Patch) -> None:
    nothing(patch, BucketGroup, "start_param_sync")
