"""What turns the local loss of one micro-batch into what the schedule wants, wherever that loss is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.scale_contract import ScaleContract, ScheduleOutput, scale_contract
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals


@dataclass(frozen=True)
class MicroBatchScale:
    """The process groups and the scale of one micro-batch's loss on this rank."""

    groups: ParallelGroups
    contract: ScaleContract
    step_share: float
    """This micro-batch on this rank, as a part of all of the step's: 1 / (DP * CP * M)."""

    @classmethod
    def build(
        cls,
        config: PolicyLossConfig,
        batch: PackedBatch,
        totals: StepTotals,
        *,
        num_microbatches: int,
        model: Any | None,
        groups: ParallelGroups | None,
    ) -> MicroBatchScale:
        """Arguments and errors are those of `megatron_pg.megatron.loss.megatron_loss`; needs no communication."""
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
        return cls(groups, contract, step_share)

    def apply(self, loss: Tensor, metrics: dict[str, Tensor]) -> ScheduleOutput:
        """The tuple that the schedule expects of this model's config."""
        return self.contract.apply(loss, metrics)

    def incoming_gradient(self, model: Any, device: torch.device) -> Tensor | None:
        """What backward will hand to the local loss, where the step that `forward_step` is part of has a backward.

        None where it has none (gradients off, `model.eval()`), and where `main_grad` holds something else until
        backward (DDP's reuse_grad_buf_for_mxfp8_param_ag keeps parameters there): whatever is known beforehand is
        of no use then. A forward pass with gradients on and the model in training mode counts as training.
        """
        module = _first_chunk(model)
        if not torch.is_grad_enabled() or not getattr(module, "training", True):
            return None
        ddp_config = getattr(module, "ddp_config", None)
        if getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            return None
        return self.contract.incoming_gradient(module.config, device)


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
    return _first_chunk(model).config


def _first_chunk(model: Any) -> Any:
    return model[0] if isinstance(model, (list, tuple)) else model
