"""PPO's critic: settings, value loss, advantages by GAE, value head, and step in Megatron's
schedules.

The names below require Megatron-Core and are imported at first use. `megatron_pg` exports the
rest.
"""

from typing import TYPE_CHECKING

from megatron_pg.config.versions import exports_of_megatron

if TYPE_CHECKING:
    from megatron_pg.critic.value_head import ValueHead, add_value_head
    from megatron_pg.critic.value_step import ScoredValues, ValueStep, compute_values

__all__ = ["ScoredValues", "ValueHead", "ValueStep", "add_value_head", "compute_values"]

__getattr__, __dir__ = exports_of_megatron(
    __name__,
    {
        "megatron_pg.critic.value_head": ("ValueHead", "add_value_head"),
        "megatron_pg.critic.value_step": ("ScoredValues", "ValueStep", "compute_values"),
    },
)
