"""Functions of the user's own, named on the command line by import path and checked at startup."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_pg.config.fields import flag_of


class CustomFunction(NamedTuple):
    """Arguments that a function of the user's own is called with."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    """Arguments by keyword, each only if the signature names it."""


# A result that depends on other tokens of the micro-batch makes the objective depend on packing; sums over a sequence
# are those of loss/sequence.py. Advantages and log-probs [window] of the tokens are 0 where masked.
CUSTOM_FUNCTIONS = {
    "custom_policy_loss_path": CustomFunction(("config", "tokens", "log_probs")),
    "custom_tis_function_path": CustomFunction(("config", "tokens", "log_probs", "pg_loss")),
    "custom_pg_loss_reducer_function_path": CustomFunction(
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        keywords=("cp_rank", "cp_size", "cp_partition_mode", "pad_to_multiple"),
    ),
}
"""Functions by the setting that has the import path, whose docstring in `PolicyLossConfig` says what they return."""


@functools.cache
def load_custom_function(field: str, path: str) -> Callable[..., Any]:
    """Load the function that a setting of `CUSTOM_FUNCTIONS` names, once for each path; see `load_function`."""
    return load_function(path, flag=flag_of(field), **CUSTOM_FUNCTIONS[field]._asdict())


def custom_function_violations(settings: Any) -> Iterator[str]:
    """Yield what is wrong with the functions that the settings name."""
    for field in CUSTOM_FUNCTIONS:
        if path := getattr(settings, field, None):
            try:
                load_custom_function(field, path)
            except ValueError as error:
                yield str(error)


def load_function(
    path: str, *, flag: str, positional: Sequence[str], keywords: Sequence[str] = ()
) -> Callable[..., Any]:
    """Import the function that a flag names, and check that it takes its arguments (`CustomFunction`).

    Args:
        path: `pkg.mod.fn` or `pkg.mod:fn`.
        flag: the flag that gave the path, for error messages.
        positional: names of the arguments by position.
        keywords: names of the arguments by keyword.

    Raises:
        ValueError: the path is malformed, the import fails (its error is the cause), the module has no such attribute,
            it is not callable, or its signature does not take these arguments.
    """
    module_name, _, function_name = path.rpartition(":" if ":" in path else ".")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise ValueError(f"{flag}: expected pkg.mod.fn or pkg.mod:fn; found {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code: anything at all may come out of it
        package = module_name.partition(".")[0]
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == package
        advice = f": put the folder that {package} is in on PYTHONPATH" if is_absent else ""
        raise ValueError(
            f"{flag} {path}: importing {module_name} failed with {type(error).__name__}: {error}{advice}"
        ) from error
    if not hasattr(module, function_name):
        raise ValueError(
            f"{flag} {path}: module {module_name} ({getattr(module, '__file__', 'built-in')}) has "
            f"no attribute {function_name!r}"
        )
    function: Callable[..., Any] = getattr(module, function_name)
    expected = f"({', '.join(positional)})"
    if not callable(function):
        kind = type(function).__name__
        raise ValueError(
            f"{flag} {path}: expected a function of {expected}; found {function!r} of type {kind}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{flag} {path}: its signature cannot be read ({error}); wrap it in a Python function of {expected}"
        ) from error
    try:
        signature.bind(*positional, **dict.fromkeys(named_keywords(function, keywords)))
    except TypeError as error:
        raise ValueError(
            f"{flag} {path}: cannot be called with the positional arguments {expected}: {error}; found the signature "
            f"{signature}"
        ) from error
    return function


def named_keywords(function: Callable[..., Any], keywords: Sequence[str]) -> tuple[str, ...]:
    """Return those `keywords` that the function's signature names; `**kwargs` names none.

    Raises:
        ValueError: The function has no signature to inspect.
    """
    parameters = inspect.signature(function).parameters
    named = {p.name for p in parameters.values() if p.kind is not p.POSITIONAL_ONLY}
    return tuple(name for name in keywords if name in named)


def check_returned(
    value: Any,
    shape: Sequence[int],
    where: str,
    meaning: str,
    *,
    differentiable_in: torch.Tensor | None = None,
) -> None:
    """Refuse a user's result that is no tensor of that shape, or has lost its gradient; its values are not read.

    Megatron's schedules pass over a loss without a gradient, so that training would go on and learn nothing.

    Args:
        where: the flag and the path, and the name of the result where there are several.
        meaning: the tensor's contents, for the error message.
        differentiable_in: the argument that must get a gradient, where it has one.
    """
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.shape != torch.Size(shape):
        kind = (
            f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
        )
        raise ValueError(
            f"{where} returned {kind}, expected a tensor of shape {list(shape)}: {meaning}"
        )
    has_gradient = differentiable_in is not None and differentiable_in.requires_grad
    if has_gradient and torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(
            f"{where} returned a tensor without a gradient: nothing would be learned from it. Compute it from its "
            "argument, without detach(), .data, .item() or torch.no_grad(); where there is no token, return "
            "argument.sum() * 0 and not a new zero"
        )
