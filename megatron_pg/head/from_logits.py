"""Log-probabilities and entropy of the target tokens, from vocabulary-parallel logits."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head import rows_torch
from megatron_pg.head.distill.divergence import Teacher
from megatron_pg.head.kept.sets import KeptPairs, check_rows, kept_gradient, local_statistics
from megatron_pg.head.ragged import Ragged, to_device
from megatron_pg.head.vocabulary_shard import LogitRows, RowStatistics, VocabularyShard

_TEACHER_ROWS = 2048
"""Rows that a teacher's logits, or a gradient beside the one in place, are made for at a time."""
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tensor_parallel_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    row_mask: Tensor | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    kept: Ragged | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target token, and the entropy, of `softmax(logits / temperature)`.

    Statistics are float32 whatever the logits are; no float32 copy of the logits is kept. Tensor-parallel
    ranks exchange one all-gather of `[tokens, 4]` statistics in forward and nothing in backward. As
    in Megatron's own cross-entropy, the incoming gradients must be equal on those ranks, and each
    rank gets the gradient of its own columns.

    On CUDA, Triton kernels do the work, and **backward overwrites the logits with their gradient**
    unless they are a leaf. Autograd raises where their old values would be needed again (a second
    backward, another loss on the same logits); pass `logits.clone()` then.

    Args:
        logits: [tokens, v/tp] bfloat16, float16 or float32 (or float64, for tests): this rank's
            columns; rank r holds the global ids from `r * v/tp` on.
        targets: [tokens] int64 global token ids. One outside the vocabulary gives NaN.
        tensor_parallel_group: the group over which the vocabulary is split; every one of its ranks
            must call, with equal targets. None: not split, torch.distributed is not touched.
        temperature: a positive number, or a tensor of one element (no gradient, never read on the host).
        row_mask: [tokens] bool. Rows that are False give 0 and 0, and a gradient of exactly 0, even
            where their logits are NaN or inf.
        vocab_size: true size of the vocabulary; columns from it on are padding and take no part.
        with_entropy: also return the entropy.
        kept: the global ids that each token was sampled from, [tokens] rows of distinct ids below `vocab_size`, the target
            among them: log-probability and entropy are those of the distribution renormalised to them, and of their
            logits alone is there a read. An empty row is the whole vocabulary.

    Returns:
        log_probs [tokens] and entropy [tokens] in nats (None without `with_entropy`), float32
        (float64 for float64 logits), both differentiable.

    Raises:
        ValueError: a wrong shape or dtype, a temperature that is not positive and finite, or a
            `vocab_size` that the logits cannot hold.
    """
    if logits.dim() != 2 or logits.dtype not in FLOAT_DTYPES:
        raise ValueError(
            "logits must be [tokens, v/tp] in bfloat16, float16, float32 or float64, found "
            f"{tuple(logits.shape)} {logits.dtype}: flatten batch and sequence first"
        )
    check_vector("targets", targets, torch.int64, "logits", logits)
    if row_mask is not None:
        check_vector("row_mask", row_mask, torch.bool, "logits", logits)
    shard = VocabularyShard.build(logits.shape[1], vocab_size, tensor_parallel_group)
    scale = rows_torch.temperature_tensor(temperature, logits)
    rows, pairs = LogitRows(logits, targets, shard, scale, row_mask), None
    if kept is not None:
        check_rows(kept, logits)
        has_set = to_device(kept.sizes > 0, logits.device)
        pairs = KeptPairs.build(kept.to(logits.device), targets, shard, scale)
        rows = replace(rows, has_set=has_set)
    return LogProbsAndEntropy.apply(logits, rows, with_entropy, pairs, None)[:2]  # type: ignore


def log_probs_and_divergence(
    logits: Tensor,
    targets: Tensor,
    teacher: Teacher,
    *,
    tensor_parallel_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    row_mask: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the divergence [tokens] of the logits' distribution from a teacher's, in nats, differentiable.

    Args, in place of logits as before, and errors are those of `log_probs_and_entropy`.

    Args:
        teacher: on the same tokens; it gets no gradient.
    """
    check_vector("targets", targets, torch.int64, "logits", logits)
    shard = VocabularyShard.build(logits.shape[1], vocab_size, tensor_parallel_group)
    scale = rows_torch.temperature_tensor(temperature, logits)
    rows = LogitRows(logits, targets, shard, scale, row_mask)
    return LogProbsAndEntropy.apply(logits, rows, True, None, teacher)  # type: ignore


def check_vector(name: str, vector: Tensor, dtype: torch.dtype, of: str, matrix: Tensor) -> None:
    """Raises ValueError unless the vector has that dtype and an element for each row of the matrix called `of`."""
    shape = (matrix.shape[0],)
    if tuple(vector.shape) != shape or vector.dtype != dtype:
        raise ValueError(
            f"{name} must be {shape} {dtype} like the rows of {of}, found {tuple(vector.shape)} {vector.dtype}"
        )


@functools.cache
def _rows_triton() -> ModuleType | None:
    try:
        from megatron_pg.head import rows_triton
    except ImportError:
        return None
    return rows_triton


def row_passes(logits: Tensor) -> ModuleType:
    """The module `rows_triton` for logits that its kernels take, else `rows_torch`: the same functions."""
    if logits.is_cuda and logits.dtype != torch.float64 and logits.stride(1) == 1:
        return _rows_triton() or rows_torch
    return rows_torch


def refuse_second_derivative(name: str) -> None:
    """A refusal at the start of a backward: autograd enables gradients in it for `create_graph=True` alone."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} cannot be differentiated twice: leave out create_graph=True, or compute what needs it on "
            "torch.log_softmax of the logits"
        )


def _write_with_teacher(
    teacher: Teacher,
    rows: LogitRows,
    statistics: RowStatistics,
    incoming: tuple[Tensor | None, ...],
    out: Tensor,
) -> None:
    """Writes the gradient of all three outputs to the logits into `out`, which may be the logits, some rows at a time."""
    for part in rows_torch.chunk_slices(0, len(out), _TEACHER_ROWS):
        own, of_part = rows.part(part), statistics.rows(part)
        to_log_probs, to_entropy, to_divergence = (
            None if each is None else each[part] for each in incoming
        )
        more = None
        if to_divergence is not None:
            more = teacher.on(own, of_part, part).gradient(to_divergence, out.dtype)
        row_passes(own.logits).write_gradient(own, of_part, (to_log_probs, to_entropy), out[part])
        if more is not None:
            out[part] += more


class LogProbsAndEntropy(torch.autograd.Function):
    """The op behind `log_probs_and_entropy`; keeps the logits and three numbers a row for backward.

    Backward overwrites CUDA logits with their gradient and marks them as modified, so that autograd
    refuses a second use of the old values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: LogitRows,
        with_entropy: bool,
        pairs: KeptPairs | None,
        teacher: Teacher | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        of_pairs = None
        if pairs is not None:
            of_pairs = pairs.logits_in(logits)
            rows = replace(rows, of_sets=local_statistics(of_pairs, pairs))
        statistics = row_passes(logits).row_statistics(rows)
        ctx.shard, ctx.pairs, ctx.has_set = rows.shard, pairs, rows.has_set
        ctx.teacher, divergence = teacher, None
        if teacher is not None:
            parts = rows_torch.chunk_slices(0, len(logits), _TEACHER_ROWS)
            of_parts = [teacher.on(rows.part(p), statistics.rows(p), p).value for p in parts]
            divergence = torch.cat([rows.temperature.new_empty(0), *of_parts])
        # On a GPU, where memory is short, unless the caller owns the values or rows share memory.
        ctx.in_place = logits.is_cuda and not logits.is_leaf and logits.stride(0) >= logits.shape[1]
        ctx.save_for_backward(
            logits, rows.targets, rows.row_mask, rows.temperature, of_pairs, *statistics.kept()
        )
        return statistics.log_probs, statistics.entropy if with_entropy else None, divergence

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("log_probs_and_entropy")
        if all(gradient is None for gradient in incoming):
            return (None,) * 5
        logits, targets, row_mask, temperature, of_pairs, *saved = ctx.saved_tensors
        statistics = RowStatistics(*saved)
        logits = logits.detach()
        out = logits if ctx.in_place else torch.empty_like(logits)
        rows = LogitRows(logits, targets, ctx.shard, temperature, row_mask, ctx.has_set)
        if ctx.teacher is None or incoming[2] is None:
            row_passes(logits).write_gradient(rows, statistics, incoming[:2], out)
        else:
            _write_with_teacher(ctx.teacher, rows, statistics, incoming, out)
        if ctx.pairs is not None:
            ctx.pairs.add_gradient(
                kept_gradient(of_pairs, ctx.pairs, statistics, incoming[:2]), row_mask, out
            )
        if ctx.in_place:
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None
