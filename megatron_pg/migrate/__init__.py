"""`megatron-pg migrate` prints the objective of another trainer's launch line, its errors, and the
lines that make it exact.
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
    """Print the objective of a launch line, from the words after `megatron-pg migrate`. Return 2 if
    the line cannot be read, else 0.
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
            print(f"\nIgnored, because they do not affect the loss: {' '.join(passed)}")
    except (ValueError, ImportError, OSError) as error:
        print(f"megatron-pg migrate: {error}", file=sys.stderr)
        return 2
    return 0


def _write(line: Line, options: argparse.Namespace) -> str:
    """Write this package's flags for a launch line as a YAML for `--config`. Return a sentence
    about it.
    """
    flags = here(line.trainer, line.settings, *wanted(line, options)).flags
    if "<L>" in flags:
        raise ValueError(
            f"{WRITE} requires --loss-aggregation-divisor, because the line has no divisor"
        )
    options.target.write_text(text_of_words(flags.split()))
    return f"{options.target} has these flags: --config {options.target} reads them"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the flags before `--`."""
    parser = ProgramParser(
        prog="megatron-pg migrate",
        usage="megatron-pg migrate [flags] (FILE | -- LAUNCH LINE)",
        description="Print the objective of a launch line of slime, miles, verl or NeMo-RL, its "
        "errors and their size, and the lines that make it exact. The line is not run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="FILE", help="A YAML.")
    add("--trainer", choices=sorted(TRAINERS), help="Trainer of the line. Unset: from its keys.")
    add(
        "--loss-aggregation",
        choices=list(AGGREGATIONS),
        help="Aggregation you want. Unset: the line's.",
    )
    add("--loss-aggregation-divisor", type=float, metavar="L", help="L of constant, in tokens.")
    lengths = "Active tokens of a step's rollouts, for numbers."
    add("--lengths", type=_lengths, default=(), metavar="L,L,...", help=lengths)
    add("--group-size", type=int, default=1, metavar="N", help="Rollouts per prompt. Default: 1.")
    told = "Write this package's flags for the line to FILE, a YAML for --config."
    add(WRITE, type=Path, metavar="FILE", dest="target", help=told)
    return parser


def _lengths(text: str) -> tuple[int, ...]:
    lengths = text.split(",")
    if not all(length.isdecimal() and int(length) for length in lengths):
        expected = "expected numbers of active tokens above 0, such as 200,4000"
        raise argparse.ArgumentTypeError(f"{text!r}: {expected}")
    return tuple(map(int, lengths))
