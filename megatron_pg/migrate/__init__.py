"""`megatron-pg migrate`: the objective of another trainer's launch line, its errors, and the lines
that make it exact.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_pg.config.command_line import WRITE, ProgramParser, text_of_words
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.migrate.line import Line, read
from megatron_pg.migrate.report import here, lines, wanted
from megatron_pg.migrate.rows import TRAINERS

EPILOG = """\
examples:
  megatron-pg migrate --lengths 200,4000,12000 -- python train.py --advantage-estimator grpo \\
      --use-kl-loss --kl-loss-coef 0.001 \\
      --custom-pg-loss-reducer-function-path megatron_pg.integrations.constant
  megatron-pg migrate -- python -m verl.trainer.main_ppo \\
      actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
  megatron-pg migrate --loss-aggregation prompt_mean grpo_math_1B.yaml
"""


def main(arguments: Sequence[str]) -> int:
    """Print the objective of a launch line, of the words after `megatron-pg migrate`. Return 2 for
    what is not known, or 0.
    """
    given, words = list(arguments), []
    if "--" in given:
        given, words = given[: given.index("--")], given[given.index("--") + 1 :]
    try:
        options = build_parser().parse_args(given)
        if options.file is None and not words:
            raise ValueError("give a file or, after `--`, a launch line")
        if options.group_size < 1:
            raise ValueError(f"--group-size is {options.group_size}: expected 1 or more")
        divisor = options.loss_aggregation_divisor
        if divisor is not None and not 0 < divisor < math.inf:
            expected = "expected a finite number above 0"
            raise ValueError(f"--loss-aggregation-divisor is {divisor:g}: {expected}")
        line = read(options.file, words, options.trainer)
        report = lines(line, options)
        if options.target is not None:
            report += ["", _write(line, options)]
        print("\n".join(report))
        if passed := line.passed:
            print(f"\nNot read, as not about the loss: {' '.join(passed)}")
    except (ValueError, ImportError, OSError) as error:
        print(f"megatron-pg migrate: {error}", file=sys.stderr)
        return 2
    return 0


def _write(line: Line, options: argparse.Namespace) -> str:
    """Write the flags of this package for a launch line as the YAML that `--config` reads, and
    say so.
    """
    flags = here(line.trainer, line.settings, *wanted(line, options)).flags
    if "<L>" in flags:
        raise ValueError(f"{WRITE}: give --loss-aggregation-divisor, which the line does not say")
    options.target.write_text(text_of_words(flags.split()))
    return f"{options.target} has these flags: --config {options.target} reads them"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the flags before `--`."""
    parser = ProgramParser(
        prog="megatron-pg migrate",
        usage="megatron-pg migrate [flags] (FILE | -- LAUNCH LINE)",
        description="The objective that a launch line of slime, miles, verl or NeMo-RL computes, "
        "its errors and their size, and "
        "the lines that make it exact. Nothing is run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="FILE", help="A YAML.")
    add("--trainer", choices=sorted(TRAINERS), help="Whose line it is; unset: as its keys look.")
    add("--loss-aggregation", choices=list(AGGREGATIONS), help="What you want; unset: what it has.")
    add("--loss-aggregation-divisor", type=float, metavar="L", help="L of constant, in tokens.")
    lengths = "Active tokens of each rollout of a step, for numbers."
    add("--lengths", type=_lengths, default=(), metavar="L,L,...", help=lengths)
    add("--group-size", type=int, default=1, metavar="N", help="Rollouts of a prompt. Default: 1.")
    told = "Write the flags of this package for it there, as the YAML that --config reads."
    add(WRITE, type=Path, metavar="FILE", dest="target", help=told)
    return parser


def _lengths(text: str) -> tuple[int, ...]:
    lengths = text.split(",")
    if not all(length.isdecimal() and int(length) for length in lengths):
        expected = "expected whole numbers of active tokens above 0, such as 200,4000"
        raise argparse.ArgumentTypeError(f"{text!r}: {expected}")
    return tuple(map(int, lengths))
