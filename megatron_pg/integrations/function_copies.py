"""Copies of another package's functions that run beside the originals: what they change or stand in for stays theirs."""

import copy
import types
from collections.abc import Callable, Mapping
from typing import Any


def copier(package: str, stand_ins: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Make a function that copies a package's functions. Global names are those of their modules, except for the stand-ins."""
    namespaces: dict[int, dict[str, Any]] = {}

    def copied(function: Any) -> Any:
        """Copy a function, and what a compiled one was compiled from; leave anything else as it is."""
        function = getattr(function, "_torchdynamo_orig_callable", function)
        is_theirs = str(getattr(function, "__module__", "")).partition(".")[0] == package
        if not isinstance(function, types.FunctionType) or not is_theirs:
            return function
        theirs = function.__globals__
        if id(theirs) not in namespaces:
            mine = namespaces[id(theirs)] = dict(theirs)
            mine |= {n: stand_ins[n] if n in stand_ins else copied(v) for n, v in theirs.items()}
        closed = function.__defaults__, function.__closure__
        made = types.FunctionType(
            function.__code__, namespaces[id(theirs)], function.__name__, *closed
        )
        made.__kwdefaults__ = copy.copy(function.__kwdefaults__)
        return made

    return copied
