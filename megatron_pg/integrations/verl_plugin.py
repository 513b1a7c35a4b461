"""The module that verl's entry point group `verl.plugins` names: its import is the registration."""

from megatron_pg.integrations.verl import register

register()
