"""Where a trainer's checkout lies, and what stands in for packages that its modules import and these tests never call."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_pg.config.versions import has_megatron_training

STAND_INS = ("ray", "httpx", "wandb", "sglang", "sglang_router", "torch_memory_saver")
"""What is imported at the top of the modules of slime and miles that are used here, for rollouts, logging and offloading."""


def tree(name: str) -> Path | None:
    """The checkout of a trainer in the folder that TRAINERS names, or None."""
    folder = os.environ.get("TRAINERS")
    path = Path(folder) / name if folder else None
    return path.resolve() if path is not None and path.is_dir() else None


def needs_tree(name: str) -> pytest.MarkDecorator:
    """Skips a module's tests, and says so, where there is no checkout, or a Megatron-Core without megatron.training."""
    reason = ""
    if tree(name) is None:
        reason = f"needs {name}'s source: TRAINERS=<folder with a checkout named {name}> bash ci/trainers.sh"
    elif not has_megatron_training():
        reason = f"{name} imports megatron.training, which this Megatron-Core has not got"
    return pytest.mark.skipif(bool(reason), reason=reason)


class StandInError(RuntimeError):
    """Something of a package that only stands in was called: the test does not run what it says it runs."""


class _Called(type):
    """Classes of a stand-in may be inherited from and named in annotations, and never made."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        raise StandInError(f"{cls.__module__}.{cls.__name__} was called, and only stands in")


class _StandIn(types.ModuleType):
    """A module that has whatever is imported from it."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Called(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "ray":
            # One process: a remote class is the class, and an object in the store is the object.
            module.remote = lambda made: made  # type: ignore[attr-defined]
            module.put = module.get = lambda value: value  # type: ignore[attr-defined]


def use(name: str, modules: Sequence[str]) -> list[types.ModuleType]:
    """Modules of a trainer's checkout, imported; to be called once in a process of its own."""
    import torch._dynamo

    # Some of their functions are compiled: here they run as they are written.
    torch._dynamo.config.disable = True
    path = tree(name)
    assert path is not None
    sys.path.insert(0, str(path))
    sys.meta_path.append(_Finder())  # after those that find what is installed
    return [importlib.import_module(module) for module in modules]


def skip_other_commits(path: Path, commit: str) -> None:
    """Skips a test that is about one commit where the checkout is another, or is no repository."""
    command = ["git", "-C", str(path), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not head.startswith(commit):
        pytest.skip(
            f"the checkout is {head[:7] or 'no repository'}, the fingerprints are of {commit}"
        )
