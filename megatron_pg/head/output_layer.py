"""The output layer over chunks of tokens: its three matrix products, and where its gradients go."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.distill.divergence import Teacher
from megatron_pg.head.from_logits import FLOAT_DTYPES, check_vector, row_passes
from megatron_pg.head.hopper import exponentials
from megatron_pg.head.hopper.exponentials import ExponentialRows
from megatron_pg.head.kept import pairs_torch
from megatron_pg.head.kept.sets import KeptPairs, keep_only
from megatron_pg.head.ragged import Ragged
from megatron_pg.head.rows_torch import chunk_slices, temperature_tensor
from megatron_pg.head.vocabulary_shard import LogitRows, RowStatistics, VocabularyShard

_CHUNK_BYTES = 5 << 28  # 1.25 GiB
_CHUNK_MULTIPLE = 256
_HELD_CHUNKS = 4  # 5 GiB


@dataclass(frozen=True)
class HeadOptions:
    """How the output layer is split and computed; every field has the value of a plain layer."""

    tensor_parallel_group: dist.ProcessGroup | None = None
    """The group over which the vocabulary is split; every one of its ranks must call."""
    temperature: float | Tensor = 1.0
    """Log-probabilities and entropy are those of `softmax(logits / temperature)`."""
    vocab_size: int | None = None
    """True size of the vocabulary; columns from it on are padding."""
    fp32_logits: bool = False
    """Float32 logits out of bfloat16 operands, not upcast. The gradient of the logits is rounded to the
    dtype of the hidden states, the one rounding before the two other products; with exponentials these are rounded, and the
    hidden states times the factor of their row."""
    chunk_tokens: int | None = None
    """Rows of logits in memory at once; None: about 1.25 GiB of bfloat16 logits."""
    with_entropy: bool = True
    """The entropy is asked for; otherwise it may be NaN, with a gradient that is not used."""
    use_quack: bool = True
    """Where QuACK is installed and takes these sizes, `linear_token_loss` with float32 logits has the first product leave
    exponentials in their place (`exponentials`)."""


def largest_chunk(columns: int, budget: int = _CHUNK_BYTES) -> int:
    """Rows of bfloat16 logits in that many bytes; without a budget of the device's own the same on every rank."""
    return max(budget // (2 * max(columns, 1)), 1)


def default_chunk_tokens(tokens: int, columns: int, device: torch.device) -> int:
    """Rows of bfloat16 logits to hold at once: 1.25 GiB, or less on small devices, in equal chunks.

    It depends on sizes and on the device's total memory alone, so that a run can be repeated.
    Chunks of 4096 rows and more keep the matrix products within a few percent of their best rate.
    """
    budget = _CHUNK_BYTES
    if device.type == "cuda":
        budget = min(budget, torch.cuda.get_device_properties(device).total_memory // 64)
    largest = largest_chunk(columns, budget)
    chunks = max(-(-tokens // largest), 1)
    equal = -(-tokens // chunks)
    rounded = -(-equal // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
    return max(rounded if rounded <= largest else equal, 1)


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """The product left @ right into `out`, or added to it, accumulated in float32; `out` may have another dtype than the
    operands, which are converted to it unless the device multiplies without."""
    is_widened = left.dtype in (torch.bfloat16, torch.float16) and out.dtype == torch.float32
    if is_widened and left.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
        return
    left, right = left.to(out.dtype), right.to(out.dtype)
    if add:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of float32 logits, and of a weight's gradient, from operands of `dtype`: float64 stays what it is."""
    return torch.promote_types(dtype, torch.float32)


def check_factors(hidden: Tensor, weight: Tensor) -> None:
    """Raises ValueError unless hidden states [tokens, hidden] and weight [v/tp, hidden] have one float dtype."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [tokens, hidden] and weight [v/tp, hidden], found "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"hidden and weight must share one float dtype, found {hidden.dtype} and {weight.dtype}"
        )


@functools.cache
def _pairs_triton() -> ModuleType | None:
    try:
        from megatron_pg.head.kept import pairs_triton
    except ImportError:
        return None
    return pairs_triton


def pair_products(hidden: Tensor) -> ModuleType:
    """The module `pairs_triton` for hidden states that its kernels take, else `pairs_torch`: the same functions."""
    if hidden.is_cuda and hidden.dtype != torch.float64 and hidden.stride(1) == 1:
        return _pairs_triton() or pairs_torch
    return pairs_torch


class OutputLayer:
    """The output layer over the tokens of one call, a chunk of logits at a time.

    Args:
        hidden, weight, targets, options, kept: as for `linear_log_probs_and_entropy`.
        teacher: whose divergence is asked for.
        may_be_exponentials: `first_product` may give `ExponentialRows`.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: HeadOptions,
        kept: Ragged | None = None,
        teacher: Teacher | None = None,
        *,
        may_be_exponentials: bool = False,
    ) -> None:
        check_factors(hidden, weight)
        check_vector("targets", targets, torch.int64, "hidden", hidden)
        columns, size = weight.shape[0], options.chunk_tokens
        if size is None:
            size = default_chunk_tokens(len(hidden), columns, hidden.device)
        elif size < 1:
            raise ValueError(f"chunk_tokens must be at least 1, found {size}")
        self.hidden, self.weight, self.targets = hidden, weight, targets
        self.teacher = teacher
        self.kept = kept if kept is not None and kept.values.numel() else None
        group = options.tensor_parallel_group
        self.shard = VocabularyShard.build(columns, options.vocab_size, group)
        self.temperature, self.chunk_tokens = temperature_tensor(options.temperature, hidden), size
        is_number = not isinstance(options.temperature, Tensor)
        temperature = options.temperature if is_number else self.temperature
        self.options = replace(options, temperature=temperature, chunk_tokens=size)
        """As worked out: of them the same layer can be made again."""
        self.products: ModuleType | None = None
        """The products of exponentials, where `first_product` gives these."""
        if may_be_exponentials and options.fp32_logits and options.use_quack and teacher is None:
            self.products = exponentials.find_products(
                hidden, weight, self.shard, options.temperature, _main_grad(weight)
            )

    def new_logits(self, chunks: list[slice]) -> Tensor:
        """Uninitialised logits [rows, v/tp] of the largest of these chunks."""
        rows = max((each.stop - each.start for each in chunks), default=0)
        dtype = self.weight.dtype
        if self.products is not None:
            rows = exponentials.padded(rows)
        elif self.options.fp32_logits:
            dtype = wide_dtype(dtype)
        return self.weight.new_empty((rows, self.weight.shape[0]), dtype=dtype)

    def chunks(self, begin: int = 0, end: int | None = None, *, held: bool = False) -> list[slice]:
        """The chunks of [begin, end) rows; of rows to be held together a single one, up to four times as long."""
        end = len(self.hidden) if end is None else end
        is_one = held and 0 < end - begin <= _HELD_CHUNKS * self.chunk_tokens
        return chunk_slices(begin, end, end - begin if is_one else self.chunk_tokens)

    def first_product(self, rows: slice, buffer: Tensor) -> LogitRows | ExponentialRows:
        """Some rows at the front of `buffer`, as logits or as exponentials."""
        if self.products is None:
            return self.chunk(rows, buffer)
        return exponentials.first_product(
            self.products, self.hidden[rows], self.weight.detach(), self.targets[rows], self.shard,
            float(self.options.temperature), buffer, with_entropy=self.options.with_entropy,
        )  # fmt: skip

    def chunk(self, rows: slice, buffer: Tensor, *, is_kept: bool = False) -> LogitRows:
        """Some rows with their logits at the front of `buffer`, computed unless they are kept there."""
        logits = buffer[: rows.stop - rows.start]
        if not is_kept:
            multiply(self.hidden[rows], self.weight.t(), logits)
            if self.kept is not None:
                keep_only(logits, self.kept.slice(rows), self.shard)
        return LogitRows(logits, self.targets[rows], self.shard, self.temperature)


def _main_grad(weight: Tensor) -> Tensor | None:
    """The gradient buffer that Megatron's DistributedDataParallel holds for this parameter, if it does.

    Its hook leaves `main_grad` alone when `grad_added_to_main_grad` says that the layer has added
    to it. Megatron-FSDP makes the buffer late and keeps its own account of it: not touched here.
    """
    if hasattr(weight, "__fsdp_param__") or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    return getattr(weight, "main_grad", None)


def row_statistics(chunk: LogitRows | ExponentialRows) -> RowStatistics:
    """Statistics of each row over the whole vocabulary; every tensor-parallel rank must call."""
    if isinstance(chunk, ExponentialRows):
        return exponentials.row_statistics(chunk)
    found: RowStatistics = row_passes(chunk.logits).row_statistics(chunk)
    return found


class FactorGradients:
    """Gradients of the two factors of the logits, hidden states and weight, which grow chunk by chunk.

    Args:
        hidden, weight: the factors, [tokens, hidden] and [v/tp, hidden].
        needed: which of the two gradients are wanted; the other costs nothing.
        final: the gradients handed to `add` are those of what backward differentiates, so that the weight's may go
            straight into `main_grad`; otherwise it waits in a float32 buffer of its own.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, needed: tuple[bool, bool], *, final: bool
    ) -> None:
        self._weight, self._needs_weight = weight, needed[1]
        self._hidden: Tensor | None = None
        if needed[0]:  # 0: not every row is added
            self._hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        self._main_grad = _main_grad(weight)
        self._sum = self._main_grad if final else None

    def add(
        self,
        rows: slice,
        hidden: Tensor,
        chunk: LogitRows | ExponentialRows,
        statistics: RowStatistics,
        incoming: tuple[Tensor | None, ...],
        more: Tensor | None = None,
    ) -> None:
        """Overwrites the logits of a chunk with their gradient, and multiplies that by both factors.

        Args:
            rows: where the chunk is in `hidden`, which is [tokens, hidden].
            chunk: where its logits are wider than the hidden states, their gradient takes the front of each row,
                in the dtype of the hidden states. Exponentials come without `more`.
            statistics, incoming: of the chunk; the gradients to log-probabilities and entropy.
            more: a gradient of the logits to be added, [rows, v/tp] in the dtype of the hidden states.
        """
        if isinstance(chunk, ExponentialRows):
            self._add_exponentials(rows, hidden, chunk, statistics, incoming)
            return
        gradient = chunk.logits
        if gradient.dtype != hidden.dtype:
            gradient = gradient.view(hidden.dtype)[:, : gradient.shape[1]]
        if more is None or any(each is not None for each in incoming):
            row_passes(chunk.logits).write_gradient(chunk, statistics, incoming, gradient)
            more = gradient if more is None else gradient.add_(more)
        self.add_products(rows, hidden[rows], more)

    def add_products(self, rows: slice, hidden: Tensor, gradient: Tensor) -> None:
        """Multiplies the gradient [rows, v/tp] of the logits of `hidden` [rows, hidden], of one dtype, by both factors."""
        if self._hidden is not None:
            multiply(gradient, self._weight, self._hidden[rows])
        if self._needs_weight:
            is_new = self._sum is None
            multiply(gradient.t(), hidden, self._weight_sum(), add=not is_new)

    def _add_exponentials(
        self,
        rows: slice,
        hidden: Tensor,
        chunk: ExponentialRows,
        statistics: RowStatistics,
        incoming: tuple[Tensor | None, ...],
    ) -> None:
        """The same of exponentials; with a gradient to the entropy they become that of the logits first."""
        to_log_probs, to_entropy = incoming
        if to_log_probs is None or to_entropy is not None:
            gradient = exponentials.write_gradient(chunk, statistics, incoming)
            self.add_products(rows, hidden[rows], gradient)
            return
        found = exponentials.gradient_factors(chunk, statistics, to_log_probs)
        factors, strips, scaled_hidden = found
        products, left = chunk.products, chunk.exponentials
        if self._hidden is not None:
            out = self._hidden[rows]
            whole = out if len(out) == len(left) else torch.empty_like(scaled_hidden)
            products.write_hidden_gradient(left, strips, factors, self._weight.detach(), whole)
            if whole is not out:
                out.copy_(whole[: len(out)])
        if self._needs_weight:
            is_new = self._sum is None
            total = self._weight_sum()
            products.add_weight_gradient(left, strips, scaled_hidden, total, add=not is_new)

    def _weight_sum(self) -> Tensor:
        """Where the weight's gradient is added up, uninitialised if it is new."""
        if self._sum is None:
            dtype = wide_dtype(self._weight.dtype)
            self._sum = self._weight.new_empty(self._weight.shape, dtype=dtype, requires_grad=False)
        return self._sum

    def add_pairs(self, hidden: Tensor, pairs: KeptPairs, gradient: Tensor) -> None:
        """Multiplies the gradient [pairs] of the logits of pairs, of `hidden` [tokens, hidden], by both factors."""
        products = pair_products(hidden)
        if self._hidden is not None:
            products.write_hidden_gradient(gradient, self._weight, pairs, self._hidden)
        if self._needs_weight:
            if self._sum is None:
                dtype = wide_dtype(self._weight.dtype)
                self._sum = torch.zeros_like(self._weight, dtype=dtype, requires_grad=False)
            products.add_weight_gradient(gradient, hidden, pairs, self._sum)

    def finish(self, scale: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Both gradients, times `scale`, as autograd gets them."""
        hidden = self._hidden
        if hidden is not None and scale is not None:
            # In float32: a 0-d factor would be rounded to the dtype of the tensor it multiplies.
            hidden = hidden.to(scale.dtype).mul_(scale).to(hidden.dtype)
        return hidden, self._finish_weight(scale) if self._needs_weight else None

    def _finish_weight(self, scale: Tensor | None) -> Tensor:
        """Settles the sum, times `scale`, and returns what autograd gets for the weight.

        With `main_grad` that is a stand-in of which DistributedDataParallel uses the existence alone: sparse, of no
        element, so that it takes no memory. Where the weight is tied to an embedding on the same stage
        (`zero_out_wgrad`), zeros.
        """
        weight, total = self._weight, self._sum
        self._sum = None
        if self._main_grad is None:
            if total is None:
                return torch.zeros_like(weight, requires_grad=False)
            return (total if scale is None else total.mul_(scale)).to(weight.dtype)
        if total is not None and total is not self._main_grad:
            factor = total.new_ones(()) if scale is None else scale.to(total.dtype)
            self._main_grad.addcmul_(total, factor)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if getattr(weight, "zero_out_wgrad", False):
            return torch.zeros_like(weight, requires_grad=False)
        return torch.sparse_coo_tensor(  # type: ignore[call-arg]
            size=weight.shape, dtype=weight.dtype, device=weight.device, check_invariants=False
        )
