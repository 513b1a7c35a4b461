"""Rows of float32 logits as exponentials: no pass reads or writes the logits of a loss without an entropy term.

The first product leaves `E = 2 ** (log2(e) z / temperature - k)` of each tile of a row, with a whole number k, and sums.
Then, with L the logarithm (base 2) of the row's sum and r a whole number near it, the probability of column j is

    p_j = E_j * 2 ** (k - r) * 2 ** (r - L)

and the gradient of its logit, of a loss with gradient g to the log-probability of target y, is

    g (1[j = y] - p_j) / temperature = E_j * 2 ** (k - r) * (-g / temperature * 2 ** (r - L))

with `(p_y - 1) / (2 ** (k - r) * 2 ** (r - L))` in the place of E_y. The factor of the tile, a power of two, goes into the
other two products as they read E; that of the row into what they multiply or return. With a gradient to the
entropy the factor of a column is not one of its row and tile: E is overwritten with the gradient in one pass.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import warnings
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

import torch
from torch import Tensor

from megatron_pg.head.vocabulary_shard import RowStatistics, VocabularyShard

_VERSIONS = ((0, 6, 5), (0, 7))
"""Of quack-kernels, from the first and before the second: its pieces have no promise of staying."""
_MAX_TEMPERATURES = 4
_temperatures: set[float] = set()
"""Each is a kernel to be compiled and kept."""
_GRADIENT_TILE, _GRADIENT_TILES, _WARPS = 1024, 8, 4
MULTIPLE = 128
"""Rows and columns of exponentials come in multiples of it: a tile of the second and of the third product."""


@dataclass(frozen=True)
class ExponentialRows:
    """What the first product leaves of some rows; those from `len(targets)` on fill up a tile."""

    hidden: Tensor
    """[padded rows, hidden] bfloat16."""
    exponentials: Tensor
    """[padded rows, v/tp] bfloat16."""
    offsets: Tensor
    """[padded rows, tiles] float32, whole numbers."""
    of_shard: Tensor
    """[rows, 4] float32, the statistics of this shard's columns."""
    targets: Tensor
    """[rows] int64, global."""
    shard: VocabularyShard
    temperature: Tensor
    """One element."""
    products: ModuleType
    """The module of the three products."""


def padded(rows: int) -> int:
    """Rows that so many take up."""
    return -(-rows // MULTIPLE) * MULTIPLE


@functools.cache
def _installed() -> str | None:
    """The version of quack-kernels."""
    try:
        return metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _products(found: str) -> ModuleType | str:
    """The module `quack_products` with that version, or why it cannot be had."""
    low, high = _VERSIONS
    if not low <= tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < high:
        return f"it asks for quack-kernels>={_dotted(low)},<{_dotted(high)}, found {found}"
    try:
        return importlib.import_module("megatron_pg.head.hopper.quack_products")
    except Exception as error:  # whatever a compiler that does not fit this machine raises
        return f"quack-kernels {found} cannot be imported ({type(error).__name__}: {error})"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def find_products(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    temperature: float | Tensor,
    main_grad: Tensor | None,
) -> ModuleType | None:
    """The products of exponentials for these factors, or None; why not is said once where QuACK is installed."""
    version = _installed() if hidden.is_cuda else None
    if version is None:
        return None
    reason = _refusal(hidden, weight, shard, temperature, main_grad)
    products = reason or _products(version)
    if isinstance(products, str):
        _say(products)
        return None
    return products


def _refusal(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    temperature: float | Tensor,
    main_grad: Tensor | None,
) -> str:
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
    if not all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in tensors):
        return "weight or gradient are not contiguous from 16 bytes on"
    _temperatures.update([temperature] if len(_temperatures) < _MAX_TEMPERATURES else [])
    if temperature not in _temperatures:
        return f"its kernels hold the temperature, of which this process has {_MAX_TEMPERATURES} others"
    return ""


@functools.cache
def _say(reason: str) -> None:
    warnings.warn(
        f"the fused head does not use QuACK: {reason}. Its own kernels are used.", stacklevel=4
    )


def first_product(
    products: ModuleType,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    temperature: float,
    buffer: Tensor,
    *,
    with_entropy: bool,
) -> ExponentialRows:
    """Multiplies the rows of `hidden`, one or more, and `weight` into the front of `buffer` [padded rows or more, v/tp]."""
    from megatron_pg.head.hopper import exponentials_kernels

    rows, columns = len(hidden), len(weight)
    whole = padded(rows)
    local = targets - shard.start
    if whole > rows:
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, whole - rows))
        local = torch.nn.functional.pad(local, (0, whole - rows), value=-1)
    elif hidden.stride(1) != 1 or hidden.stride(0) % 8 or hidden.data_ptr() % 16:
        hidden = hidden.clone(memory_format=torch.contiguous_format)
    tiles = columns // products.tile_of(columns)
    value = torch.full((), temperature, dtype=torch.float32, device=hidden.device)
    offsets, sums = (value.new_empty((whole, tiles)) for _ in range(2))
    dots = torch.empty_like(sums) if with_entropy else None
    # What the product leaves out: targets of another shard, and of -inf.
    exponentials, target_logits = buffer[:whole], value.new_full((whole,), -math.inf)
    products.write_exponentials(
        hidden, weight, local, temperature, exponentials,
        offsets=offsets, sums=sums, dots=dots, target_logits=target_logits,
    )  # fmt: skip
    of_shard = value.new_empty((rows, 4))
    exponentials_kernels.tile_statistics_kernel[(rows,)](
        offsets, sums, dots, target_logits, targets.contiguous(), value, of_shard,
        tiles, shard.vocab_size,
        TILES=_power_of_two(tiles), num_warps=_WARPS,
    )  # fmt: skip
    return ExponentialRows(hidden, exponentials, offsets, of_shard, targets, shard, value, products)


def row_statistics(rows: ExponentialRows) -> RowStatistics:
    """Of the rows of targets; every tensor-parallel rank must call. See `rows_torch.row_statistics`."""
    from megatron_pg.head import rows_triton

    count = len(rows.targets)
    outputs = RowStatistics(*(rows.temperature.new_empty(count) for _ in RowStatistics._fields))
    rows_triton.combine(rows.of_shard, rows.shard, rows.temperature, None, outputs)
    return outputs


def gradient_factors(
    rows: ExponentialRows, statistics: RowStatistics, to_log_probs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What exponentials are to be multiplied by to be the gradient of the logits, given that to the log-probabilities [rows].

    Those of the targets are overwritten.

    Returns:
        factors of the rows [padded rows] float32 and of strips of columns [strips, padded rows] bfloat16, and the hidden states
        times the factors of the rows, like `rows.hidden`.
    """
    from megatron_pg.head.hopper import exponentials_kernels

    (whole, tiles), columns = rows.offsets.shape, rows.exponentials.shape[1]
    tile, size = columns // tiles, rows.hidden.shape[1]
    factors, references = rows.temperature.new_empty((2, whole))
    scaled_hidden = torch.empty_like(rows.hidden, memory_format=torch.contiguous_format)
    exponentials_kernels.row_factors_kernel[(whole,)](
        rows.exponentials, rows.offsets, rows.hidden, rows.targets.contiguous(), rows.temperature,
        statistics.maximum, statistics.log_sum, statistics.log_probs,
        to_log_probs.to(torch.float32).contiguous(),
        factors, references, scaled_hidden,
        len(rows.targets), tiles, columns, size, rows.hidden.stride(0), rows.shard.start,
        TILE=tile, TILES=_power_of_two(tiles), BLOCK=1024, num_warps=_WARPS,
    )  # fmt: skip
    strip = rows.products.STRIP
    strips = rows.hidden.new_empty((columns // strip, whole))
    exponentials_kernels.strip_factors_kernel[(-(-tiles // 64), -(-whole // 64))](
        rows.offsets, references, strips, whole, tiles,
        REPEAT=tile // strip, ROWS=64, TILES=64, num_warps=_WARPS,
    )  # fmt: skip
    return factors, strips, scaled_hidden


def write_gradient(
    rows: ExponentialRows, statistics: RowStatistics, incoming: tuple[Tensor | None, ...]
) -> Tensor:
    """Overwrites the exponentials with the gradient [rows, v/tp] of their logits, given those to log-probabilities and entropy."""
    from megatron_pg.head.hopper import exponentials_kernels

    count, tiles = len(rows.targets), rows.offsets.shape[1]
    columns, segment = rows.exponentials.shape[1], _GRADIENT_TILE * _GRADIENT_TILES
    segments = -(-columns // segment)
    exponentials_kernels.exponential_gradient_kernel[(count * segments,)](
        rows.exponentials, rows.offsets, rows.targets.contiguous(), rows.temperature,
        statistics.maximum, statistics.log_sum, statistics.log_probs, statistics.entropy,
        *(None if each is None else each.to(torch.float32).contiguous() for each in incoming),
        columns, tiles, rows.shard.start, segments, segment,
        OFFSET_TILE=columns // tiles, TILE=_GRADIENT_TILE, num_warps=_WARPS,
    )  # fmt: skip
    return rows.exponentials[:count]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
