"""Megatron's output layer with another product: the fused head's, float32 logits
(`--fp32-lm-head`), or none at all.

`ColumnParallelLinear.forward` (core/tensor_parallel/layers.py of megatron-core 0.16.0 to 0.19.2)
leaves the product alone to `self._forward_impl`, with the weight, the bias and the reductions of
gradients as arguments. That method is exchanged. What a layer does with its product is found by
`output_transform.read_transform` in its first forward.
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
"""(hidden states [tokens, 1, hidden], weight [v/tp, hidden], what the layer computes from their
product) -> any tensor; on every tensor-parallel rank all tokens."""
_users: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()
"""By module with an output processor: who takes it, and the way out, for errors."""
_transforms: WeakKeyDictionary[Any, LogitTransform] = WeakKeyDictionary()
"""By output layer: what it computes from its product."""
_compared: WeakSet[Any] = WeakSet()
"""The output layers whose product has been compared with float32 logits."""


def take_output_processor(
    model: Any, user: str = "--fused-lm-head", remedy: str = "drop the flag"
) -> None:
    """Let the model's forward take `output_processor=`, an `OutputProcessor` of one call; every
    rank calls this.

    The processor runs in the place of the output layer's product, and the model returns its result
    as [1, 1, elements]. A call without one gives logits as before. (GPTModel has an argument of
    that name from megatron-core 0.18 on and HybridModel none: neither sees ours.)

    Args:
        model: wrapped or not, or the list of chunks of a virtual pipeline.
        user, remedy: the flag or function that needs it, and the user's way out, for errors.

    Raises:
        NotImplementedError: the output layer is not Megatron's `ColumnParallelLinear`, has a bias,
            gathers its logits, or a setting of the model gives its weight's gradient to others than
            its backward. The first forward raises it for
            a layer that computes more than a scale and a soft-cap of its product
            (`read_transform`).
    """
    for layer in _layers_for(model, user):
        if layer.bias is not None:
            raise NotImplementedError(f"{user} takes an output layer without bias: {remedy}")
        if _gathers(layer):
            raise NotImplementedError(
                f"{user} of a model that gathers its logits: build it with parallel_output=True, "
                f"or {remedy}"
            )
    for module in map(unwrapped, chunks_of(model)):
        _users[module] = user, remedy
        if _exchange_product not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_exchange_product, with_kwargs=True)
            module.register_forward_hook(_give_product_back, always_call=True)


def require_sharded_logits(model: Any) -> None:
    """Refuse a model that gathers the logits of its tensor-parallel ranks: the loss takes a rank's
    shard.
    """
    if any(map(_gathers, _layers_for(model, None))):
        raise NotImplementedError(
            "the model gathers the logits of its tensor-parallel ranks, and the loss takes each "
            "rank's own: build it with "
            "parallel_output=True"
        )


def set_fp32_lm_head(model: Any, is_on: bool = True) -> bool:
    """Let the model's own output layer compute float32 logits, or Megatron's again; every rank
    calls this.

    `PolicyStep` and `compute_log_probs` call it as their config says. Call it yourself where logits
    reach `policy_loss_function` without them.

    Args:
        model: wrapped or not, or the list of chunks of a virtual pipeline.

    Returns:
        True if the logits were float32 before.

    Raises:
        NotImplementedError: the model's output layer is not Megatron's `ColumnParallelLinear`, or a
            setting of the model gives its weight's gradient to others than its backward. Nothing
            has changed then. The first forward raises it
            for a layer whose own product is another than that of hidden states and weight.
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
    """Let the model's output layer compute as the settings of a policy loss say, or refuse it;
    every rank calls this.
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
    """Return all of `_forward_impl`'s input [sequence, batch, hidden]; backward sums the gradient
    over tensor parallelism.
    """
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    return input


@dataclass
class _Float32Product:
    """Float32 logits [sequence, batch, v/tp] in the place of `_forward_impl`; a frozen weight gets
    no gradient.
    """

    layer: Any
    own_product: Callable[..., Tensor]
    instance_method: Any
    """The `_forward_impl` that the layer itself had, not its class; None for none."""

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
    """Let DDP add the gradient that multi-token prediction's lookup gives a tied weight to that
    weight's `main_grad`.

    Megatron does so for models on one pipeline stage only
    (models/common/language_module/language_module.py of 0.19.2).
    """
    is_tied = getattr(module, "share_embeddings_and_output_weights", False)
    if is_tied and getattr(module, "mtp_process", False):
        module.shared_embedding_or_output_weight().zero_out_wgrad = True


@dataclass
class _Processed:
    """The `forward` of an output layer during one forward of a model with an output processor."""

    processor: OutputProcessor
    layer: Any
    user: tuple[str, str]
    num_others: int  # calls of multi-token prediction, which come first
    num_calls: int = 0
    result: Tensor | None = None
    """What the processor returned, in the shape of logits."""
    version: int = 0
    """The result's count of changes in place."""
    restore: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.own_forward, self.own_product = self.layer.forward, self.layer._forward_impl
        self.restore.enter_context(exchanged(self.layer, forward=self))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.num_calls += 1
        if self.num_calls <= self.num_others:
            return self.own_forward(*args, **keywords)
        with exchanged(self.layer, _forward_impl=self.product):
            # Not the layer's own: what it does with logits does not fit the processor's result.
            return ColumnParallelLinear.forward(self.layer, *args, **keywords)

    def product(self, **arguments: Any) -> Tensor:
        """Run the processor in the place of `_forward_impl`."""
        weight, transform = arguments["weight"], _transforms.get(self.layer)
        if transform is None:
            transform = _transforms[self.layer] = self.read_transform(arguments)
        if self.num_others and torch.is_grad_enabled():
            # Multi-token prediction multiplies by this weight too. Where Megatron does not fuse the
            # addition to main_grad, that gradient comes through autograd: DDP has to add it, and
            # ours has to be zeros there.
            weight.zero_out_wgrad = True
        result = self.processor(_whole_hidden(**arguments), weight, transform)
        result = result.reshape(1, 1, -1).contiguous()  # as which GPTModel returns it
        self.result, self.version = result, result._version
        return result

    def is_returned_as(self, output: Tensor) -> bool:
        """Tell whether a model's output is the processor's result. No host synchronisation unless
        the dtype changed.
        """
        if self.result is None:
            return False
        if output.dtype != self.result.dtype:
            return torch.equal(output.flatten(), self.result.flatten().to(output.dtype))
        is_same_memory = output.data_ptr() == self.result.data_ptr()
        return is_same_memory and self.result._version == self.version

    def read_transform(self, arguments: dict[str, Any]) -> LogitTransform:
        """Compare the layer with its product on the first rows of its input."""
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
    """Before a forward of a chunk, put the `output_processor=` of the call into the output
    layer.
    """
    processor = keywords.pop("output_processor", None)
    # A stage of multi-token prediction that is not the last has an output layer, and no loss of the
    # policy's.
    if processor is not None and getattr(module, "post_process", True):
        others = _multi_token_calls(module, keywords)
        for layer in _output_layers(module, None):
            _Processed(processor, layer, _users[module], others)
    return args, keywords


def _multi_token_calls(module: Any, keywords: dict[str, Any]) -> int:
    """Count the calls of the output layer by multi-token prediction in a forward with these
    arguments.
    """
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
    """After the forward, or after the error that ended it (`output` is None), restore the output
    layer.
    """
    for layer in _output_layers(module, None):
        processed = vars(layer).get("forward")
        if not isinstance(processed, _Processed):
            continue
        processed.restore.close()
        (_, remedy), kind = processed.user, type(module).__name__
        expected = processed.num_others + 1
        if output is not None and processed.num_calls != expected:
            raise RuntimeError(
                f"the output layer of {kind} was called {processed.num_calls} times in a forward "
                f"and "
                f"{expected} were expected, of which an output processor takes the last: {remedy}"
            )
        if isinstance(output, Tensor) and not processed.is_returned_as(output):
            raise NotImplementedError(
                f"{processed.user[0]} takes a model that returns the logits of its output layer, "
                f"and {kind} or a hook changes "
                f"them: {remedy}"
            )


def _gathers(layer: Any) -> bool:
    return bool(layer.gather_output) and layer.output_size_per_partition != layer.output_size


def _layers_for(model: Any, user: str | None) -> list[Any]:
    """List the output layers of a model for a flag or function that exchanges their product; None
    takes any model.
    """
    chunks = chunks_of(model)
    if user is not None and ("--" in user or "=" in user):
        violations = output_layer_violations(user, vars(chunks[0].config))
        refuse(violations, error=NotImplementedError)
    return [layer for chunk in chunks for layer in _output_layers(unwrapped(chunk), user)]


def _output_layers(module: Any, user: str | None) -> Iterator[Any]:
    """Find the output layer of an unwrapped chunk: none on an earlier pipeline stage, nor of
    another kind without a user.
    """
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
