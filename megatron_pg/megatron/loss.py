"""The line that a training script adds to its ``forward_step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_pg.aggregation import StepTotals
from megatron_pg.arguments.config import PolicyLossConfig
from megatron_pg.batch import PackedBatch
from megatron_pg.megatron.process_groups import ParallelGroups
from megatron_pg.megatron.scale_contract import ScheduleOutput, scale_contract
from megatron_pg.policy_loss import policy_loss_function


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
        ValueError: the batch was packed for another context-parallel size or rank than this one's, or the scale
            contract cannot be kept.
    """
    if groups is None:
        groups = (
            ParallelGroups.from_parallel_state()
            if model is None
            else ParallelGroups.from_model(model)
        )
    _check_packing(batch, groups)
    model_config = None if model is None else _config_of(model)
    contract = scale_contract(
        model_config,
        totals,
        calculate_per_token_loss=(
            config.calculate_per_token_loss
            if model_config is None
            else bool(model_config.calculate_per_token_loss)
        ),
        data_parallel_size=groups.data_size,
        context_parallel_size=groups.context_size,
        num_microbatches=num_microbatches,
        num_active_tokens=batch.num_active_tokens,
        num_local_tokens=batch.window.local_tokens,
    )
    step_share = 1.0 / (groups.data_size * groups.context_size * num_microbatches)

    def loss_func(output_tensor: Tensor) -> ScheduleOutput:
        loss, metrics = policy_loss_function(
            config,
            batch,
            output_tensor,
            totals=totals,
            tensor_parallel_group=groups.tensor,
            context_parallel_group=groups.context,
            vocab_size=vocab_size,
            step_share=step_share,
        )
        return contract.apply(loss, metrics)

    return loss_func


def _check_packing(batch: PackedBatch, groups: ParallelGroups) -> None:
    window = batch.window
    if (window.cp_rank, window.cp_size) != (groups.context_rank, groups.context_size):
        raise ValueError(
            f"the micro-batch is packed for context-parallel rank {window.cp_rank} of {window.cp_size} and this is rank "
            f"{groups.context_rank} of {groups.context_size}: call pack(samples, cp_rank=..., cp_size=...) with the "
            "rank's own"
        )


def _config_of(model: Any) -> Any:
    """The TransformerConfig of a model, wrapped or a list of virtual-pipeline chunks; DDP and Float16Module carry it."""
    module = model[0] if isinstance(model, (list, tuple)) else model
    return module.config
