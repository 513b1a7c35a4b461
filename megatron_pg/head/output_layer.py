"""The output layer over chunks of tokens: its three matrix products, and where its gradients go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.head.from_logits import row_passes
from megatron_pg.head.vocabulary_shard import LogitRows, RowStatistics, VocabularyShard

_CHUNK_BYTES = 5 << 28  # 1.25 GiB
_CHUNK_MULTIPLE = 256


def default_chunk_tokens(tokens: int, columns: int, device: torch.device) -> int:
    """Rows of bfloat16 logits to hold at once: 1.25 GiB, or less on small devices, in equal chunks.

    It depends on sizes and on the device's total memory alone, so that a run can be repeated.
    Chunks of 4096 rows and more keep the matrix products within a few percent of their best rate.
    """
    budget = _CHUNK_BYTES
    if device.type == "cuda":
        budget = min(budget, torch.cuda.get_device_properties(device).total_memory // 64)
    largest = max(budget // (2 * max(columns, 1)), 1)
    chunks = max(-(-tokens // largest), 1)
    equal = -(-tokens // chunks)
    rounded = -(-equal // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
    return max(rounded if rounded <= largest else equal, 1)


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """`out = left @ right`, or `out += left @ right`, accumulated in float32; `out` may be wider than the operands."""
    if out.dtype != left.dtype and left.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):
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


@dataclass(frozen=True)
class ChunkedHead:
    """The output layer's settings, worked out for one call."""

    shard: VocabularyShard
    temperature: Tensor
    logits_dtype: torch.dtype
    chunk_tokens: int

    def new_logits(self, tokens: int, weight: Tensor) -> Tensor:
        """Uninitialised logits [rows, v/tp] of the chunks that `tokens` rows come in."""
        rows = min(self.chunk_tokens, tokens)
        return weight.new_empty((rows, weight.shape[0]), dtype=self.logits_dtype)

    def chunk(self, rows: slice, targets: Tensor, buffer: Tensor) -> LogitRows:
        """The logits of some rows, at the front of `buffer`, and what they are scored against."""
        logits = buffer[: rows.stop - rows.start]
        return LogitRows(logits, targets[rows], self.shard, self.temperature)


def score(chunk: LogitRows, hidden: Tensor, weight: Tensor) -> RowStatistics:
    """Computes the logits of a chunk from its hidden states, and returns their statistics."""
    multiply(hidden, weight.t(), chunk.logits)
    statistics: RowStatistics = row_passes(chunk.logits).row_statistics(chunk)
    return statistics


def _main_grad(weight: Tensor) -> Tensor | None:
    """The gradient buffer that Megatron's DistributedDataParallel holds for this parameter, if it does.

    Its hook leaves `main_grad` alone when `grad_added_to_main_grad` says that the layer has added
    to it. Megatron-FSDP makes the buffer late and keeps its own account of it: not touched here.
    """
    if hasattr(weight, "__fsdp_param__") or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    return getattr(weight, "main_grad", None)


class WeightGradient:
    """Adds up the gradient of the weight over chunks, in float32.

    Args:
        weight: [v/tp, hidden]; a frozen one costs nothing.
        final: the gradients handed to `add` are those of what backward differentiates, so that they may go straight
            into `main_grad`; otherwise they wait in a buffer of their own.
    """

    def __init__(self, weight: Tensor, *, final: bool) -> None:
        self._weight = weight
        self._main_grad = _main_grad(weight)
        self._is_direct = final and self._main_grad is not None
        self._total = self._main_grad if self._is_direct else None

    def add(self, logits_gradient: Tensor, hidden: Tensor) -> None:
        """Adds the part of `hidden` [rows, hidden] with the gradient [rows, v/tp] of its logits."""
        is_new = self._total is None
        if self._total is None:
            dtype = torch.promote_types(self._weight.dtype, torch.float32)
            self._total = self._weight.new_empty(self._weight.shape, dtype=dtype)
        multiply(logits_gradient.t(), hidden, self._total, add=not is_new)

    def finish(self, scale: Tensor | None = None) -> Tensor:
        """Settles the sum, times `scale`, and returns what autograd gets for the weight.

        With `main_grad` that is a stand-in of which DistributedDataParallel uses the existence alone,
        or zeros where the weight is tied to an embedding on the same stage (`zero_out_wgrad`).
        """
        weight, total = self._weight, self._total
        self._total = None
        if self._main_grad is None:
            if total is None:
                return torch.zeros_like(weight, requires_grad=False)
            return (total if scale is None else total.mul_(scale)).to(weight.dtype)
        if total is not None and not self._is_direct:
            factor = total.new_ones(()) if scale is None else scale.to(total.dtype)
            self._main_grad.addcmul_(total, factor)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        stand_in = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return stand_in(weight.shape, dtype=weight.dtype, device=weight.device)


class FactorGradients:
    """Gradients of the two factors of the logits, hidden states and weight, which grow chunk by chunk.

    Args:
        hidden: [tokens, hidden].
        weight: [v/tp, hidden].
        needed: which of the two gradients are wanted.
        final: see `WeightGradient`.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, needed: tuple[bool, bool], *, final: bool
    ) -> None:
        self.hidden: Tensor | None = None
        if needed[0]:
            self.hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self.weight = WeightGradient(weight, final=final) if needed[1] else None
        self._weight_values = weight

    def add(
        self,
        rows: slice,
        hidden: Tensor,
        chunk: LogitRows,
        statistics: RowStatistics,
        incoming: tuple[Tensor | None, ...],
    ) -> None:
        """Overwrites the logits of a chunk with their gradient, and multiplies that by both factors.

        Args:
            rows: where the chunk is in `hidden`, which is [tokens, hidden].
            chunk: where its logits are wider than the hidden states, their gradient takes the front of each row,
                in the dtype of the hidden states.
            statistics, incoming: of the chunk; the gradients to log-probabilities and entropy.
        """
        if self.hidden is None and self.weight is None:
            return
        gradient = chunk.logits
        if gradient.dtype != hidden.dtype:
            gradient = gradient.view(hidden.dtype)[:, : gradient.shape[1]]
        row_passes(chunk.logits).write_gradient(chunk, statistics, incoming, gradient)
        if self.hidden is not None:
            multiply(gradient, self._weight_values, self.hidden[rows])
        if self.weight is not None:
            self.weight.add(gradient, hidden[rows])

    def finish(self, scale: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Both gradients, times `scale`, as autograd gets them."""
        hidden = self.hidden
        if hidden is not None and scale is not None:
            # In float32: a 0-d factor would be rounded to the dtype of the tensor it multiplies.
            hidden = hidden.to(scale.dtype).mul_(scale).to(hidden.dtype)
        return hidden, None if self.weight is None else self.weight.finish(scale)
