"""The output layer over chunks of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.backend import hopper_products, row_passes
from megatron_pg.head.chunks import chunk_rows, rows_in_budget
from megatron_pg.head.factor_gradients import FactorGradients, multiply
from megatron_pg.head.from_logits import FLOAT_DTYPES, check_vector
from megatron_pg.head.rows_torch import chunk_slices, temperature_tensor, wide_dtype
from megatron_pg.head.vocabulary_shard import (
    ColumnGradients,
    Incoming,
    LogitRows,
    RowStatistics,
    VocabularyShard,
)

KeepOnly = Callable[[Tensor, slice, VocabularyShard], None]
"""A function that fills some rows' logits [rows, v/tp] with minus infinity outside of their kept
sets, in place."""
_HELD_CHUNKS = 2


@dataclass(frozen=True)
class LogitTransform:
    """A function of the product z of hidden states and weight.

    The logits are `scale * z` without a soft-cap and `softcap * tanh(scale * z / softcap)` with one
    (Gemma 2, arXiv:2408.00118).
    """

    scale: float = 1.0
    """Positive factor of the product."""
    softcap: float | None = None
    """Largest logit. None: no soft-cap."""


@dataclass(frozen=True)
class HeadOptions:
    """Settings of the output layer. The defaults are a plain, unsplit layer."""

    tensor_parallel_group: dist.ProcessGroup | None = None
    """The group over which the vocabulary is split. Every rank in it must call."""
    temperature: float | Tensor = 1.0
    """The distribution is `softmax(logits / temperature)`."""
    vocab_size: int | None = None
    """True size of the vocabulary. Columns from it on are padding."""
    fp32_logits: bool = False
    """Float32 logits from bfloat16 operands, which are not upcast. The gradient of the logits is
    rounded once to the dtype of the hidden states before the two backward products. QuACK's
    products round the exponentials and the hidden states times their row's factor instead."""
    chunk_tokens: int | None = None
    """Rows of logits in memory at once. None: up to 8192, within `memory_gib`."""
    memory_gib: float | None = None
    """GiB of bfloat16 logits in memory at once. This package's kernels take twice as much for
    float32 logits. None: 2.5, and proportionally less on a device below 80 GB."""
    with_entropy: bool = True
    """If False, the entropy may be NaN and its gradient is ignored."""
    transform: LogitTransform = LogitTransform()
    """The scale and soft-cap of the logits. A soft-cap excludes kept sets and teachers."""
    use_quack: bool = True
    """Let `linear_token_loss` use QuACK's products (`hopper`) for float32 logits, if QuACK is
    installed and supports these sizes."""


def check_factors(hidden: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless hidden states [tokens, hidden] and weight [v/tp, hidden] have one
    float dtype.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [tokens, hidden] and weight [v/tp, hidden], found "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"hidden and weight must share one float dtype, found {hidden.dtype} and {weight.dtype}"
        )


class Factors(NamedTuple):
    """The tensors of a call: hidden states [tokens, hidden], weight [v/tp, hidden] and targets
    [tokens].
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor


class Chunk(Protocol):
    """The first product of some rows: logits or exponentials."""

    def statistics(self) -> RowStatistics:
        """Compute the statistics over the whole vocabulary. Every tensor-parallel rank must
        call.
        """

    def logits_of(self, columns: Tensor) -> Tensor:
        """Return the logits [rows, n] of local columns, the target's last."""

    def add_gradient(
        self,
        gradients: FactorGradients,
        statistics: RowStatistics,
        incoming: Incoming,
        columns: ColumnGradients | None = None,
    ) -> None:
        """Overwrite the chunk with the gradient of its logits, with some columns as given, and add
        its two products to `gradients`.
        """


@dataclass(frozen=True, kw_only=True)
class LogitChunk(LogitRows):
    """Some rows of logits, a `Chunk`, with hidden states [rows, hidden] and their place among all
    tokens.
    """

    hidden: Tensor
    place: slice

    def statistics(self) -> RowStatistics:
        statistics: RowStatistics = row_passes(self.logits).row_statistics(self)
        return statistics

    def write_gradient(self, statistics: RowStatistics, incoming: Incoming) -> Tensor:
        """Overwrite the logits with their gradient. If logits are wider than hidden states, it
        takes the front of each row.
        """
        gradient = self.logits
        if gradient.dtype != self.hidden.dtype:
            gradient = gradient.view(self.hidden.dtype)[:, : gradient.shape[1]]
        row_passes(self.logits).write_gradient(self, statistics, incoming, gradient)
        return gradient

    def add_gradient(
        self,
        gradients: FactorGradients,
        statistics: RowStatistics,
        incoming: Incoming,
        columns: ColumnGradients | None = None,
    ) -> None:
        gradient = self.write_gradient(statistics, incoming)
        if columns is not None:
            columns.write(gradient)
        gradients.add_products(self.place, self.hidden, gradient)


@dataclass(frozen=True)
class ExponentialChunk:
    """Some rows of exponentials, a `Chunk`. If QuACK's products fail, this package's kernels
    compute the gradient.
    """

    exponentials: Any  # `ExponentialRows` of `hopper`
    products: Any
    multiply_again: Callable[[], LogitChunk]
    row_mask: ClassVar[None] = None
    softcap: ClassVar[None] = None

    @property
    def targets(self) -> Tensor:
        targets: Tensor = self.exponentials.targets
        return targets

    @property
    def shard(self) -> VocabularyShard:
        shard: VocabularyShard = self.products.shard
        return shard

    @property
    def temperature(self) -> Tensor:
        temperature: Tensor = self.exponentials.temperature
        return temperature

    def statistics(self) -> RowStatistics:
        statistics: RowStatistics = self.exponentials.statistics()
        return statistics

    def logits_of(self, columns: Tensor) -> Tensor:
        logits: Tensor = self.exponentials.logits_of(columns)
        return logits

    def add_gradient(
        self,
        gradients: FactorGradients,
        statistics: RowStatistics,
        incoming: Incoming,
        columns: ColumnGradients | None = None,
    ) -> None:
        arguments = gradients, statistics, incoming, columns
        if not self.products.attempt(lambda: self.exponentials.add_gradient(*arguments) or True):
            self.multiply_again().add_gradient(*arguments)


@dataclass(frozen=True)
class OutputLayer:
    """The output layer's settings for one call, without its tensors, which backward gets from
    autograd.
    """

    shard: VocabularyShard
    temperature: Tensor
    chunk_tokens: int
    held_tokens: int
    """Rows within the budget. Logits of one piece may have twice as many."""
    logits_dtype: torch.dtype
    keep_only: KeepOnly | None  # None: no sets
    products: Any  # the `ExponentialProducts` of `hopper`, or None for logits
    softcap: float | None  # see `LogitRows`

    @classmethod
    def build(
        cls,
        factors: Factors,
        options: HeadOptions,
        keep_only: KeepOnly | None = None,
        may_be_exponentials: bool = False,
        chunks_at_once: int = 1,
    ) -> OutputLayer:
        """Check the factors and resolve all defaults."""
        hidden, weight, targets = factors
        check_factors(hidden, weight)
        check_vector("targets", targets, torch.int64, "hidden", hidden)
        columns = weight.shape[0]
        if options.chunk_tokens is None:
            tokens, hidden_size = hidden.shape
            place = (columns, hidden.device, options.memory_gib, chunks_at_once)
            size, held = chunk_rows(tokens, hidden_size, *place), rows_in_budget(*place)
        else:
            size = held = options.chunk_tokens
            if size < 1:
                raise ValueError(f"chunk_tokens must be at least 1, found {size}")
        shard = VocabularyShard.build(columns, options.vocab_size, options.tensor_parallel_group)
        # With scale s, `s * z / temperature` is `z / (temperature / s)`, and a cap c on `s * z` is
        # a cap c / s on z.
        scale, softcap = options.transform.scale, options.transform.softcap
        if softcap is not None:
            softcap /= scale
        effective_temperature = options.temperature / scale
        temperature = temperature_tensor(effective_temperature, hidden)
        dtype, products = weight.dtype, None
        if options.fp32_logits:
            dtype = wide_dtype(dtype)
            if may_be_exponentials and options.use_quack and softcap is None:
                products = hopper_products(
                    hidden, weight, shard, effective_temperature, options.with_entropy
                )
        return cls(shard, temperature, size, held, dtype, keep_only, products, softcap)

    def new_logits(self, weight: Tensor, chunks: list[slice]) -> Tensor:
        """Return uninitialized logits [rows, v/tp] for the largest chunk."""
        rows, dtype = max((rows.stop - rows.start for rows in chunks), default=0), self.logits_dtype
        if self.products is not None:
            rows, dtype = self.products.padded(rows), weight.dtype
        return weight.new_empty((rows, weight.shape[0]), dtype=dtype)

    def chunks(self, begin: int, end: int, *, held: bool = False) -> list[slice]:
        """Split [begin, end) into chunks. `held` rows are one chunk, up to twice the budget."""
        is_one = held and 0 < end - begin <= _HELD_CHUNKS * self.held_tokens
        return chunk_slices(begin, end, end - begin if is_one else self.chunk_tokens)

    def chunk(
        self, factors: Factors, rows: slice, buffer: Tensor, *, is_kept: bool = False
    ) -> Chunk:
        """Multiply some rows into the first rows of `buffer`, as logits or exponentials, unless
        their logits are kept there.
        """
        hidden, weight, targets = factors.hidden[rows], factors.weight, factors.targets[rows]
        as_logits = functools.partial(
            LogitChunk,
            targets=targets,
            shard=self.shard,
            temperature=self.temperature,
            softcap=self.softcap,
            hidden=hidden,
            place=rows,
        )
        if self.products is not None:
            return self._chunk_of_exponentials(weight, buffer, as_logits)
        logits = buffer[: rows.stop - rows.start]
        if not is_kept:
            multiply(hidden, weight.t(), logits)
            if self.keep_only is not None:
                self.keep_only(logits, rows, self.shard)
        return as_logits(logits)

    def _chunk_of_exponentials(
        self, weight: Tensor, buffer: Tensor, as_logits: functools.partial[LogitChunk]
    ) -> Chunk:
        """Multiply into exponentials, or into new logits outside the buffer if the products
        fail.
        """
        rows = as_logits.keywords

        def multiply_again() -> LogitChunk:
            logits = weight.new_empty((len(rows["hidden"]), len(weight)), dtype=self.logits_dtype)
            multiply(rows["hidden"], weight.t(), logits)
            return as_logits(logits)

        chunk = self.products.attempt(
            lambda: self.products.first_product(
                rows["hidden"], weight, rows["targets"], rows["place"], buffer
            )
        )
        if chunk is None:
            return multiply_again()
        return ExponentialChunk(chunk, self.products, multiply_again)
