"""Module form of the command `megatron-pg`, for launchers: `python -m megatron_pg`."""

import sys

from megatron_pg.cli import main

sys.exit(main())
