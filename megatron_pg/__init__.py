"""The policy-gradient loss for RL on Megatron-Core, normalized right at any parallelism.

Code that uses Megatron is in `megatron_pg.megatron`: `from megatron_pg.megatron import PolicyStep`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_pg.exports import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the exports at first use, so that `megatron-pg --help` does not import torch."""
    exports = import_module("megatron_pg.exports")
    if name == "__all__" or name in exports.__all__:
        return getattr(exports, name)
    raise AttributeError(f"module 'megatron_pg' has no attribute {name!r}")


def __dir__() -> list[str]:
    exports = import_module("megatron_pg.exports")
    names: list[str] = import_module("megatron_pg.config.versions").public_names(
        __name__, exports.__all__
    )
    return names
