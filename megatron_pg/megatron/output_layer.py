"""Megatron's output layer with another product: the fused head's, float32 logits (`--fp32-lm-head`), or none at all.

`ColumnParallelLinear.forward` (core/tensor_parallel/layers.py of megatron-core 0.15.3 to 0.19.2) leaves the product alone to
`self._forward_impl`, with the weight, the bias and the reductions of gradients as arguments. That method is exchanged.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_pg.config.fields import refuse
from megatron_pg.config.model import output_layer_violations
from megatron_pg.config.versions import derives_multi_token_labels
from megatron_pg.head import float32_logits
from megatron_pg.megatron.groups import chunks_of, unwrapped

OutputProcessor = Callable[[Tensor, Tensor], Tensor]
"""(hidden states [tokens, 1, hidden], weight [v/tp, hidden]) -> any tensor; on every tensor-parallel rank all tokens."""


def take_output_processor(
    model: Any, user: str = "--fused-lm-head", remedy: str = "drop the flag"
) -> None:
    """Let the model's forward take `output_processor=`, an `OutputProcessor` of one call; every rank calls this.

    The processor runs in the place of the output layer's product, and the model returns its result as [1, 1, elements]. A
    call without one gives logits as before. (GPTModel has an argument of that name from megatron-core 0.18 on and HybridModel
    none: neither sees ours.)

    Args:
        model: wrapped or not, or the list of chunks of a virtual pipeline.
        user, remedy: the flag or function that needs it, and the user's way out, for errors.

    Raises:
        NotImplementedError: the output layer is not Megatron's `ColumnParallelLinear`, is more than a product with its
            weight, or a setting of the model gives its weight's gradient to others than its backward.
    """
    for layer in _layers_for(model, user):
        if layer.bias is not None:
            raise NotImplementedError(f"{user} takes an output layer without bias: {remedy}")
        if _gathers(layer):
            raise NotImplementedError(
                f"{user} of a model that gathers its logits: build it with parallel_output=True, or {remedy}"
            )
    for module in map(unwrapped, chunks_of(model)):
        if _exchange_product not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_exchange_product, with_kwargs=True)
            module.register_forward_hook(_give_product_back, always_call=True)


def require_sharded_logits(model: Any) -> None:
    """Refuse a model that gathers the logits of its tensor-parallel ranks: the loss takes a rank's shard."""
    if any(map(_gathers, _layers_for(model, None))):
        raise NotImplementedError(
            "the model gathers the logits of its tensor-parallel ranks, and the loss takes each rank's own: build it with "
            "parallel_output=True"
        )


def set_fp32_lm_head(model: Any, is_on: bool = True) -> bool:
    """Let the model's own output layer compute float32 logits, or Megatron's again; every rank calls this.

    `PolicyStep` and `compute_log_probs` call it as their config says. Call it yourself where logits reach
    `policy_loss_function` without them.

    Args:
        model: wrapped or not, or the list of chunks of a virtual pipeline.

    Returns:
        True if the logits were float32 before.

    Raises:
        NotImplementedError: the model's output layer is not Megatron's `ColumnParallelLinear`, or a setting of the model
            gives its weight's gradient to others than its backward. Nothing has changed then.
    """
    layers = _layers_for(model, "--fp32-lm-head" if is_on else None)
    for chunk in chunks_of(model) if is_on else ():
        _share_main_grad(unwrapped(chunk))
    was_on = False
    for layer in layers:
        has_ours = vars(layer).get("_forward_impl") is _linear
        was_on |= has_ours
        if is_on:
            layer._forward_impl = _linear
        elif has_ours:
            del layer._forward_impl
    return was_on


def _whole_hidden(
    *, input: Tensor, sequence_parallel: bool, allreduce_dgrad: bool, tp_group: Any, **_: Any
) -> Tensor:
    """Return all of `_forward_impl`'s input [sequence, batch, hidden]; backward sums the gradient over tensor parallelism."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    return input


def _linear(**arguments: Any) -> Tensor:
    """Compute float32 logits [sequence, batch, v/tp] in the place of `_forward_impl`; a frozen weight gets no gradient."""
    return float32_logits(_whole_hidden(**arguments), arguments["weight"], arguments["bias"])


def _share_main_grad(module: Any) -> None:
    """Let DDP add the gradient that multi-token prediction's lookup gives a tied weight to that weight's `main_grad`.

    Megatron does so for models on one pipeline stage only (models/common/language_module/language_module.py of 0.19.2).
    """
    is_tied = getattr(module, "share_embeddings_and_output_weights", False)
    if is_tied and getattr(module, "mtp_process", False):
        module.shared_embedding_or_output_weight().zero_out_wgrad = True


@dataclass
class _Processed:
    """The `_forward_impl` of an output layer during one forward of a model with an output processor."""

    processor: OutputProcessor
    before: Callable[..., Tensor]  # the product of the other calls
    num_others: int  # calls of multi-token prediction, which come first
    num_calls: int = 0

    def __call__(self, **arguments: Any) -> Tensor:
        self.num_calls += 1
        if self.num_calls <= self.num_others:
            return self.before(**arguments)
        weight = arguments["weight"]
        if self.num_others and torch.is_grad_enabled():
            # Multi-token prediction multiplies by this weight too. Where Megatron does not fuse the addition to main_grad,
            # that gradient comes through autograd: DDP has to add it, and ours has to be zeros there.
            weight.zero_out_wgrad = True
        return self.processor(_whole_hidden(**arguments), weight).reshape(1, 1, -1)


def _exchange_product(module: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Before a forward of a chunk, put the `output_processor=` of the call into the output layer."""
    processor = keywords.pop("output_processor", None)
    # A stage of multi-token prediction that is not the last has an output layer, and no loss of the policy's.
    if processor is not None and getattr(module, "post_process", True):
        others = _multi_token_calls(module, keywords)
        for layer in _output_layers(module, None):
            layer._forward_impl = _Processed(processor, layer._forward_impl, others)
    return args, keywords


def _multi_token_calls(module: Any, keywords: dict[str, Any]) -> int:
    """Count the calls of the output layer by multi-token prediction in a forward with these arguments."""
    depths: int = getattr(module.config, "mtp_num_layers", None) or 0
    if "mtp_kwargs" in inspect.signature(module.forward).parameters:
        # In the Megatron of slime and miles (docker/patch/latest/megatron.patch of slime 624b824).
        is_on = (keywords.get("mtp_kwargs") or {}).get("mtp_labels") is not None
    elif "_postprocess" in vars(module):  # verl's own (models/mcore/mtp_patch.py of 0.9.1)
        is_on = keywords.get("labels") is not None
    else:
        is_on = derives_multi_token_labels()
    return depths if is_on else 0


def _give_product_back(module: Any, args: Any, output: Any) -> None:
    """After the forward, or after the error that ended it (`output` is None), restore the output layer."""
    for layer in _output_layers(module, None):
        processed = vars(layer).get("_forward_impl")
        if not isinstance(processed, _Processed):
            continue
        if getattr(processed.before, "__self__", None) is layer:
            vars(layer).pop("_forward_impl")  # its class has the product
        else:
            layer._forward_impl = processed.before
        expected = processed.num_others + 1
        if output is not None and processed.num_calls != expected:
            raise RuntimeError(
                f"the output layer of {type(module).__name__} was called {processed.num_calls} times in a forward and "
                f"{expected} were expected, of which an output processor takes the last: drop --fused-lm-head"
            )


def _gathers(layer: Any) -> bool:
    return bool(layer.gather_output) and layer.output_size_per_partition != layer.output_size


def _layers_for(model: Any, user: str | None) -> list[Any]:
    """List the output layers of a model for a flag or function that exchanges their product; None takes any model."""
    chunks = chunks_of(model)
    if user is not None and ("--" in user or "=" in user):
        violations = output_layer_violations(user, vars(chunks[0].config))
        refuse(violations, error=NotImplementedError)
    return [layer for chunk in chunks for layer in _output_layers(unwrapped(chunk), user)]


def _output_layers(module: Any, user: str | None) -> Iterator[Any]:
    """Find the output layer of an unwrapped chunk: none on an earlier pipeline stage, nor of another kind without a user."""
    whole = module
    while not hasattr(module, "output_layer") and hasattr(module, "language_model"):
        module = module.language_model  # of a model of several modalities
    layer = getattr(module, "output_layer", None)
    if isinstance(layer, ColumnParallelLinear):
        yield layer
    elif user is not None and getattr(module, "post_process", True):
        kind = "none" if layer is None else type(layer).__name__
        advice = f": drop {user}" if user.startswith("--") else ""
        raise NotImplementedError(
            f"{user} takes a model whose output_layer is Megatron's ColumnParallelLinear; that of "
            f"{type(whole).__name__} is {kind}{advice}"
        )
