"""Exports of `megatron_pg`. Importing them requires torch and NumPy."""

from megatron_pg.config import PolicyLossConfig, add_policy_loss_args, validate_policy_loss_args
from megatron_pg.config.planning import PlanningConfig, add_planning_args, validate_planning_args
from megatron_pg.critic.gae import gae, whiten
from megatron_pg.critic.settings import CriticConfig, add_critic_args
from megatron_pg.critic.value_loss import value_loss
from megatron_pg.head import Ragged, log_probs_and_entropy
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.corrections import accepted_samples
from megatron_pg.loss.from_logits import policy_loss_from_log_probs, policy_loss_function
from megatron_pg.loss.metrics import reduce_metrics
from megatron_pg.loss.padded import padded_totals, reduce_padded
from megatron_pg.loss.reducer import get_pg_loss_reducer
from megatron_pg.loss.regularizers import adapted_kl
from megatron_pg.rollout_files import StepCollector
from megatron_pg.step import StepPlan, plan_step
from megatron_pg.step.advantages import filter_overlong, group_advantages, multi_reward_advantages
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.token_window import TokenWindow
from megatron_pg.step.totals import StepTotals, step_totals

__all__ = [
    "AGGREGATIONS",
    "CriticConfig",
    "PackedBatch",
    "PlanningConfig",
    "PolicyLossConfig",
    "Ragged",
    "Sample",
    "StepCollector",
    "StepPlan",
    "StepTotals",
    "TokenWindow",
    "accepted_samples",
    "adapted_kl",
    "add_critic_args",
    "add_planning_args",
    "add_policy_loss_args",
    "filter_overlong",
    "gae",
    "get_pg_loss_reducer",
    "group_advantages",
    "log_probs_and_entropy",
    "multi_reward_advantages",
    "pack",
    "padded_totals",
    "plan_step",
    "policy_loss_from_log_probs",
    "policy_loss_function",
    "reduce_metrics",
    "reduce_padded",
    "step_totals",
    "validate_planning_args",
    "validate_policy_loss_args",
    "value_loss",
    "whiten",
]
