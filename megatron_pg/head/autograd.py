"""Log-probabilities and entropy as one differentiable operation over a pair of row passes."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head import rows_torch
from megatron_pg.head.vocabulary_shard import RowStatistics, VocabularyShard


@functools.cache
def kernels(module: str) -> ModuleType | None:
    """A module of this package that needs Triton, or None without it."""
    try:
        return importlib.import_module(f"megatron_pg.head.{module}")
    except ImportError:
        return None


def row_passes(logits: Tensor) -> ModuleType:
    """`rows_triton` for logits that its kernels take, else `rows_torch`: the same functions."""
    if logits.is_cuda and logits.dtype != torch.float64 and logits.stride(1) == 1:
        return kernels("rows_triton") or rows_torch
    return rows_torch


def _may_be_overwritten(logits: Tensor) -> bool:
    """On a GPU, where memory is short, unless the caller owns the values or rows share memory."""
    return logits.is_cuda and not logits.is_leaf and logits.stride(0) >= logits.shape[1]


def refuse_second_derivative(name: str) -> None:
    """For the start of a backward: autograd enables gradients in it for `create_graph=True` alone."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} cannot be differentiated twice: leave out create_graph=True, or compute what needs it on "
            "torch.log_softmax of the logits"
        )


class LogProbsAndEntropy(torch.autograd.Function):
    """The op behind `log_probs_and_entropy`; keeps the logits and three numbers a row for backward.

    Backward overwrites CUDA logits with their gradient and marks them as modified, so that autograd
    refuses a second use of the old values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: Tensor,
        row_mask: Tensor | None,
        shard: VocabularyShard,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        statistics = row_passes(logits).row_statistics(
            logits, targets, shard, temperature, row_mask, with_entropy
        )
        ctx.shard = shard
        ctx.in_place = _may_be_overwritten(logits)
        ctx.save_for_backward(
            logits,
            targets,
            temperature,
            row_mask,
            statistics.maximum,
            statistics.log_sum,
            statistics.entropy,
        )
        return statistics.log_probs, statistics.entropy if with_entropy else None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("log_probs_and_entropy")
        if all(gradient is None for gradient in gradients):
            return (None,) * 6
        logits, targets, temperature, row_mask, maximum, log_sum, entropy = ctx.saved_tensors
        logits = logits.detach()
        out = logits if ctx.in_place else torch.empty_like(logits)
        statistics = RowStatistics(maximum, log_sum, log_probs=maximum, entropy=entropy)
        row_passes(logits).write_gradient(
            logits, targets, ctx.shard, temperature, statistics, *gradients, out, row_mask
        )
        if ctx.in_place:
            torch.autograd.graph.increment_version(logits)
        return (out,) + (None,) * 5
