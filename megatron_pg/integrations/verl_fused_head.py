"""A module for verl's `actor_rollout_ref.model.external_lib`. Importing it installs the fused
head.
"""

from megatron_pg.integrations.verl_head import put_in

put_in()
