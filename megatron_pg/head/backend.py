"""The choice of who computes: plain torch, Triton kernels, or the products of a Hopper GPU."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from megatron_pg.head import rows_torch
from megatron_pg.head.vocabulary_shard import VocabularyShard
from megatron_pg.head.wings import FirstProduct


@functools.cache
def _optional(name: str) -> ModuleType | None:
    """Import a module by its path inside `head`; None where a package that it needs is missing."""
    try:
        return importlib.import_module(f"megatron_pg.head.{name}")
    except ImportError:
        return None


def choose(kernels: str, in_torch: ModuleType, *matrices: Tensor) -> ModuleType:
    """Return the module `kernels` for matrices that Triton kernels take, else `in_torch`, which has the same functions."""
    is_taken = all(x.is_cuda and x.dtype != torch.float64 and x.stride(1) == 1 for x in matrices)
    return (_optional(kernels) if is_taken else None) or in_torch


def row_passes(logits: Tensor) -> ModuleType:
    """Return `rows_triton` or `rows_torch`."""
    return choose("rows_triton", rows_torch, logits)


def hopper_products(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    temperature: float | Tensor,
    with_entropy: bool,
) -> FirstProduct | None:
    """Return the products of exponentials, if QuACK is installed and takes these factors."""
    products: FirstProduct | None = None
    if hidden.is_cuda and (choice := _optional("hopper.choice")):
        products = choice.find_products(hidden, weight, shard, temperature, with_entropy)
    return products
