"""The settings that Megatron needs from a training loop in addition to the loss. Without them,
gradients are silently wrong.

Sources: distributed/distributed_data_parallel.py, distributed/param_and_grad_buffer.py,
distributed/finalize_model_grads.py and pipeline_parallel/schedules.py of megatron-core 0.16.0 to
0.19.2. `train` of megatron/training/training.py sets all of them.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_pg.megatron.groups import ParallelGroups, chunks_of, unwrapped
from megatron_pg.megatron.scale_contract import has_router_loss


@dataclass
class _Backward:
    """A chunk's backward passes since its gradients were zeroed, normally of one step."""

    ready_parameters: Any
    """The object of DDP's buffers that `zero_grad_buffer` replaces."""
    begun_by: weakref.ref[Any]
    count: int = 0
    finalization: Any = None


_backward: weakref.WeakKeyDictionary[Any, _Backward] = weakref.WeakKeyDictionary()


def _holds_gradients(chunk: Any) -> bool:
    """Tell whether backward passes have added to DDP's gradients since they were zeroed."""
    passes = _backward.get(chunk)
    if passes is None:
        return False
    return passes.ready_parameters is chunk.bucket_groups[0].per_param_grad_ready_counts


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
    size = getattr(config, "context_parallel_size", groups.context_size)
    if size != groups.context_size:
        raise ValueError(
            f"the model's config has context_parallel_size={size}, but its context-parallel group "
            f"has {groups.context_size} ranks, and attention may read either: build the model with "
            f"TransformerConfig(context_parallel_size={groups.context_size})"
        )
    if hasattr(chunk, "param_to_bucket_group"):
        _require_held_parameters(chunk)
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


def _require_held_parameters(chunk: Any) -> None:
    """Raise ValueError for a trainable parameter that DDP does not know."""
    for name, parameter in chunk.module.named_parameters():
        if parameter.requires_grad and parameter not in chunk.param_to_bucket_group:
            raise ValueError(
                f"{name} became trainable after the model was wrapped, so DDP does not reduce its "
                "gradient: add adapters and set requires_grad before DistributedDataParallel"
            )


@dataclass(eq=False)
class AcceptedCount:
    """A factor for the gradients of one step: its tokens over its accepted tokens.

    It replaces the trainer's `finalize_model_grads_func` for the step, calls it, and multiplies
    the gradients afterwards, because only the trained forward passes count the accepted tokens. The
    count stays on the device: one all-reduce of one number over all ranks, without host
    synchronization.
    """

    groups: ParallelGroups
    device: torch.device
    config: Any = None
    func: Any = None  # the trainer's, which may be None
    shares: list[Tensor] = field(default_factory=list)
    """Per micro-batch whose backward pass has begun: its accepted tokens over the step's tokens."""

    def watch(self, loss: Tensor, pair: Tensor) -> None:
        """Count a micro-batch once its backward pass begins. `pair` is its metric `pg_loss`."""
        if loss.requires_grad:
            # Read later, because the fused head fills it in backward.
            loss.register_hook(lambda _: self.shares.append(pair[1]))  # type: ignore[no-untyped-call]

    def put_in(self, config: Any) -> None:
        """Replace the model config's function until the end of the step."""
        self.config, self.func = config, config.finalize_model_grads_func
        config.finalize_model_grads_func = self

    def __call__(self, model: Any, *arguments: Any, **keywords: Any) -> None:
        self.config.finalize_model_grads_func = self.func
        if self.func is not None:
            self.func(model, *arguments, **keywords)
        share = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.groups.contributes and self.shares:
            share += torch.stack(self.shares).sum()
        self.shares.clear()
        dist.all_reduce(share)
        # If no token is accepted, all gradients are 0.
        factor = torch.where(share == 0, 1.0, 1 / share)
        for chunk in chunks_of(model):
            chunk.scale_gradients(factor)

    def require_end(self) -> None:
        """Raise ValueError for a step whose gradients were not scaled."""
        if self.shares:
            raise ValueError(
                "--rejection-denominator accepted: the gradients of this step are not divided by "
                "its accepted tokens, because nothing has called the model config's "
                "finalize_model_grads_func after the last micro-batch. Run the step in Megatron's "
                "schedule (get_forward_backward_func), which calls it"
            )


def require_scalable_gradients(chunk: Any, accumulates: bool) -> None:
    """Raise ValueError for gradients that an `AcceptedCount` cannot multiply or that have other
    terms.
    """
    # FSDP2's wrapper has the method, but it does nothing.
    can_scale = hasattr(chunk, "scale_gradients")
    if not can_scale or isinstance(next(chunk.parameters()), DTensor):
        raise ValueError(
            "--rejection-denominator accepted multiplies the gradients in Megatron's DDP buffers, "
            "because its count is known only after the last micro-batch: wrap the model in "
            "megatron.core.distributed.DistributedDataParallel, and pass it as "
            "PolicyStep(model=...)"
        )
    config, others = chunk.config, ["accumulate_gradients=True"] * accumulates
    if has_router_loss(config):
        others.append("--moe-aux-loss-coeff or --moe-z-loss-coeff")
    if getattr(config, "mtp_num_layers", None):
        others.append("--mtp-num-layers")
    if others:
        raise ValueError(
            "--rejection-denominator accepted multiplies the whole gradient once, because its "
            f"count is known only after the last micro-batch, but {' and '.join(others)} adds a "
            "term that it does not divide: use --rejection-denominator original"
        )


def put_in_accepted_count(chunk: Any, accepted: AcceptedCount | None) -> None:
    """Put in this step's count, or none, and remove the count of a step that did not end."""
    config = chunk.config
    found = getattr(config, "finalize_model_grads_func", None)
    if isinstance(found, AcceptedCount):
        config.finalize_model_grads_func = found.func
        if found.shares and _holds_gradients(chunk):
            raise ValueError(
                "--rejection-denominator accepted: the gradients hold micro-batches of another "
                "PolicyStep, whose accepted tokens this one does not count. Build one PolicyStep "
                "per step, and call zero_grad_buffer() before each"
            )
    if accepted is not None:
        accepted.put_in(config)


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
        earlier step's. Raise it for a loss without a gradient.
        """
        if not getattr(self.chunk, "bucket_groups", None):
            return
        if loss.requires_grad:
            loss.register_hook(self._begin)  # type: ignore[no-untyped-call]
        elif torch.is_grad_enabled():
            raise ValueError(
                "the loss has no gradient, although the model has trainable parameters. Full "
                "recomputation loses it behind a frozen embedding: add model.embedding."
                "register_forward_hook(lambda module, inputs, output: output.requires_grad_())"
            )

    def _begin(self, _: Tensor) -> None:
        chunk = self.chunk
        passes = _backward[chunk] if _holds_gradients(chunk) else None
        if passes is not None and passes.count >= self.num_microbatches:
            if passes.begun_by() is not self:
                self._require_accumulation(passes.finalization)
                passes = None
        if passes is None:
            ready_parameters = chunk.bucket_groups[0].per_param_grad_ready_counts
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
