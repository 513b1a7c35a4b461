"""The module that verl's `actor_rollout_ref.model.external_lib` names: its import puts the fused head into the Megatron engine."""

from megatron_pg.integrations.verl_head import put_in

put_in()
