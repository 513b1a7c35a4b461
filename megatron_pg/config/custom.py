"""Custom functions, named on the command line by import path and checked at startup."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_pg.config.values import flag_of

if TYPE_CHECKING:
    import torch

CUSTOM_FUNCTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "custom_policy_loss_path": (("config", "tokens", "log_probs"), ()),
    "custom_tis_function_path": (("config", "tokens", "log_probs", "pg_loss"), ()),
    "custom_pg_loss_reducer_function_path": (
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        ("cp_rank", "cp_size"),
    ),
}
"""Each setting's custom function: its positional arguments, and the keyword arguments that it gets
if its signature names them.

If a token's result depends on other tokens of the micro-batch, the objective depends on packing."""


def custom_function_violations(settings: Any) -> Iterator[str]:
    """Yield what is wrong with the functions that the settings name."""
    for field in CUSTOM_FUNCTIONS:
        if path := getattr(settings, field, None):
            try:
                load_custom_function(field, path)
            except ValueError as error:
                yield str(error)


@functools.cache
def load_custom_function(field: str, path: str) -> Callable[..., Any]:
    """Import the function at a path, and check that it takes the arguments in `CUSTOM_FUNCTIONS`.

    Raises:
        ValueError: the path is malformed, the import fails (its error is the cause), the module
            lacks the function, or its signature does not take the arguments.
    """
    flag, (positional, keywords) = flag_of(field), CUSTOM_FUNCTIONS[field]
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ValueError(f"{flag} must be pkg.mod.fn or pkg.mod:fn, not {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's code may raise anything
        package, cause = module_name.partition(".")[0], f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            cause += f". Add the folder that contains {package} to PYTHONPATH"
        raise ValueError(f"{flag} {path}: importing {module_name} failed with {cause}") from error
    function: Any = getattr(module, name, None)
    expected = f"({', '.join(positional)})"
    if not callable(function):
        kind = f"{function!r} of type {type(function).__name__}"
        found = kind if hasattr(module, name) else f"no attribute {name!r}"
        raise ValueError(
            f"{flag} {path}: expected a function {expected} in {module_name} "
            f"({getattr(module, '__file__', 'built-in')}), found {found}"
        )
    try:
        signature = inspect.signature(function)
        signature.bind(*positional, **dict.fromkeys(named_keywords(function, keywords)))
    except ValueError as error:
        raise ValueError(
            f"{flag} {path}: cannot read the function's signature ({error}). Wrap it in a Python "
            f"function {expected}"
        ) from error
    except TypeError as error:
        raise ValueError(
            f"{flag} {path} does not accept the positional arguments {expected}: {error}. Its "
            f"signature is {signature}"
        ) from error
    return function  # type: ignore[no-any-return]


def named_keywords(function: Callable[..., Any], keywords: Sequence[str]) -> tuple[str, ...]:
    """Return the `keywords` that the function's signature names. `**kwargs` names none."""
    parameters = inspect.signature(function).parameters
    named = {p.name for p in parameters.values() if p.kind is not p.POSITIONAL_ONLY}
    return tuple(name for name in keywords if name in named)


def check_returned(
    value: Any,
    shape: Sequence[int],
    where: str,
    meaning: str,
    *,
    differentiable_in: "torch.Tensor | None" = None,
) -> None:
    """Raise a ValueError if a custom function's result has the wrong shape or lost its gradient.

    The result's values are not read. `where` names the flag and the path, `meaning` the tensor's
    contents. If `differentiable_in` requires a gradient, the result must too: Megatron's schedules
    accept a loss without one, and training would continue without learning.
    """
    import torch  # not needed by the settings and their flags

    is_tensor, kind = isinstance(value, torch.Tensor), "a tensor of shape"
    if not is_tensor or value.shape != torch.Size(shape):
        found = f"{kind} {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
        raise ValueError(f"{where} returned {found}, expected {kind} {list(shape)}: {meaning}")
    has_gradient = differentiable_in is not None and differentiable_in.requires_grad
    if has_gradient and torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(
            f"{where} returned a tensor without a gradient, so training would not learn. Compute "
            "it from the function's argument, without detach(), .data, .item() or "
            "torch.no_grad(). If there is no token, return argument.sum() * 0."
        )
