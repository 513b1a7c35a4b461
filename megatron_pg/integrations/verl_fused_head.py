"""Loaded by verl's `actor_rollout_ref.model.external_lib`: puts the fused head into its Megatron engine."""

from megatron_pg.integrations.fused_head import verl

verl()
