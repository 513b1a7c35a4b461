"""The settings that Megatron needs from a training loop in addition to the loss. Without them,
gradients are silently wrong.

Sources: distributed/distributed_data_parallel.py, distributed/param_and_grad_buffer.py,
distributed/finalize_model_grads.py and pipeline_parallel/schedules.py of megatron-core 0.16.0 to
0.19.2. `train` of megatron/training/training.py sets all of them.
"""

import weakref
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import finalize_model_grads
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_pg.megatron.groups import ParallelGroups, unwrapped


@dataclass
class _Backward:
    """A chunk's backward passes since its gradients were zeroed, normally of one step."""

    ready_parameters: Any
    """The object of DDP's buffers that `zero_grad_buffer` replaces."""
    begun_by: weakref.ref[Any]
    count: int = 0
    finalization: Any = None


_backward: weakref.WeakKeyDictionary[Any, _Backward] = weakref.WeakKeyDictionary()


def require_training_loop(chunk: Any, groups: ParallelGroups, num_microbatches: int) -> None:
    """Raise ValueError for a loop that leaves gradients unreduced or wrongly scaled.

    It is called with gradients enabled, once per step, when the schedule requests its first
    micro-batch, because a trainer has set the config by then. It does not read the device. The
    (first) chunk's config is wrong if it lacks a needed `finalize_model_grads_func`,
    `grad_scale_func` or `no_sync_func`, or has a different loss mode than DDP.
    """
    config = chunk.config
    unreduced = _unreduced(chunk, groups)
    if unreduced and getattr(config, "finalize_model_grads_func", None) is None:
        wrap = (
            "" if hasattr(chunk, "finish_grad_sync") else ", and wrap the model in Megatron's DDP"
        )
        raise ValueError(
            f"the model's config has no finalize_model_grads_func, and {unreduced}: set "
            "config.finalize_model_grads_func = "
            f"megatron.core.distributed.finalize_model_grads{wrap}. A loop with its own gradient "
            "reduction sets its function there, which the schedule calls after the last backward "
            "pass"
        )
    if getattr(config, "fp16", False) and getattr(config, "grad_scale_func", None) is None:
        raise ValueError(
            "the model's config has fp16=True and no grad_scale_func, but Megatron's optimizer "
            "divides the gradients by its loss scale: set config.grad_scale_func = "
            "optimizer.scale_loss (or lambda loss: loss, if nothing divides)"
        )
    if not getattr(chunk, "bucket_groups", None):  # not Megatron's DDP, or nothing to train
        return
    _require_wrapper(chunk, groups, num_microbatches)


def _unreduced(chunk: Any, groups: ParallelGroups) -> str | None:
    """Describe the gradients that `finalize_model_grads` must reduce for this model and sharding.
    Return None if there are none.
    """
    config = chunk.config
    ranks = groups.data_size * groups.context_size
    if config.calculate_per_token_loss:
        return "per-token mode divides the gradients by the step's tokens there"
    # torch's FSDP, with DTensor parameters, reduces them in backward.
    if ranks > 1 and not isinstance(next(chunk.parameters()), DTensor):
        return f"each of the {ranks} data- and context-parallel ranks holds a part of the gradients"
    norms = getattr(config, "sequence_parallel", False) or getattr(config, "qk_layernorm", False)
    if norms and groups.tensor_size > 1:
        return "each tensor-parallel rank holds a part of the gradients of norms"
    model = unwrapped(chunk)
    shares = getattr(model, "share_embeddings_and_output_weights", False)
    if getattr(config, "pipeline_model_parallel_size", 1) > 1 and (
        shares or getattr(config, "mtp_num_layers", None)
    ):
        return "the first and the last pipeline stage each hold a part of the embedding's gradient"
    if getattr(config, "moe_router_enable_expert_bias", False):
        return "the experts' bias (moe_router_enable_expert_bias) is updated there"
    if "global_aux_loss" in (getattr(config, "moe_router_load_balancing_type", None) or ""):
        return "the experts' token counts of global_aux_loss are reset there"
    return None


def _require_wrapper(chunk: Any, groups: ParallelGroups, num_microbatches: int) -> None:
    """Raise ValueError if settings of Megatron's DDP contradict the model's config."""
    config, settings = chunk.config, chunk.ddp_config
    if settings.overlap_grad_reduce and num_microbatches > 1 and config.no_sync_func is None:
        raise ValueError(
            "DDP has overlap_grad_reduce=True, but the model's config has no no_sync_func: "
            "gradients would be reduced after as many micro-batches as the first step had, and "
            "later ones lost. Set config.no_sync_func = model.no_sync (with several chunks: the "
            "list of their no_sync)"
        )
    factor = chunk.bucket_groups[0].buckets[0].gradient_scaling_factor
    sums = factor == 1.0 and not settings.average_in_collective
    ranks = groups.data_size * groups.context_size
    if ranks > 1 and sums != bool(config.calculate_per_token_loss):
        raise ValueError(
            f"the model's config has calculate_per_token_loss={config.calculate_per_token_loss} "
            f"but DDP was built with the opposite: gradients would be {ranks} times too "
            f"{'large' if sums else 'small'}. Set it before wrapping the model"
        )


@dataclass(eq=False)
class GradientWatch:
    """A check for gradients of an earlier step in DDP's buffers, on the last pipeline stage.

    It counts micro-batches in backward. This distinguishes a step from an evaluation with gradients
    enabled, and an earlier step from a step with one `PolicyStep` per micro-batch.
    """

    chunk: Any
    groups: ParallelGroups
    num_microbatches: int
    accumulates: bool

    def watch(self, loss: Tensor) -> None:
        """Let backward from a micro-batch's loss raise ValueError before it adds gradients to an
        earlier step's.
        """
        if loss.requires_grad and getattr(self.chunk, "bucket_groups", None):
            loss.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, _: Tensor) -> None:
        chunk, passes = self.chunk, _backward.get(self.chunk)
        ready_parameters = chunk.bucket_groups[0].per_param_grad_ready_counts
        if passes is not None and passes.ready_parameters is ready_parameters:
            if passes.count >= self.num_microbatches and passes.begun_by() is not self:
                self._require_accumulation(passes.finalization)
                passes = None
        else:
            passes = None
        if passes is None:
            passes = _backward[chunk] = _Backward(ready_parameters, weakref.ref(self))
        passes.count += 1
        passes.finalization = chunk.config.finalize_model_grads_func

    def _require_accumulation(self, finalization: Any) -> None:
        """Raise ValueError for gradients of an earlier step, unless their sum is requested and
        correct.
        """
        if not self.accumulates:
            raise ValueError(
                "zero_grad_buffer() of the model was not called after the previous step, so its "
                "gradients would be added to this step's: call it on every chunk before each step. "
                "If you want the sum: PolicyStep(accumulate_gradients=True)"
            )
        if self.chunk.config.calculate_per_token_loss:
            raise ValueError(
                "accumulate_gradients=True in per-token mode: the previous step's gradients would "
                "be divided by this step's tokens. Plan the samples of both as one step"
            )
        is_finalized = getattr(finalization, "func", finalization) is finalize_model_grads
        if is_finalized and (unreduced := _unreduced(self.chunk, self.groups)):
            raise ValueError(
                "accumulate_gradients=True after finalize_model_grads, which would reduce the "
                f"previous step's gradients again: {unreduced}. Set "
                "config.finalize_model_grads_func to a function that does nothing for all steps "
                "except the last, or plan the samples of both as one step"
            )
