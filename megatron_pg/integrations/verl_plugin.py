"""The module of the entry point in verl's group `verl.plugins`. Importing it registers the
losses.
"""

from megatron_pg.integrations.verl import register

register()
