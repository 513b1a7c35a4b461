"""PPO's critic: its settings, the value loss, advantages by GAE, and the value head and the step in
Megatron's schedules.

`megatron_pg` exports what needs no Megatron-Core. The names below need it, and are imported when
they are first used.
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
