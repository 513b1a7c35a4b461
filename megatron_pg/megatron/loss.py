"""The line that a training script adds to its ``forward_step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.policy_loss import policy_loss_function
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.micro_batch import MicroBatchScale
from megatron_pg.megatron.scale_contract import ScheduleOutput
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals


def megatron_loss(
    config: PolicyLossConfig,
    batch: PackedBatch,
    totals: StepTotals,
    *,
    num_microbatches: int,
    model: Any | None = None,
    groups: ParallelGroups | None = None,
    vocab_size: int | None = None,
) -> Callable[[Tensor], ScheduleOutput]:
    """The loss_func of one micro-batch, for Megatron's schedules.

    Called inside the ``forward_step`` of the training script, on every rank; the schedule calls what it returns on the
    last pipeline stage, on every tensor- and context-parallel rank::

        totals = step_totals(samples, data_parallel_group=mpu.get_data_parallel_group())
        ...
        loss_func = megatron_loss(config, batch, totals, num_microbatches=get_num_microbatches(), model=model)

    Args:
        config: the policy loss.
        batch: the packed micro-batch, on the model's device, packed for this context-parallel rank.
        totals: the totals of the step that the micro-batch is part of.
        num_microbatches: how many micro-batches this data-parallel rank runs in the step, as given to the schedule.
        model: the model that ``forward_step`` was given. Its config says in which of Megatron's two loss modes it runs
            and whether an auxiliary loss is scaled by tokens, its ``pg_collection`` which groups it runs on. Without it
            the mode is ``config.calculate_per_token_loss``, which the validated flags set, and the groups are those of
            ``parallel_state``: right unless the host overrides either on the model.
        groups: the process groups; None takes the model's.
        vocab_size: the vocabulary without padding; None counts every column of the logits.

    Returns:
        ``loss_func(output_tensor)``: output_tensor ``[1, local_tokens, v/tp]`` -> what the schedule expects of this
        model's config, ``(loss, metrics)`` or ``(loss, n, metrics)``; see :mod:`megatron_pg.megatron.scale_contract`.

    Raises:
        ValueError: the batch was packed for another context-parallel size or rank than this one's, the scale
            contract cannot be kept, or the config asks for something of the output layer (`fp32_lm_head`,
            `fused_lm_head`), which is behind us where there are logits.
    """
    _refuse_head_flags(config)
    scale = MicroBatchScale.build(
        config, batch, totals, num_microbatches=num_microbatches, model=model, groups=groups
    )

    def loss_func(output_tensor: Tensor) -> ScheduleOutput:
        loss, metrics = policy_loss_function(
            config,
            batch,
            output_tensor,
            totals=totals,
            tensor_parallel_group=scale.groups.tensor,
            context_parallel_group=scale.groups.context,
            vocab_size=vocab_size,
            step_share=scale.step_share,
        )
        return scale.apply(loss, metrics)

    return loss_func


def _refuse_head_flags(config: PolicyLossConfig) -> None:
    for flag, is_set in (
        ("--fp32-lm-head", config.fp32_lm_head),
        ("--fused-lm-head", config.fused_lm_head),
    ):
        if is_set:
            raise ValueError(
                f"{flag} acts in the output layer, and megatron_loss begins after it, at the logits: build the step "
                "with megatron_pg.megatron.output_head.output_head(...), which takes the flag with megatron-core 0.18 "
                f"or later, or drop {flag}"
            )
