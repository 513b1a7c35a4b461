"""The comparison of an output layer with the product of hidden states and weight that replaces it.

Subclasses, hooks and adapters may change what a layer computes without changing its type. So the
first forward that uses the replacement compares numbers. A ramp of products shows a scale and a
soft-cap over their whole range, and some rows of the micro-batch show everything else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head import LogitTransform

NUM_ROWS = 8
"""The largest number of rows that are compared."""
_LEAST, _LARGEST = -40.0, 20.0
"""The base-2 logarithms of the ramp's ends. A soft-cap of 1 changes the smallest value by less than
float64 resolves."""


@contextmanager
def exchanged(layer: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module, such as methods, inside the context."""
    before = {name: vars(layer)[name] for name in attributes if name in vars(layer)}
    vars(layer).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(layer).pop(name, None)
        vars(layer).update(before)


def read_transform(
    user: str,
    layer: Any,
    product: Tensor,
    call: Callable[[Any], Tensor],
    trained: Sequence[Tensor | None],
) -> LogitTransform:
    """Find what an output layer computes from its product. Every tensor-parallel rank calls this.

    Args:
        user: the flag or function that replaces the product, for errors.
        layer: Megatron's `ColumnParallelLinear` or a subclass.
        product: [rows, 1, v/tp], float32 or wider, for the rows of `call`.
        call: runs the layer on these rows, with its forward hooks, and returns the logits [rows, 1,
            v/tp]. Its argument replaces the layer's `_forward_impl` unless it is None.
        trained: the parameters that the replacement trains.

    Raises:
        NotImplementedError: the layer computes more than a scale and a soft-cap of its product.
    """
    kind, ramp = type(layer).__name__, _ramp(product)
    with torch.no_grad():
        transform = _fit(ramp, curve := _curve(user, kind, ramp, call))
    if transform.scale <= 0:
        raise NotImplementedError(
            f"{user} requires an output layer with a positive scale, but {kind} multiplies by "
            f"{transform.scale:g}"
        )
    expected = _transformed(ramp, transform)
    what = f"{user} requires an output layer that only scales or soft-caps its product, but {kind}"
    _refuse_difference(what, transform, ramp, curve, expected, size=expected.abs())
    with torch.enable_grad():
        logits = call(None)
    is_finite = product.isfinite().all(-1)  # rows of padding may hold anything
    product, own = product[is_finite], logits.detach()[is_finite]
    expected = _transformed(product, transform)
    size = expected.norm() / max(expected.numel(), 1) ** 0.5
    _refuse_difference(what, transform, product, own, expected, size=size)
    names = [
        name
        for name, parameter in _parameters_of(logits, layer)
        if all(parameter is not each for each in trained)
    ]
    if names:
        raise NotImplementedError(
            f"{user} trains only the output weight, but the logits of {kind} also depend on "
            f"{', '.join(names)}"
        )
    return transform


def _ramp(product: Tensor) -> Tensor:
    """Make float64 numbers from small to large, in the product's shape."""
    numbers = torch.linspace(
        _LEAST, _LARGEST, (product.numel() + 1) // 2, dtype=torch.float64, device=product.device
    ).exp2()
    return torch.stack([numbers, -numbers], 1).flatten()[: product.numel()].view_as(product)


def _curve(user: str, kind: str, ramp: Tensor, call: Callable[[Any], Tensor]) -> Tensor:
    """Run the layer on the ramp instead of its product."""
    calls: list[bool] = []

    def of_ramp(**_: Any) -> Tensor:
        calls.append(True)
        return ramp

    try:
        curve = call(of_ramp)
    except (RuntimeError, TypeError, ValueError) as error:
        raise NotImplementedError(
            f"{user} requires an output layer that is a function of its product, but {kind} fails "
            f"on a different product: {error}"
        ) from error
    if not calls:
        raise NotImplementedError(
            f"{user} replaces the product of ColumnParallelLinear, but the forward of {kind} does "
            "not call it"
        )
    return curve


def _fit(ramp: Tensor, curve: Tensor) -> LogitTransform:
    """Read the scale from the smallest products and the soft-cap from the largest."""
    products, logits = ramp.flatten(), curve.flatten().double()
    scale = (logits[:16] / products[:16]).mean().item()
    largest = logits[-2].abs().item()
    uncapped = abs(scale) * products[-2].abs().item()
    is_linear = abs(largest - uncapped) <= 0.1 * uncapped
    return LogitTransform(scale, None if is_linear else largest)


def _transformed(product: Tensor, transform: LogitTransform) -> Tensor:
    """Return the logits [rows, 1, v/tp] float64 of a product."""
    logits = product.double() * transform.scale
    if transform.softcap is None:
        return logits
    return transform.softcap * torch.tanh(logits / transform.softcap)


def _refuse_difference(
    what: str,
    transform: LogitTransform,
    product: Tensor,
    logits: Tensor,
    expected: Tensor,
    size: Tensor,
) -> None:
    """Raise NotImplementedError with both numbers if logits differ from the expected ones, relative
    to `size`.
    """
    # A layer rounds its product and its results to its dtype.
    tolerance = max(2 * torch.finfo(logits.dtype).eps, 1e-6)
    difference = (logits.double() - expected).abs()
    error = difference
    if size.dim() == 0:
        error = difference.norm() / max(difference.numel(), 1) ** 0.5
    if bool((error <= tolerance * size).all()):
        return
    place = int((difference / size.clamp(min=1e-30)).argmax())
    of, found, wanted = (float(x.flatten()[place]) for x in (product, logits, expected))
    cap = "" if transform.softcap is None else f" and a soft-cap of {transform.softcap:g}"
    raise NotImplementedError(
        f"{what} gives {found:g} for a product of {of:g}, where a scale of "
        f"{transform.scale:g}{cap} gives {wanted:g}"
    )


def _parameters_of(logits: Tensor, layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the trainable parameters that the logits depend on, with their names in the layer."""
    names = {parameter: name for name, parameter in layer.named_parameters()}
    waiting, seen = [logits.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield names.get(leaf, f"a parameter {list(leaf.shape)} outside of it"), leaf
        waiting += [before for before, _ in node.next_functions]
