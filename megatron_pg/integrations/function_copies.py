"""Copies of another package's functions that run beside the originals: what they change or stand in for stays theirs."""

import copy
import types
from collections.abc import Mapping
from typing import Any


class FunctionCopies:
    """Copies of a package's functions. Global names are those of their modules, except for the stand-ins."""

    def __init__(self, package: str, stand_ins: Mapping[str, Any]) -> None:
        self._package, self._stand_ins = package, stand_ins
        self._namespaces: dict[int, dict[str, Any]] = {}

    def copy(self, function: Any) -> Any:
        """Copy a function, and what a compiled one was compiled from; leave anything else as it is."""
        function = getattr(function, "_torchdynamo_orig_callable", function)
        is_theirs = str(getattr(function, "__module__", "")).partition(".")[0] == self._package
        if not isinstance(function, types.FunctionType) or not is_theirs:
            return function
        made = types.FunctionType(
            function.__code__,
            self._namespace(function.__globals__),
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        made.__kwdefaults__ = copy.copy(function.__kwdefaults__)
        return made

    def _namespace(self, theirs: dict[str, Any]) -> dict[str, Any]:
        if (mine := self._namespaces.get(id(theirs))) is None:
            mine = self._namespaces[id(theirs)] = dict(theirs)
            for name, value in theirs.items():
                mine[name] = self._stand_ins[name] if name in self._stand_ins else self.copy(value)
        return mine
