"""The choice of QuACK's products: their version, and the factors that they take."""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from importlib import metadata
from types import ModuleType

import torch
from torch import Tensor

from megatron_pg.head.factor_gradients import main_grad_of
from megatron_pg.head.hopper.exponentials import MULTIPLE, ExponentialProducts
from megatron_pg.head.vocabulary_shard import VocabularyShard

_VERSIONS = ((0, 6, 5), (0, 7))
"""The first version of quack-kernels that is taken, and the first that is not: its pieces have no promise of staying."""
_MAX_TEMPERATURES = 4
_temperatures: set[float] = set()
"""The temperatures of this process: each is a kernel to be compiled and kept."""


def find_products(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    temperature: float | Tensor,
    with_entropy: bool,
) -> ExponentialProducts | None:
    """Return the products of exponentials for these factors, or None; say why once where QuACK is installed."""
    version = _installed()
    if version is None:
        return None
    reason = _refusal(hidden, weight, shard, temperature, main_grad_of(weight))
    products = reason or _products(version)
    if isinstance(products, str):
        _say(products)
        return None
    return ExponentialProducts(products, weight.detach(), shard, float(temperature), with_entropy)


@functools.cache
def _installed() -> str | None:
    """Return the version of quack-kernels."""
    try:
        return metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _products(version: str) -> ModuleType | str:
    """Return the module `quack_products` with that version, or the reason why there are none."""
    low, high = _VERSIONS
    if not low <= tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < high:
        return f"it asks for quack-kernels>={_dotted(low)},<{_dotted(high)}, found {version}"
    try:
        return importlib.import_module("megatron_pg.head.hopper.quack_products")
    except Exception as error:  # anything that a compiler raises which does not fit this machine
        return f"quack-kernels {version} cannot be imported ({type(error).__name__}: {error})"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _refusal(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    temperature: float | Tensor,
    main_grad: Tensor | None,
) -> str:
    """Return the reason why the products do not take these factors; "" for none."""
    columns, size = weight.shape
    if torch.cuda.get_device_capability(hidden.device) != (9, 0):
        return "its products are those of Hopper GPUs"
    if hidden.dtype != torch.bfloat16:
        return f"it takes bfloat16 hidden states, found {hidden.dtype}"
    if columns % MULTIPLE or size % 8:
        return f"it takes weights of a multiple of {MULTIPLE} columns and 8 hidden, found {columns} and {size}"
    if isinstance(temperature, Tensor):
        return "its kernels hold the temperature, which is a tensor here"
    if shard.columns != columns:
        return f"{columns - shard.columns} of the {columns} columns of this rank are padding"
    if main_grad is not None and main_grad.dtype != torch.float32:
        return f"it adds to float32 gradients, found {main_grad.dtype}"
    tensors = [weight] if main_grad is None else [weight, main_grad]
    if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors):
        return "weight or gradient are not contiguous from 16 bytes on"
    _temperatures.update([temperature] if len(_temperatures) < _MAX_TEMPERATURES else [])
    if temperature not in _temperatures:
        return f"its kernels hold the temperature, of which this process has {_MAX_TEMPERATURES} others"
    return ""


@functools.cache
def _say(reason: str) -> None:
    warnings.warn(
        f"the fused head does not use QuACK: {reason}. Its own kernels are used.", stacklevel=5
    )
