"""What verl's entry point group `verl.plugins` names: verl imports it, and that is the registration."""

from megatron_pg.integrations.verl import register

register()
