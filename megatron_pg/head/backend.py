"""The choice of implementation: plain torch, Triton kernels, or the products of a Hopper GPU."""

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head import rows_torch


@functools.cache
def _optional(name: str) -> ModuleType | None:
    """Import a module of `head`, or return None if a package that it needs is missing."""
    try:
        return importlib.import_module(f"megatron_pg.head.{name}")
    except ImportError:
        return None


def choose(kernels: str, in_torch: ModuleType, *matrices: Tensor) -> ModuleType:
    """Return the module `kernels` if Triton kernels support the matrices, else `in_torch`, which
    has the same functions.
    """
    is_taken = all(x.is_cuda and x.dtype != torch.float64 and x.stride(1) == 1 for x in matrices)
    return (_optional(kernels) if is_taken else None) or in_torch


def row_passes(logits: Tensor) -> ModuleType:
    """Return `rows_triton` or `rows_torch`."""
    return choose("rows_triton", rows_torch, logits)


def hopper_products(hidden: Tensor, *settings: Any) -> Any:
    """Return the products of exponentials if QuACK is installed and supports these factors, else
    None (`find_products`).
    """
    module = _optional("hopper.exponentials") if hidden.is_cuda else None
    return module.find_products(hidden, *settings) if module else None
