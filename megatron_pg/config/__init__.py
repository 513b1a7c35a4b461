"""The settings: frozen dataclasses, their flags, and their startup validation."""

from megatron_pg.config.planning import PlanningConfig, add_planning_args, validate_planning_args
from megatron_pg.config.policy_loss import (
    PolicyLossConfig,
    add_policy_loss_args,
    validate_policy_loss_args,
)

__all__ = [
    "PlanningConfig",
    "PolicyLossConfig",
    "add_planning_args",
    "add_policy_loss_args",
    "validate_planning_args",
    "validate_policy_loss_args",
]
