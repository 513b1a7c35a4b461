"""What verl's `actor_rollout_ref.model.external_lib` names: its import puts the fused head in."""

from megatron_pg.integrations.verl_head import put_in

put_in()
