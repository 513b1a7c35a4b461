"""Megatron's output layer with a replaced product: the fused head, float32 logits
(`--fp32-lm-head`), or hidden states.

`ColumnParallelLinear.forward` (core/tensor_parallel/layers.py of megatron-core 0.16.0 to 0.19.2)
leaves only the product to `self._forward_impl`, with weight, bias and gradient reductions as
arguments. This module replaces that method. In the first forward, `output_transform.read_transform`
finds what the layer computes from its product.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.model import output_layer_violations
from megatron_pg.config.values import refuse
from megatron_pg.config.versions import derives_multi_token_labels
from megatron_pg.head import LogitTransform, float32_logits
from megatron_pg.megatron.groups import chunks_of, unwrapped
from megatron_pg.megatron.output_transform import NUM_ROWS, exchanged, read_transform

OutputProcessor = Callable[[Tensor, Tensor, LogitTransform], Tensor]
"""A function (hidden states [tokens, 1, hidden], weight [v/tp, hidden], transform of their product)
-> any tensor. Every tensor-parallel rank gets all tokens."""
_users: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()
"""By module with an output processor: its user and remedy, for errors."""
_transforms: WeakKeyDictionary[Any, LogitTransform] = WeakKeyDictionary()
"""By output layer: the transform of its product."""
_compared: WeakSet[Any] = WeakSet()
"""The output layers already compared with float32 logits."""


def take_output_processor(
    model: Any, user: str = "--fused-lm-head", remedy: str = "drop the flag"
) -> None:
    """Let the model's forward accept `output_processor=`, an `OutputProcessor` for one call. Every
    rank calls this.

    The processor replaces the output layer's product, and the model returns its result as [1, 1,
    elements]. Without a processor, the model returns logits as before. (GPTModel has an argument of
    the same name from megatron-core 0.18 on, which is not used.)

    Args:
        model: wrapped or not, or a virtual pipeline's list of chunks.
        user, remedy: the flag or function that needs it, and the remedy, for errors.

    Raises:
        NotImplementedError: the output layer is not Megatron's `ColumnParallelLinear`, has a bias,
            gathers its logits, or a model setting computes its weight's gradient outside of its
            backward. The first forward raises it for a layer that computes more than a scale and a
            soft-cap of its product (`read_transform`).
    """
    for layer in _layers_for(model, user):
        if layer.bias is not None:
            raise NotImplementedError(f"{user} requires an output layer without bias: {remedy}")
        if _gathers(layer):
            raise NotImplementedError(
                f"{user} requires a model that does not gather its logits: build it with "
                f"parallel_output=True, or {remedy}"
            )
    for module in map(unwrapped, chunks_of(model)):
        _users[module] = user, remedy
        if _exchange_product not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_exchange_product, with_kwargs=True)
            module.register_forward_hook(_give_product_back, always_call=True)


def require_sharded_logits(model: Any) -> None:
    """Raise NotImplementedError if the model gathers logits over tensor parallelism: the loss needs
    each rank's shard.
    """
    if any(map(_gathers, _layers_for(model, None))):
        raise NotImplementedError(
            "the model gathers logits over tensor parallelism, but the loss needs each rank's "
            "shard: build it with parallel_output=True"
        )


def set_fp32_lm_head(model: Any, is_on: bool = True) -> bool:
    """Let the model's output layer compute float32 logits, or Megatron's logits again. Every rank
    calls this.

    `PolicyStep` and `compute_log_probs` call it according to their config. Call it yourself if you
    use `policy_loss_function` without them.

    Args:
        model: wrapped or not, or a virtual pipeline's list of chunks.

    Returns:
        True if the logits were float32 before the call.

    Raises:
        NotImplementedError: the output layer is not Megatron's `ColumnParallelLinear`, or a model
            setting computes its weight's gradient outside of its backward. Then nothing has
            changed. The first forward raises it for a layer whose product is not hidden states
            times weight.
    """
    layers = _layers_for(model, "--fp32-lm-head" if is_on else None)
    for chunk in chunks_of(model) if is_on else ():
        _share_main_grad(unwrapped(chunk))
    was_on = False
    for layer in layers:
        product = vars(layer).get("_forward_impl")
        has_ours = isinstance(product, _Float32Product)
        was_on |= has_ours
        if is_on and not has_ours:
            layer._forward_impl = _Float32Product(layer, layer._forward_impl, product)
        elif has_ours and not is_on:
            del layer._forward_impl
            if product.instance_method is not None:
                layer._forward_impl = product.instance_method
    return was_on


def prepare_output_layer(model: Any | None, config: PolicyLossConfig) -> None:
    """Prepare the model's output layer for a policy loss's settings, or raise. Every rank calls
    this.
    """
    if model is None:
        if config.changes_output_layer or config.fused_lm_head:
            flag = "--fused-lm-head" if config.fused_lm_head else "--fp32-lm-head"
            raise ValueError(f"{flag} changes the model's output layer: give PolicyStep the model=")
        return
    set_fp32_lm_head(model, config.changes_output_layer)
    if config.fused_lm_head:
        take_output_processor(model)
    else:
        require_sharded_logits(model)


def _whole_hidden(
    *, input: Tensor, sequence_parallel: bool, allreduce_dgrad: bool, tp_group: Any, **_: Any
) -> Tensor:
    """Return the whole input of `_forward_impl` [sequence, batch, hidden]. Backward sums its
    gradient over tensor parallelism.
    """
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    return input


@dataclass
class _Float32Product:
    """A replacement of `_forward_impl` with float32 logits [sequence, batch, v/tp]. A frozen weight
    gets no gradient.
    """

    layer: Any
    own_product: Callable[..., Tensor]
    instance_method: Any
    """The `_forward_impl` in the layer's instance, or None."""

    def __call__(self, **arguments: Any) -> Tensor:
        if self.layer not in _compared:
            rows = arguments | {"input": arguments["input"].detach()[:NUM_ROWS]}
            with torch.no_grad():
                product = float32_logits(_whole_hidden(**rows), rows["weight"], rows["bias"])
            read_transform(
                "--fp32-lm-head",
                self.layer,
                product,
                lambda given: (given or self.own_product)(**rows),
                (rows["weight"], rows["bias"]),
            )
            _compared.add(self.layer)
        return float32_logits(_whole_hidden(**arguments), arguments["weight"], arguments["bias"])


def _share_main_grad(module: Any) -> None:
    """Let DDP add the gradient of multi-token prediction's embedding lookup to a tied weight's
    `main_grad`.

    Megatron does this only for models on one pipeline stage
    (models/common/language_module/language_module.py of 0.19.2).
    """
    is_tied = getattr(module, "share_embeddings_and_output_weights", False)
    if is_tied and getattr(module, "mtp_process", False):
        module.shared_embedding_or_output_weight().zero_out_wgrad = True


@dataclass
class _Processed:
    """The `forward` of an output layer during a model's forward with an output processor."""

    processor: OutputProcessor
    layer: Any
    user: tuple[str, str]
    num_others: int  # calls of multi-token prediction, which come first
    num_calls: int = 0
    result: Tensor | None = None
    """The processor's result, in the shape of logits."""
    version: int = 0
    """The result's version counter."""
    restore: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.own_forward, self.own_product = self.layer.forward, self.layer._forward_impl
        self.restore.enter_context(exchanged(self.layer, forward=self))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.num_calls += 1
        if self.num_calls <= self.num_others:
            return self.own_forward(*args, **keywords)
        with exchanged(self.layer, _forward_impl=self.product):
            # The layer's own forward would transform the processor's result like logits.
            return ColumnParallelLinear.forward(self.layer, *args, **keywords)

    def product(self, **arguments: Any) -> Tensor:
        """Run the processor instead of `_forward_impl`."""
        weight, transform = arguments["weight"], _transforms.get(self.layer)
        if transform is None:
            transform = _transforms[self.layer] = self.read_transform(arguments)
        if self.num_others and torch.is_grad_enabled():
            # Multi-token prediction also multiplies by this weight. If Megatron does not fuse the
            # addition to main_grad, its gradient comes through autograd, so DDP must add it and
            # ours must be zeros.
            weight.zero_out_wgrad = True
        result = self.processor(_whole_hidden(**arguments), weight, transform)
        result = result.reshape(1, 1, -1).contiguous()  # the shape that GPTModel returns
        self.result, self.version = result, result._version
        return result

    def is_returned_as(self, output: Tensor) -> bool:
        """Tell whether a model's output is the processor's result, without host synchronization
        unless the dtype changed.
        """
        if self.result is None:
            return False
        if output.dtype != self.result.dtype:
            return torch.equal(output.flatten(), self.result.flatten().to(output.dtype))
        is_same_memory = output.data_ptr() == self.result.data_ptr()
        return is_same_memory and self.result._version == self.version

    def read_transform(self, arguments: dict[str, Any]) -> LogitTransform:
        """Compare the layer with its product on the input's first rows."""
        rows, weight = arguments["input"].detach()[:NUM_ROWS], arguments["weight"]
        with torch.no_grad():
            product = float32_logits(_whole_hidden(**arguments | {"input": rows}), weight)
        methods: dict[str, Any] = {"forward": self.own_forward, "_forward_pre_hooks": {}}

        def call(given: Any) -> Tensor:
            with exchanged(self.layer, **methods, _forward_impl=given or self.own_product):
                logits: Tensor = self.layer(rows, weight=weight)[0]
            return logits

        user, remedy = self.user
        try:
            return read_transform(user, self.layer, product, call, (weight,))
        except NotImplementedError as error:
            raise NotImplementedError(f"{error}: {remedy}") from error


def _exchange_product(module: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Install the call's `output_processor=` in the output layer, before a chunk's forward."""
    processor = keywords.pop("output_processor", None)
    # An earlier stage with multi-token prediction has an output layer, but no policy loss.
    if processor is not None and getattr(module, "post_process", True):
        others = _multi_token_calls(module, keywords)
        for layer in _output_layers(module, None):
            _Processed(processor, layer, _users[module], others)
    return args, keywords


def _multi_token_calls(module: Any, keywords: dict[str, Any]) -> int:
    """Count multi-token prediction's calls of the output layer in a forward with these
    arguments.
    """
    depths: int = getattr(module.config, "mtp_num_layers", None) or 0
    if "mtp_kwargs" in inspect.signature(module.forward).parameters:
        # slime's and miles's Megatron (docker/patch/latest/megatron.patch of slime 624b824).
        is_on = (keywords.get("mtp_kwargs") or {}).get("mtp_labels") is not None
    elif "_postprocess" in vars(module):  # verl's patch (models/mcore/mtp_patch.py of 0.9.1)
        is_on = keywords.get("labels") is not None
    else:
        is_on = derives_multi_token_labels()
    return depths if is_on else 0


def _give_product_back(module: Any, args: Any, output: Any) -> None:
    """Restore the output layer after the forward, or after an error in it (`output` is None)."""
    for layer in _output_layers(module, None):
        processed = vars(layer).get("forward")
        if not isinstance(processed, _Processed):
            continue
        processed.restore.close()
        (_, remedy), kind = processed.user, type(module).__name__
        expected = processed.num_others + 1
        if output is not None and processed.num_calls != expected:
            raise RuntimeError(
                f"the output layer of {kind} was called {processed.num_calls} instead of "
                f"{expected} times in a forward, and the output processor applies to the last "
                f"call: {remedy}"
            )
        if isinstance(output, Tensor) and not processed.is_returned_as(output):
            raise NotImplementedError(
                f"{processed.user[0]} requires a model that returns its output layer's logits, but "
                f"{kind} or a hook changes them: {remedy}"
            )


def _gathers(layer: Any) -> bool:
    return bool(layer.gather_output) and layer.output_size_per_partition != layer.output_size


def _layers_for(model: Any, user: str | None) -> list[Any]:
    """List a model's output layers for a flag or function that replaces their product. A user of
    None accepts any model.
    """
    chunks = chunks_of(model)
    if user is not None and ("--" in user or "=" in user):
        violations = output_layer_violations(user, vars(chunks[0].config))
        refuse(violations, error=NotImplementedError)
    return [layer for chunk in chunks for layer in _output_layers(unwrapped(chunk), user)]


def _output_layers(module: Any, user: str | None) -> Iterator[Any]:
    """Find an unwrapped chunk's output layer: none on an earlier pipeline stage. Raise for a
    different kind if there is a user.
    """
    whole = module
    while not hasattr(module, "output_layer") and hasattr(module, "language_model"):
        module = module.language_model  # a multimodal model
    layer = getattr(module, "output_layer", None)
    if isinstance(layer, ColumnParallelLinear):
        yield layer
    elif user is not None and getattr(module, "post_process", True):
        kind = "none" if layer is None else type(layer).__name__
        advice = f": drop {user}" if user.startswith("--") else ""
        raise NotImplementedError(
            f"{user} requires Megatron's ColumnParallelLinear as the model's output_layer, but "
            f"{type(whole).__name__} has {kind}{advice}"
        )
