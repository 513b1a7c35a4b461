"""`python -m megatron_pg`: the command `megatron-pg` without its script, as a launcher needs it."""

import sys

from megatron_pg.cli import main

sys.exit(main())
