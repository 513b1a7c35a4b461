"""The output end of a ``forward_step``, the same lines with and without ``--fused-lm-head``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.megatron.fused_head import FusedOutput
from megatron_pg.megatron.loss import megatron_loss
from megatron_pg.megatron.scale_contract import ScheduleOutput
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals


@dataclass(frozen=True)
class OutputHead:
    """What one micro-batch asks of the model, and what turns the model's output into the loss."""

    loss_func: Callable[[Tensor], ScheduleOutput]
    """What ``forward_step`` returns beside the model's output."""
    model_arguments: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the model's forward; none without the fused head."""


def output_head(
    config: PolicyLossConfig,
    batch: PackedBatch,
    totals: StepTotals,
    *,
    num_microbatches: int,
    model: Any,
    vocab_size: int | None = None,
) -> OutputHead:
    """Chooses the head of one micro-batch by ``config.fused_lm_head``.

    Called inside ``forward_step`` on every rank and stage, as `megatron_loss` is, and before the model::

        head = output_head(config, batch, totals, num_microbatches=..., model=model)
        output = model(
            batch.tokens[None], batch.position_ids[None], None,
            packed_seq_params=packed_seq_params(batch), **head.model_arguments,
        )
        return output, head.loss_func

    Args:
        config, batch, totals, num_microbatches, model, vocab_size: as for `megatron_pg.megatron.loss.megatron_loss`.

    Raises:
        ValueError: as `megatron_loss`.
        NotImplementedError: ``--fused-lm-head`` with a megatron-core before 0.18, or a model that is no GPTModel.
    """
    if config.fused_lm_head:
        fused = FusedOutput(
            config,
            batch,
            totals,
            num_microbatches=num_microbatches,
            model=model,
            vocab_size=vocab_size,
        )
        return OutputHead(fused.loss_func, {"output_processor": fused.output_processor})
    return OutputHead(
        megatron_loss(
            config,
            batch,
            totals,
            num_microbatches=num_microbatches,
            model=model,
            vocab_size=vocab_size,
        )
    )
