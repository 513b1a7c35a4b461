"""Where a trainer's source comes from: the folder of checkouts that TRAINERS names, or an installed
verl. None is stored here.

Packages that a trainer imports, and whose functions the tests never call, are empty modules.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pg.config.versions import has_megatron_training

ROOT = Path(__file__).parents[2]
TRAINERS = Path(os.environ.get("TRAINERS", "/nonexistent"))
STAND_INS = {
    "slime": "ray httpx wandb sglang sglang_router torch_memory_saver pandas".split(),
    "verl": "ray torchdata cachetools fastapi uvicorn aiohttp pandas zmq codetiming datasets "
    "accelerate peft dill "
    "pylatexenc".split(),
}
STAND_INS["miles"] = STAND_INS["slime"]


class _Name(type):
    """A class for whatever is imported: to inherit from, to annotate with, to decorate with."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        raise TypeError(f"{cls.__name__} stands in for what is not there, and is empty")

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        is_decorator = len(arguments) == 1 and not keywords and callable(arguments[0])
        return arguments[0] if is_decorator else cls


class _StandIn(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Name(name, (), {"__module__": self.__name__}))
        return self.__dict__[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if f"{name}.".startswith(tuple(f"{known}." for known in self.names)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def stand_in_for(names: Sequence[str], even_if_installed: bool = False) -> None:
    """Let packages, or modules below them, be imported without being there."""
    sys.meta_path.insert(0 if even_if_installed else len(sys.meta_path), _Finder(names))


def lacks(name: str, *packages: str) -> str | None:
    """Say why a trainer cannot be imported here; None where it can. Its checkout goes on the path
    of this process.
    """
    if (TRAINERS / name).is_dir() and str(TRAINERS / name) not in sys.path:
        sys.path.append(str(TRAINERS / name))
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        return (
            f"no {', '.join(missing)} here: bash ci/trainers.sh --clone FOLDER all, or, with "
            f"checkouts in TRAINERS, pip install --no-deps -r tests/trainers/requirements.txt"
        )
    stand_in_for(STAND_INS[name])
    return None


def find_verl() -> str | None:
    return lacks("verl", "verl", "tensordict", "omegaconf", "hydra", "transformers")


def functions(path: str, *names: str, **others: Any) -> dict[str, Any]:
    """Top-level functions of a checkout's file, unmodified, by name; `others` are names that
    they use.
    """
    file = TRAINERS / path
    if not file.is_file():
        pytest.skip(f"needs {path}: TRAINERS=<folder of checkouts>")
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") in names]
    made: dict[str, Any] = {"torch": torch, **vars(typing), **others}
    exec(compile(tree, str(file), "exec"), made)
    return made


def code_of_the_docs(*words: str) -> dict[str, Any]:
    """What the blocks of docs/where_this_fits.md that have one of some words define."""
    text = (ROOT / "docs/where_this_fits.md").read_text()
    made: dict[str, Any] = {"torch": torch}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if any(word in block for word in words):
            exec(block, made)
    return made


def needs_tree(name: str) -> pytest.MarkDecorator:
    """Skip a module's tests, and say so, where there is no checkout, or a Megatron-Core without
    megatron.training.
    """
    is_here = (TRAINERS / name).is_dir() and has_megatron_training()
    source = f"{name}'s source (TRAINERS=<folder with a checkout named {name}>)"
    return pytest.mark.skipif(not is_here, reason=f"needs {source} and megatron.training")


def use(name: str) -> None:
    """Let slime or miles be imported from the checkout; to be called once in a process of its
    own.
    """
    import torch._dynamo

    # Some of their functions are compiled: here they run as they are written.
    torch._dynamo.config.disable = True
    assert lacks(name) is None
    import ray

    if isinstance(ray, _StandIn):
        # One process: a remote class is the class, a stored object the object.
        ray.remote = ray.put = ray.get = lambda value: value


def slime_on_cpu() -> None:
    """Let slime answer for a CPU where it asks for its accelerator."""
    try:
        from slime.utils import accelerator
    except ImportError:  # older commits ask torch.cuda, which the CPU runtime answers
        return

    class Cpu(accelerator.Accelerator):
        name = device_type = "cpu"

        is_available = staticmethod(lambda: True)
        device = current_device = staticmethod(lambda index=None: torch.device("cpu"))

    Cpu.__abstractmethods__ = frozenset()
    accelerator.set_accelerator(Cpu())
