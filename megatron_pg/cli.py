"""The command `megatron-pg`: `explain`, `check`, `migrate` and `integrations`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import megatron_pg

EPILOG = """\
commands:
  explain   which objective am I really optimizing? (weights of a token under each aggregation)
  check     is the gradient the same however the step is sharded? (run it under your own launcher)
  migrate   what does my launch line of slime, miles, verl or NeMo-RL compute, and where is that off?
  integrations verl   does the installed verl see this package, and what has it registered?

examples:
  megatron-pg explain --lengths 200,4000,12000 --group-size 8 --pg-loss-divisor 8192
  megatron-pg explain --log-normal 2000,1 --group-size 16 --loss-aggregation prompt_mean --plot weights.png
  torchrun --nproc-per-node 8 -m megatron_pg check --tensor-model-parallel-size 2 --context-parallel-size 2 \\
      --pipeline-model-parallel-size 2
  megatron-pg explain --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the command line; None takes that of the process.

    Returns:
        The exit status.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["explain"]:
        from megatron_pg.explain import main as explain

        return explain(given[1:])
    if given[:1] == ["check"]:  # only this command needs Megatron
        from megatron_pg.check import main as check

        return check(given[1:])
    if given[:1] == ["migrate"]:
        from megatron_pg.migrate import main as migrate

        return migrate(given[1:])
    if given[:1] == ["integrations"]:
        from megatron_pg.integrations.verl_report import main as integrations

        return integrations(given[1:])
    parser = build_parser()
    if not given:
        parser.print_help()
        return 2
    parser.parse_args(given)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The top of the command line; each command parses what follows its name."""
    parser = argparse.ArgumentParser(
        prog="megatron-pg",
        description="The policy-gradient loss for RL on Megatron-Core, normalised right at any parallelism.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"megatron-pg {megatron_pg.__version__}"
    )
    commands = ["explain", "check", "migrate", "integrations"]
    parser.add_argument("command", choices=commands, help="see below")
    return parser
