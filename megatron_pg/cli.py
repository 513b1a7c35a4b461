"""Command `megatron-pg`: `explain`, `check`, `migrate` and `integrations`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

import megatron_pg
from megatron_pg.config.command_line import ProgramParser
from megatron_pg.config.values import did_you_mean

EPILOG = """\
commands:
  explain   which objective does my setup optimize? (token weights under each aggregation)
  check     is the gradient the same for any sharding of the step? (run it under your launcher)
  migrate   what does my slime, miles, verl or NeMo-RL launch line compute, and where is it wrong?
  integrations verl   does the installed verl see this package, and what has it registered?

examples:
  megatron-pg explain --lengths 200,4000,12000 --group-size 8 --pg-loss-divisor 8192
  megatron-pg explain --log-normal 2000,1 --group-size 16 --loss-aggregation prompt_mean \\
      --plot weights.png
  torchrun --nproc-per-node 8 -m megatron_pg check --tensor-model-parallel-size 2 \\
      --context-parallel-size 2 --pipeline-model-parallel-size 2
  megatron-pg explain --help
"""
# Imported when called, because importing torch takes seconds.
COMMANDS: dict[str, Callable[[], ModuleType]] = {
    "explain": lambda: import_module("megatron_pg.explain"),
    "check": lambda: import_module("megatron_pg.check"),
    "migrate": lambda: import_module("megatron_pg.migrate"),
    "integrations": lambda: import_module("megatron_pg.integrations.verl"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        return int(COMMANDS[words[0]]().main(words[1:]))
    parser = ProgramParser(
        prog="megatron-pg",
        description="The policy-gradient loss for RL on Megatron-Core, normalized right at any "
        "parallelism.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"megatron-pg {megatron_pg.__version__}"
    )
    parser.add_argument("command", help=f"{', '.join(COMMANDS)}: see below")
    if not words:
        parser.print_help()
        return 2
    command = parser.parse_args(words).command
    near = did_you_mean(command, COMMANDS)
    parser.error(f"{command!r} is not a command ({', '.join(COMMANDS)}){near}")
