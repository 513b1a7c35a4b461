"""Distillation: the teacher that the samples bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.head import Divergence, TopKTeacher, WholeTeacher
from megatron_pg.loss.inputs import TEACHER_CHANNELS
from megatron_pg.step.batch import PackedBatch


def teacher_of(
    config: PolicyLossConfig,
    batch: PackedBatch,
    local_columns: int,
    group: dist.ProcessGroup | None,
    weight: Tensor | None,
    place: Callable[[Any], Tensor],
    vocab_size: int | None = None,
) -> WholeTeacher | TopKTeacher:
    """Collect the teacher on the rows of a call of the head.

    Args:
        local_columns: of the student's output layer on this tensor-parallel rank.
        group: the tensor-parallel group.
        weight: the teacher's output weight [v/tp, teacher's hidden], for `--distill-teacher hidden`.
        place: from [window, ...] to the rows of the call.
        vocab_size: the vocabulary without padding; None counts every column.

    Raises:
        ValueError: the teacher's logits are of another vocabulary, or its output weight is missing.
    """
    divergence = Divergence(config.distill_divergence, config.distill_beta)
    given = [
        place(batch.side_channels[name]) for name in TEACHER_CHANNELS[str(config.distill_teacher)]
    ]
    if config.distill_teacher == "top_k":
        ids, log_probs = given
        is_double = log_probs.dtype == torch.float64
        return TopKTeacher(divergence, ids.long(), log_probs if is_double else log_probs.float())
    if config.distill_teacher == "hidden":
        if weight is None:
            raise ValueError(
                "--distill-teacher hidden needs teacher_weight=, the teacher's output weight"
            )
        return WholeTeacher(divergence, hidden=given[0].to(weight.dtype), weight=weight.detach())
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    widths = (vocab_size or size * local_columns, size * local_columns)
    if given[0].shape[1:] not in {(width,) for width in widths}:
        raise ValueError(
            f"{batch.samples[0].name}: side_channels['teacher_logits'] has rows of {list(given[0].shape[1:])} logits, expected the "
            f"student's vocabulary of {widths[0]} (with padding {widths[1]}): teacher and student need one vocabulary"
        )
    start = rank * local_columns
    own = given[0][:, start : start + local_columns]
    return WholeTeacher(divergence, logits=pad(own, (0, local_columns - own.shape[1])))
