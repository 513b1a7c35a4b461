"""Megatron's output layer with another product: the fused head's, float32 logits (`--fp32-lm-head`), or none at all.

`ColumnParallelLinear.forward` (core/tensor_parallel/layers.py of megatron-core 0.15.3 to 0.19.2) does everything but the
product in `self._forward_impl`, with the weight, the bias and how gradients are summed as arguments: that one is exchanged.
"""

from __future__ import annotations

import contextlib
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
from megatron_pg.head.plain_layer import float32_logits
from megatron_pg.megatron.groups import unwrapped

OutputProcessor = Callable[[Tensor, Tensor], Tensor]
"""(hidden states [tokens, 1, hidden], weight [v/tp, hidden]) -> any tensor; on every tensor-parallel rank all tokens."""


def take_output_processor(model: Any) -> None:
    """Has the model's forward take `output_processor=`, an `OutputProcessor` of one call; every rank calls it.

    It runs in the place of the output layer's product, and what it returns the model returns, as [1, 1, elements]. A call
    without one gives logits as before. (GPTModel has an argument of that name from megatron-core 0.18 on and HybridModel
    none: neither sees ours.)

    Args:
        model: wrapped or not, or the list of chunks of a virtual pipeline.

    Raises:
        NotImplementedError: the output layer is not Megatron's `ColumnParallelLinear`, is more than a product with its
            weight, or a setting of the model gives its weight's gradient to others than its backward.
    """
    chunks = model if isinstance(model, (list, tuple)) else [model]
    asks = "--fused-lm-head"
    refuse(output_layer_violations(asks, vars(chunks[0].config)), error=NotImplementedError)
    for module in map(unwrapped, chunks):
        for layer in _output_layers(module, asks):
            if layer.bias is not None:
                raise NotImplementedError(
                    f"{asks} takes an output layer without bias: drop the flag"
                )
            if layer.gather_output and layer.output_size_per_partition != layer.output_size:
                raise NotImplementedError(
                    f"{asks} of a model that gathers its logits: build it with parallel_output=True, or drop the flag"
                )
        if _exchange_product not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_exchange_product, with_kwargs=True)
            module.register_forward_hook(_give_product_back, always_call=True)


def set_fp32_lm_head(model: Any, is_on: bool = True) -> bool:
    """Has the model's own output layer compute float32 logits, or Megatron's again; every rank calls it.

    `PolicyStep` and `compute_log_probs` call it as their config says. Call it yourself where logits reach
    `policy_loss_function` without them.

    Args:
        model: wrapped or not, or the list of chunks of a virtual pipeline.
        is_on: whether logits are to be float32.

    Returns:
        Whether they were.

    Raises:
        NotImplementedError: the model's output layer is not Megatron's `ColumnParallelLinear`, or a setting of the model
            gives its weight's gradient to others than its backward. Nothing has changed then.
    """
    chunks = model if isinstance(model, (list, tuple)) else [model]
    if is_on:
        found = output_layer_violations("--fp32-lm-head", vars(chunks[0].config))
        refuse(found, error=NotImplementedError)
    asks = "--fp32-lm-head" if is_on else None
    layers = [layer for chunk in chunks for layer in _output_layers(unwrapped(chunk), asks)]
    for chunk in chunks if is_on else ():
        _share_main_grad(unwrapped(chunk))
    was_on = [vars(layer).get("_forward_impl") is _linear for layer in layers]
    for layer, has_ours in zip(layers, was_on, strict=True):
        if is_on:
            layer._forward_impl = _linear
        elif has_ours:
            del layer._forward_impl
    return any(was_on)


@contextlib.contextmanager
def fp32_lm_head(model: Any, is_on: bool) -> Iterator[None]:
    """`set_fp32_lm_head` meanwhile."""
    was_on = set_fp32_lm_head(model, is_on)
    try:
        yield
    finally:
        set_fp32_lm_head(model, was_on)


@contextlib.contextmanager
def without_output_layer(model: Any) -> Iterator[None]:
    """Meanwhile the model's output is what would enter its output layer: [b, s, hidden] on every tensor-parallel rank.

    Raises:
        NotImplementedError: the output layer is not Megatron's `ColumnParallelLinear`, or has a bias, which would be lost.
    """
    chunks = model if isinstance(model, (list, tuple)) else [model]
    asks = "compute_hidden_states"
    layers = [layer for chunk in chunks for layer in _output_layers(unwrapped(chunk), asks)]
    if any(layer.bias is not None for layer in layers):
        raise NotImplementedError(
            f"{asks} of a model whose output layer has a bias: its logits are more than a product with its weight; give "
            "them by --distill-teacher logits or top_k"
        )
    before = [layer._forward_impl for layer in layers]
    for layer in layers:
        layer._forward_impl = _identity
    try:
        yield
    finally:
        for layer, product in zip(layers, before, strict=True):
            _set_product(layer, product)


def _whole_hidden(
    hidden_states: Tensor, group: Any, *, is_gathered: bool, is_summed: bool
) -> Tensor:
    """The hidden states [sequence, batch, hidden] on every tensor-parallel rank; backward sums the gradient's parts.

    Args:
        hidden_states: the same on every rank, or its part of the sequence.
        group: the tensor-parallel group.
        is_gathered: whether a rank holds a part of the sequence, and gets the gradient of that.
        is_summed: otherwise: whether the gradient is summed over the group.
    """
    if is_gathered:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
    elif is_summed:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
    return hidden_states


def _linear(
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequence_parallel: bool,
    allreduce_dgrad: bool,
    tp_group: Any,
    **_: Any,
) -> Tensor:
    """What `_forward_impl` is called for, with float32 logits [sequence, batch, v/tp]; a frozen weight gets no gradient."""
    hidden = _whole_hidden(
        input, tp_group, is_gathered=sequence_parallel, is_summed=allreduce_dgrad
    )
    return float32_logits(hidden, weight, bias)


def _share_main_grad(module: Any) -> None:
    """Has DDP add to a tied weight's `main_grad` what multi-token prediction, which looks tokens up in it, has for it.

    Megatron says so of models on one pipeline stage alone (models/common/language_module/language_module.py of 0.19.2).
    """
    is_tied = getattr(module, "share_embeddings_and_output_weights", False)
    if is_tied and getattr(module, "mtp_process", False):
        module.shared_embedding_or_output_weight().zero_out_wgrad = True


@dataclass
class _Processed:
    """What `_forward_impl` is called for during one forward of a model with an output processor."""

    processor: OutputProcessor
    before: Callable[..., Tensor]
    """The product of every other call."""
    num_others: int
    """Calls that come first: those of multi-token prediction."""
    num_calls: int = 0

    def __call__(self, **arguments: Any) -> Tensor:
        self.num_calls += 1
        if self.num_calls <= self.num_others:
            return self.before(**arguments)
        weight = arguments["weight"]
        if self.num_others and torch.is_grad_enabled():
            # Multi-token prediction multiplies by this weight too, in the same graph, and where Megatron does not fuse the
            # addition to main_grad its gradient comes through autograd: DDP has to add it, and ours has to be zeros there.
            weight.zero_out_wgrad = True
        hidden = _whole_hidden(
            arguments["input"],
            arguments["tp_group"],
            is_gathered=arguments["sequence_parallel"],
            is_summed=arguments["allreduce_dgrad"],
        )
        return self.processor(hidden, weight).reshape(1, 1, -1)


def _exchange_product(module: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Before a forward of a chunk: its output layer has the product that it is called with."""
    processor = keywords.pop("output_processor", None)
    # A stage of multi-token prediction that is not the last has an output layer, and no loss of the policy's.
    if processor is not None and getattr(module, "post_process", True):
        depths = getattr(module.config, "mtp_num_layers", None) or 0
        others = depths if derives_multi_token_labels() else 0
        for layer in _output_layers(module, None):
            layer._forward_impl = _Processed(processor, layer._forward_impl, others)
    return args, keywords


def _give_product_back(module: Any, args: Any, output: Any) -> None:
    """After it, or after the error that ended it: then there is no output."""
    for layer in _output_layers(module, None):
        processed = vars(layer).get("_forward_impl")
        if not isinstance(processed, _Processed):
            continue
        _set_product(layer, processed.before)
        expected = processed.num_others + 1
        if output is not None and processed.num_calls != expected:
            raise RuntimeError(
                f"the output layer of {type(module).__name__} was called {processed.num_calls} times in a forward and "
                f"{expected} were expected, of which --fused-lm-head takes the last: drop the flag"
            )


def _set_product(layer: Any, product: Callable[..., Tensor]) -> None:
    """The layer's own is that of its class."""
    if getattr(product, "__self__", None) is layer:
        vars(layer).pop("_forward_impl", None)
    else:
        layer._forward_impl = product


def _identity(*, input: Tensor, sequence_parallel: bool, tp_group: Any, **_: Any) -> Tensor:
    """What `_forward_impl` is called for, with no product."""
    return _whole_hidden(input, tp_group, is_gathered=sequence_parallel, is_summed=False)


def _output_layers(module: Any, asks: str | None) -> Iterator[Any]:
    """The output layer of an unwrapped chunk; none on an earlier pipeline stage, and none of another kind if nobody asks."""
    whole = module
    while not hasattr(module, "output_layer") and hasattr(module, "language_model"):
        module = module.language_model  # of a model of several modalities
    layer = getattr(module, "output_layer", None)
    if isinstance(layer, ColumnParallelLinear):
        yield layer
    elif asks is not None and getattr(module, "post_process", True):
        found = "none" if layer is None else type(layer).__name__
        raise NotImplementedError(
            f"{asks} takes a model whose output_layer is Megatron's ColumnParallelLinear; that of "
            f"{type(whole).__name__} is {found}" + f": drop {asks}" * asks.startswith("--")
        )
