"""Rows of float32 logits as exponentials. Without an entropy term, no pass reads or writes logits.

The first product writes `E = 2 ** (log2(e) z / temperature - k)`, with an integer k per tile of a
row, and the tile's sums. With L the base-2 logarithm of the row's sum and r an integer near L, the
probability of column j is

    p_j = E_j * 2 ** (k - r) * 2 ** (r - L)

and the gradient of its logit, for a loss with gradient g to the log-probability of target y, is

    g (1[j = y] - p_j) / temperature = E_j * 2 ** (k - r) * (-g / temperature * 2 ** (r - L))

with `(p_y - 1) / (2 ** (k - r) * 2 ** (r - L))` instead of E_y. The second and third product apply
the tile's factor, a power of two, when they read E, and the row's factor to their other operand or
result. With a gradient to the entropy, one pass overwrites E with the gradient.
"""

# Kernels are typed by Triton at their first launch, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import functools
import importlib
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.head import rows_triton
from megatron_pg.head.factor_gradients import FactorGradients, main_grad_of
from megatron_pg.head.hopper import MULTIPLE
from megatron_pg.head.kept import pairs_triton
from megatron_pg.head.kept.sets import KeptPairs
from megatron_pg.head.rows_triton import LN_2, LOG2_E, SMALLEST, arriving, log2, packed, write_zeros
from megatron_pg.head.vocabulary_shard import (
    ColumnGradients,
    Incoming,
    RowStatistics,
    VocabularyShard,
)

_FIRST_VERSION, _END_OF_VERSIONS = "0.6.5", "0.7"
"""The supported versions of quack-kernels, without the second. QuACK's internals may change."""
_MAX_TEMPERATURES = 4
_temperatures: set[float] = set()
"""The temperatures of this process. Each one compiles a kernel."""
_failures: list[str] = []
"""The failure after which this process does not use QuACK."""
T = TypeVar("T")
# Bounds of the factors' exponents, so that the gradient at a target divided by its factors fits
# bfloat16.
LEAST_STRIP = tl.constexpr(_LEAST_STRIP := -60.0)
LEAST_ROW = tl.constexpr(-40.0)
# Below the logarithm of every positive bfloat16 number.
LEAST_LOG2 = tl.constexpr(-134.0)
_LEAST_SHARE = 2.0**-16
"""The smallest ratio of the gradient to a row's log-probability to its largest column gradient."""


@triton.jit
def _local_target(targets, row, start, columns):
    """Return the column of the row's target, or -1 if another shard holds it."""
    local = tl.load(targets + row) - start
    return tl.where((local >= 0) & (local < columns), local, -1)


@triton.jit
def tile_statistics_kernel(
    offsets, sums, dots, target_logits, targets, temperature, shard_out,
    tiles, vocab_size,
    TILES: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one row's local columns to `shard_out` [rows, 4]. Without `dots`,
    their column is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILES)
    inside = lanes < tiles
    own = row * tiles + lanes
    offset = tl.load(offsets + own, mask=inside, other=-float("inf"))
    largest = tl.max(offset, axis=0)
    shift = tl.where(inside, offset - largest, 0.0)
    shrink = tl.exp2(shift)
    sums_of_tiles = tl.load(sums + own, mask=inside, other=0.0)
    total = tl.sum(shrink * sums_of_tiles, axis=0)
    dot = tl.full((), float("nan"), tl.float32)
    if dots is not None:
        dots_of_tiles = tl.load(dots + own, mask=inside, other=0.0)
        dot = tl.sum(shrink * (dots_of_tiles + shift * sums_of_tiles), axis=0)
    value = tl.load(temperature)
    maximum = largest * LN_2 * value
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocab_size)
    target_logit = tl.where(known, tl.load(target_logits + row), float("nan"))
    out = shard_out + row * 4
    tl.store(out, maximum)
    tl.store(out + 1, total)
    tl.store(out + 2, dot)
    tl.store(out + 3, target_logit)


@triton.jit
def row_factors_kernel(
    exponentials, offsets, hidden, targets, temperature, maximum, log_sum, log_probs,
    grad_log_probs, factors_out, references_out, scaled_hidden_out,
    rows, tiles, columns, hidden_size, hidden_stride, start,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row's factor (0 from `rows` on), its strips' reference exponent, and factor times
    hidden states.

    The target's exponential becomes the gradient of the target's logit divided by both factors.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILES)
    offset = tl.load(offsets + row * tiles + lanes, mask=lanes < tiles, other=-float("inf"))
    reference = tl.max(offset, axis=0)
    factor = tl.full((), 0.0, tl.float32)
    if row < rows:
        to_log_prob = tl.load(grad_log_probs + row)
        value = tl.load(temperature)
        log2_total = (tl.load(maximum + row) / value + tl.load(log_sum + row)) * LOG2_E
        reference = tl.maximum(reference, tl.floor(log2_total) + LEAST_ROW)
        base = exponentials + row * columns
        if to_log_prob != 0.0:
            factor = -to_log_prob / value * tl.exp2(reference - log2_total)
            local = _local_target(targets, row, start, columns)
            if local >= 0:
                of_tile = tl.load(offsets + row * tiles + local // TILE)
                strip = tl.maximum(of_tile - reference, LEAST_STRIP)
                less_one = tl.exp(tl.load(log_probs + row)) - 1.0
                at_target = less_one * tl.exp2(log2_total - reference - strip)
                tl.store(base + local, at_target.to(exponentials.dtype.element_ty))
        elif not (tl.abs(log2_total) < float("inf")):
            # 0 times this exponential would be NaN.
            write_zeros(base, 0, columns, BLOCK)
    tl.store(factors_out + row, factor)
    tl.store(references_out + row, reference)
    for first in range(0, hidden_size, BLOCK):
        of_hidden = first + tl.arange(0, BLOCK)
        inside = of_hidden < hidden_size
        state = tl.load(hidden + row * hidden_stride + of_hidden, mask=inside, other=0.0)
        scaled = tl.where(factor == 0.0, 0.0, state.to(tl.float32) * factor)
        scaled = scaled.to(scaled_hidden_out.dtype.element_ty)
        tl.store(scaled_hidden_out + row * hidden_size + of_hidden, scaled, mask=inside)


@triton.jit
def strip_factors_kernel(
    offsets, references, strips_out, rows, tiles,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write 2 ** (offset - reference) for TILES tiles and ROWS rows to `strips_out` [tiles *
    REPEAT, rows].
    """
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (tile < tiles)[None, :]
    offset = tl.load(offsets + row[:, None] * tiles + tile[None, :], mask=inside, other=0.0)
    reference = tl.load(references + row, mask=row < rows, other=0.0)
    exponent = tl.maximum(offset - reference[:, None], LEAST_STRIP)
    # A NaN row has NaN exponents. Its exponentials propagate the NaN if the row counts.
    strip = tl.exp2(tl.where(exponent == exponent, exponent, 0.0))
    strip = tl.trans(strip.to(strips_out.dtype.element_ty))
    inside = tl.trans(inside)
    for repeat in tl.static_range(REPEAT):
        at = (tile[:, None] * REPEAT + repeat) * rows + row[None, :]
        tl.store(strips_out + at, strip, mask=inside)


@triton.jit
def exponential_gradient_kernel(
    exponentials, offsets, targets, temperature, maximum, log_sum, log_probs, entropy,
    grad_log_probs, grad_entropy,
    columns, tiles, start, segments, segment,
    OFFSET_TILE: tl.constexpr, STRIPS: tl.constexpr, STRIP: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    """Overwrite a segment of one row of exponentials with the gradient of its logits. See
    `rows_triton.gradient_kernel`.

    It works on STRIPS strips at a time. STRIP divides OFFSET_TILE, so that a strip has one offset,
    loaded and raised once.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // segments).to(tl.int64)
    begin = program % segments * segment
    end = tl.minimum(begin + segment, columns)
    base = exponentials + row * columns
    to_log_prob, to_entropy = arriving(grad_log_probs, row), arriving(grad_entropy, row)
    if (to_log_prob != 0.0) | (to_entropy != 0.0):
        value = tl.load(temperature)
        log2_total = (tl.load(maximum + row) / value + tl.load(log_sum + row)) * LOG2_E
        constant = -(to_log_prob + to_entropy * tl.load(entropy + row)) / value
        slope = -to_entropy * LN_2 / value
        local = _local_target(targets, row, start, columns).to(tl.int32)
        # The target's exponential is rounded, its log-probability is not.
        log2_p = tl.load(log_probs + row) * LOG2_E
        factor = constant + slope * tl.maximum(log2_p, SMALLEST)
        at_target = tl.exp2(log2_p) * factor + to_log_prob / value
        for first in range(begin, end, STRIPS * STRIP):
            strip = first + tl.arange(0, STRIPS) * STRIP
            of_tile = tl.load(
                offsets + row * tiles + strip // OFFSET_TILE, mask=strip < end, other=0.0
            )
            shift = of_tile - log2_total
            power = tl.exp2(shift)
            level = constant + slope * tl.maximum(shift, SMALLEST)
            lanes = strip[:, None] + tl.arange(0, STRIP)[None, :]
            inside = lanes < end
            exponential = tl.load(base + lanes, mask=inside, other=0.0).to(tl.float32)
            # Bound the logarithm, because 0 * -inf is NaN. A NaN still propagates through the
            # exponential or its power.
            logarithm = tl.maximum(log2(exponential, SPECIAL), LEAST_LOG2)
            gradient = exponential * power[:, None] * (level[:, None] + slope * logarithm)
            gradient = tl.where(lanes == local, at_target, gradient)
            tl.store(base + lanes, gradient.to(exponentials.dtype.element_ty), mask=inside)
    else:
        write_zeros(base, begin, end, STRIPS * STRIP)


_GRADIENT_STRIPS, _STRIP, _GRADIENT_TILES, _WARPS = 16, 64, 8, 4


@dataclass(frozen=True)
class ExponentialProducts:
    """The first product of the output layer as exponentials."""

    products: ModuleType  # `quack_products`
    shard: VocabularyShard
    temperature: float
    with_entropy: bool

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Run `work` and return its result. Warn once and return None if QuACK or its compiler
        fails, now or earlier.

        A kernel that fails to compile was not launched, so sums are unchanged and different kernels
        can do the work. Device errors and a lack of memory are raised again there.
        """
        if _failures:
            return None
        try:
            return work()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # anything that a compiler raises
            _failures.append(f"it failed ({type(error).__name__}: {error})")
            _say(_failures[0])
            return None

    def padded(self, rows: int) -> int:
        """Return how many rows of the buffer `rows` rows take."""
        return -(-rows // MULTIPLE) * MULTIPLE

    def first_product(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, place: slice, buffer: Tensor
    ) -> ExponentialRows:
        """Multiply hidden states [rows, hidden], at `place` among all tokens, into the first rows
        of `buffer` [padded rows, v/tp].
        """
        rows, columns, weight = len(hidden), len(weight), weight.detach()
        whole, local = self.padded(rows), targets - self.shard.start
        if whole > rows:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, whole - rows))
            local = torch.nn.functional.pad(local, (0, whole - rows), value=-1)
        elif hidden.stride(1) != 1 or hidden.stride(0) % 8 or hidden.data_ptr() % 16:
            hidden = hidden.clone(memory_format=torch.contiguous_format)
        tiles = columns // self.products.tile_of(columns, self.with_entropy)
        value = torch.full((), self.temperature, dtype=torch.float32, device=hidden.device)
        offsets, sums = (value.new_empty((whole, tiles)) for _ in range(2))
        dots = torch.empty_like(sums) if self.with_entropy else None
        # The product writes no logit for another shard's target or for -inf.
        exponentials, target_logits = buffer[:whole], value.new_full((whole,), -math.inf)
        self.products.write_exponentials(
            hidden, weight, local, self.temperature, exponentials,
            offsets=offsets, sums=sums, dots=dots, target_logits=target_logits,
        )  # fmt: skip
        shard_statistics = value.new_empty((rows, 4))
        tile_statistics_kernel[(rows,)](
            offsets, sums, dots, target_logits, targets.contiguous(), value, shard_statistics,
            tiles, self.shard.vocab_size,
            TILES=triton.next_power_of_2(tiles), num_warps=_WARPS,
        )  # fmt: skip
        return ExponentialRows(
            self, hidden, weight, targets, place, value, exponentials, offsets, shard_statistics
        )


@dataclass(frozen=True)
class ExponentialRows:
    """Some rows after the first product, a `Chunk`. Rows from `len(targets)` on fill up a tile.

    Hidden states and exponentials are [padded rows, ...] bfloat16, offsets [padded rows, tiles]
    whole numbers in float32.
    """

    layer: ExponentialProducts
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    place: slice
    temperature: Tensor
    exponentials: Tensor
    offsets: Tensor
    shard_statistics: Tensor

    def statistics(self) -> RowStatistics:
        return rows_triton.combine(self.shard_statistics, self.layer.shard, self.temperature)

    def logits_of(self, columns: Tensor) -> Tensor:
        """Recompute the logits [rows, n] of local columns. Exponentials are bfloat16, and 1 minus a
        likely token's probability needs more digits.
        """
        rows = torch.arange(len(self.targets), device=columns.device)
        rows, places = rows.repeat_interleave(columns.shape[1]), columns.flatten()
        is_here, nothing = torch.ones_like(places, dtype=torch.bool), places.new_empty(0)
        pairs = KeptPairs(
            rows, places, is_here, nothing, nothing, self.temperature, self.layer.shard
        )
        hidden = self.hidden[: len(self.targets)]
        return pairs_triton.pair_logits(hidden, self.weight, pairs).view(columns.shape)

    def add_gradient(
        self,
        gradients: FactorGradients,
        statistics: RowStatistics,
        incoming: Incoming,
        columns: ColumnGradients | None = None,
    ) -> None:
        """Add the products. With a gradient to the entropy, the exponentials first become the
        gradient of the logits.
        """
        to_log_probs, to_entropy = incoming
        if to_log_probs is None or to_entropy is not None:
            gradient = self._write_gradient(statistics, incoming)
            if columns is not None:
                columns.write(gradient)
            gradients.add_products(self.place, self.hidden[: len(gradient)], gradient)
            return
        if columns is not None:
            # It scales the row and its columns, so it must not be 0.
            least = _LEAST_SHARE * columns.values.abs().amax(1) * self.temperature
            to_log_probs = torch.where(to_log_probs == 0, least, to_log_probs)
        (whole, tiles), width = self.offsets.shape, self.exponentials.shape[1]
        products, left, strip = self.layer.products, self.exponentials, self.layer.products.STRIP
        tile = width // tiles
        factors, references = self.temperature.new_empty((2, whole))
        scaled_hidden = torch.empty_like(self.hidden, memory_format=torch.contiguous_format)
        row_factors_kernel[(whole,)](
            left, self.offsets, self.hidden, self.targets.contiguous(), self.temperature,
            statistics.maximum, statistics.log_sum, statistics.log_probs,
            packed(to_log_probs, torch.float32), factors, references, scaled_hidden,
            len(self.targets), tiles, width, self.hidden.shape[1], self.hidden.stride(0),
            self.layer.shard.start,
            TILE=tile, TILES=triton.next_power_of_2(tiles), BLOCK=1024, num_warps=_WARPS,
        )  # fmt: skip
        if columns is not None:
            self._write_columns(columns, factors, references)
        strips = self.hidden.new_empty((width // strip, whole))
        strip_factors_kernel[(-(-tiles // 64), -(-whole // 64))](
            self.offsets, references, strips, whole, tiles,
            REPEAT=tile // strip, ROWS=64, TILES=64, num_warps=_WARPS,
        )  # fmt: skip
        if gradients.hidden is not None:
            out = gradients.hidden[self.place]
            padded_out = out if len(out) == whole else torch.empty_like(scaled_hidden)
            products.write_hidden_gradient(left, strips, factors, self.weight, padded_out)
            if padded_out is not out:
                out.copy_(padded_out[: len(out)])
        if gradients.needs_weight:
            gradients.add_to_weight(
                lambda out, add: products.add_weight_gradient(
                    left, strips, scaled_hidden, out, add=add
                )
            )

    def _write_columns(self, columns: ColumnGradients, factors: Tensor, references: Tensor) -> None:
        """Write the gradient of these columns divided by both factors."""
        rows, tile = len(self.targets), self.exponentials.shape[1] // self.offsets.shape[1]
        offsets = self.offsets[:rows].gather(1, columns.columns // tile)
        strips = (offsets - references[:rows, None]).clamp(min=_LEAST_STRIP).exp2()
        scale = factors[:rows, None] * strips
        values = torch.where(scale == 0, 0.0, columns.values / scale)
        columns.write(self.exponentials[:rows], values)

    def _write_gradient(self, statistics: RowStatistics, incoming: Incoming) -> Tensor:
        """Overwrite the exponentials with the gradient [rows, v/tp] of their logits."""
        count, tiles = len(self.targets), self.offsets.shape[1]
        columns, segment = self.exponentials.shape[1], _GRADIENT_STRIPS * _STRIP * _GRADIENT_TILES
        segments = -(-columns // segment)
        exponential_gradient_kernel[(count * segments,)](
            self.exponentials, self.offsets, self.targets.contiguous(), self.temperature,
            statistics.maximum, statistics.log_sum, statistics.log_probs, statistics.entropy,
            *(packed(vector, torch.float32) for vector in incoming),
            columns, tiles, self.layer.shard.start, segments, segment,
            OFFSET_TILE=columns // tiles, STRIPS=_GRADIENT_STRIPS, STRIP=_STRIP,
            SPECIAL=self.exponentials.is_cuda, num_warps=_WARPS,
        )  # fmt: skip
        return self.exponentials[:count]


def find_products(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    temperature: float | Tensor,
    with_entropy: bool,
) -> ExponentialProducts | None:
    """Return the products of exponentials for these factors, or None. Warn once about the reason if
    QuACK is installed.
    """
    version = None if _failures else _installed()
    if version is None:
        return None
    reason = _refusal(hidden, weight, shard, temperature, main_grad_of(weight))
    products = reason or _products(version)
    if isinstance(products, str):
        _say(products)
        return None
    return ExponentialProducts(products, shard, float(temperature), with_entropy)


@functools.cache
def _installed() -> str | None:
    try:
        return metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _products(version: str) -> ModuleType | str:
    """Return the module `quack_products`, or the reason why this version is not used."""
    low, installed, high = (
        [int(part) for part in re.findall(r"\d+", text)[:3]]
        for text in (_FIRST_VERSION, version, _END_OF_VERSIONS)
    )
    if not low <= installed < high:
        return f"it requires quack-kernels>={_FIRST_VERSION},<{_END_OF_VERSIONS}, found {version}"
    try:
        return importlib.import_module("megatron_pg.head.hopper.quack_products")
    except Exception as error:  # anything that a compiler raises on this machine
        return f"quack-kernels {version} cannot be imported ({type(error).__name__}: {error})"


def _refusal(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    temperature: float | Tensor,
    main_grad: Tensor | None,
) -> str:
    """Return the reason why the products do not support these factors, or ""."""
    columns, size = weight.shape
    tensors = [weight] if main_grad is None else [weight, main_grad]
    if torch.cuda.get_device_capability(hidden.device) != (9, 0):
        return "it requires a Hopper GPU"
    if hidden.dtype != torch.bfloat16:
        return f"it requires bfloat16 hidden states, found {hidden.dtype}"
    if columns % MULTIPLE or size % 8:
        return (
            f"it requires a weight with a multiple of {MULTIPLE} columns and of 8 hidden, found "
            f"{columns} and {size}"
        )
    if isinstance(temperature, Tensor):
        return "its kernels compile in the temperature, which is a tensor here"
    if shard.columns != columns:
        return f"{columns - shard.columns} of the {columns} columns of this rank are padding"
    if main_grad is not None and main_grad.dtype != torch.float32:
        return f"it requires float32 main_grad, found {main_grad.dtype}"
    if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors):
        return "weight or main_grad is not contiguous and aligned to 16 bytes"
    _temperatures.update([temperature] if len(_temperatures) < _MAX_TEMPERATURES else [])
    if temperature not in _temperatures:
        return (
            f"its kernels compile in the temperature, and this process has {_MAX_TEMPERATURES} "
            "others"
        )
    return ""


@functools.cache
def _say(reason: str) -> None:
    warnings.warn(
        f"the fused head does not use QuACK: {reason}. Its own kernels are used.", stacklevel=5
    )
