"""Counting the operators that a piece of code dispatches."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

SYNCHRONISING = ("_local_scalar_dense", "nonzero", "masked_select", "unique")
"""Operators whose result, or its shape, the host has to wait for."""


class CountDispatches(TorchDispatchMode):
    """Notes the name of every operator in `names`; may refuse those that make the host wait."""

    def __init__(self, may_synchronise: bool = True) -> None:
        super().__init__()
        self.may_synchronise = may_synchronise
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        if not self.may_synchronise and any(word in name for word in SYNCHRONISING):
            raise AssertionError(f"{name} synchronises")
        self.names.append(name)
        return func(*args, **(kwargs or {}))
