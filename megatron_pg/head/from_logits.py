"""Log-probabilities, entropy and a score of target tokens, as an autograd function of
vocabulary-parallel logits.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.backend import row_passes
from megatron_pg.head.rows_torch import chunk_slices, temperature_tensor
from megatron_pg.head.vocabulary_shard import (
    ColumnGradients,
    Incoming,
    LogitRows,
    RowStatistics,
    ScoreGradient,
    VocabularyShard,
    joined,
)

ScoreGradients = Callable[[Incoming, torch.dtype], ScoreGradient]
"""A function of the gradients to log-probs, entropy and score [rows], and the dtype of the gradient
to the logits. The logits must not be overwritten yet."""
SetGradient = Callable[[RowStatistics, Incoming, Tensor], None]
"""A function that adds the gradient of the sampling sets' logits to all columns' gradient [tokens,
v/tp], which is 0 there."""
_SCORED_ROWS = 2048
"""The rows at a time for a teacher's logits or a second gradient."""
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Scorer(Protocol):
    """A further score for all tokens of a call: a teacher's divergence or a `Centering`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row's score, `()` for one number."""

    @property
    def is_sparse(self) -> bool:
        """True if it reads and changes only a few columns per row."""

    def on(
        self, chunk: Any, statistics: RowStatistics, rows: slice
    ) -> tuple[Tensor, ScoreGradients]:
        """Return the scores [*shape, rows] and the gradient function of a chunk with the tokens
        `rows`. Every tensor-parallel rank must call.
        """


def logit_rows(
    logits: Tensor,
    targets: Tensor,
    tensor_parallel_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    row_mask: Tensor | None = None,
    vocab_size: int | None = None,
) -> LogitRows:
    """Check and collect the arguments of `log_probs_and_entropy`, which lists the errors."""
    if logits.dim() != 2 or logits.dtype not in FLOAT_DTYPES:
        raise ValueError(
            "logits must be [tokens, v/tp] in bfloat16, float16, float32 or float64, found "
            f"{tuple(logits.shape)} {logits.dtype}: flatten batch and sequence first"
        )
    check_vector("targets", targets, torch.int64, "logits", logits)
    if row_mask is not None:
        check_vector("row_mask", row_mask, torch.bool, "logits", logits)
    shard = VocabularyShard.build(logits.shape[1], vocab_size, tensor_parallel_group)
    return LogitRows(logits, targets, shard, temperature_tensor(temperature, logits), row_mask)


def check_vector(name: str, vector: Tensor, dtype: torch.dtype, of: str, matrix: Tensor) -> None:
    """Raise ValueError unless the vector has this dtype and one element per row of `matrix`, which
    is called `of`.
    """
    shape, found = (matrix.shape[0],), tuple(vector.shape)
    if found != shape or vector.dtype != dtype:
        raise ValueError(
            f"{name} must be {shape} {dtype} like the rows of {of}, found {found} {vector.dtype}"
        )


def refuse_second_derivative(name: str) -> None:
    """Raise RuntimeError in a backward with `create_graph=True`, where autograd enables
    gradients.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} cannot be differentiated twice: leave out create_graph=True, or use "
            "torch.log_softmax of the logits"
        )


def _parts(scorer: Scorer, rows: int) -> list[slice]:
    """Split the rows into parts that are scored at a time. A sparse scorer has one part."""
    return chunk_slices(0, rows, max(rows, 1) if scorer.is_sparse else _SCORED_ROWS)


class LogProbsAndEntropy(torch.autograd.Function):
    """The op behind the functions of `log_probs` that take logits. Backward overwrites CUDA logits
    with their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: LogitRows,
        add_set_gradient: SetGradient | None,
        scorer: Scorer | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        statistics, score = row_passes(logits).row_statistics(rows), None
        ctx.shard, ctx.has_set, ctx.scorer = rows.shard, rows.has_set, scorer
        ctx.add_set_gradient = add_set_gradient
        if scorer is not None:
            parts = _parts(scorer, len(logits))
            values = [scorer.on(rows.part(p), statistics.rows(p), p)[0] for p in parts]
            score = joined(values, like=rows.temperature.new_empty((*scorer.shape, 0)))
        # Save GPU memory, unless the logits are a leaf or their rows share memory.
        ctx.in_place = logits.is_cuda and not logits.is_leaf and logits.stride(0) >= logits.shape[1]
        ctx.save_for_backward(
            logits, rows.targets, rows.row_mask, rows.temperature, *statistics.kept()
        )
        return statistics.log_probs, statistics.entropy, score

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("log_probs_and_entropy")
        if all(gradient is None for gradient in incoming):
            return (None,) * 4
        logits, targets, row_mask, temperature, *saved = ctx.saved_tensors
        statistics, (*to_rows, to_score) = RowStatistics(*saved), incoming
        logits = logits.detach()
        out = logits if ctx.in_place else torch.empty_like(logits)
        rows = LogitRows(logits, targets, ctx.shard, temperature, row_mask, ctx.has_set)
        columns: ColumnGradients | None = None
        if to_score is None:
            row_passes(logits).write_gradient(rows, statistics, to_rows, out)
        else:
            for part in _parts(ctx.scorer, len(out)):
                chunk, own = rows.part(part), statistics.rows(part)
                to_part = [None if vector is None else vector[..., part] for vector in incoming]
                found = ctx.scorer.on(chunk, own, part)[1](to_part, out.dtype)
                row_passes(logits).write_gradient(chunk, own, found.incoming, out[part])
                if found.dense is not None:
                    out[part] += found.dense
                if found.columns is not None:
                    to_rows, columns = list(found.incoming), found.columns
        if ctx.add_set_gradient is not None:
            if row_mask is not None:
                to_rows = [x if x is None else torch.where(row_mask, x, 0.0) for x in to_rows]
            ctx.add_set_gradient(statistics, to_rows, out)
        if columns is not None:
            columns.write(out)
        if ctx.in_place:  # so that autograd refuses a second use of the old values
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None
