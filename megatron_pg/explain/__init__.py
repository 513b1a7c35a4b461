"""`megatron-pg explain`: the objective that is really optimized, from lengths or rollout files and
the launch flags.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence

from megatron_pg.config import (
    PolicyLossConfig,
    add_planning_args,
    add_policy_loss_args,
    validate_planning_args,
    validate_policy_loss_args,
)
from megatron_pg.config.command_line import ProgramParser
from megatron_pg.config.settings import add_args
from megatron_pg.config.values import refuse
from megatron_pg.explain.report import explain_step
from megatron_pg.explain.rollout_page import write_rollout_page
from megatron_pg.explain.show import plot, print_report
from megatron_pg.explain.step import (
    ExplainOptions,
    explained_step,
    list_of_lengths,
    median_and_sigma,
    rollout_files_of,
)

EPILOG = """\
examples:
  megatron-pg explain --lengths 200,4000,12000 --group-size 8 --pg-loss-divisor 8192
  megatron-pg explain --log-normal 2000,1 --group-size 16 --docs-per-step 512 \\
      --data-parallel-size 8 --context-parallel-size 2 --num-microbatches 4 \\
      --loss-aggregation prompt_mean --plot weights.png
  megatron-pg explain --rollout-files rollouts.parquet --docs-per-step 512 \\
      --keep-prompt-groups --html rollouts.html

The rest of a launch line may be left in: what is no flag of this command, and not nearly one, is
listed as not used.
"""
BALANCING = "aux_loss seq_aux_loss global_aux_loss sinkhorn quantile_balancing none".split()
"""The choices of Megatron 0.19; earlier versions have some of them."""


def main(arguments: Sequence[str]) -> int:
    """Explain the step that the words after `megatron-pg explain` describe. Return 2 for flags that
    cannot be, or 0.
    """
    try:
        options = parse_options(arguments)
        step = explained_step(options)
        report = explain_step(step, options)
        if options.plot is not None:
            plot(report, options.plot)
        if options.html is not None:
            title = f"Rollouts of {', '.join(options.planning.rollout_files)}"
            files = rollout_files_of(options)
            write_rollout_page(
                options.html, files, options.config, title=title, tokenizer=options.tokenizer
            )
        if options.json:
            print(json.dumps(report, indent=2))
        else:
            print_report(step, report, options)
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        print(f"megatron-pg explain: {error}", file=sys.stderr)
        return 2
    return 0


def parse_options(arguments: Sequence[str]) -> ExplainOptions:
    """Return the options of a command line, or raise a ValueError with its faults."""
    parser = build_parser()
    args, unused = parser.parse_known_args(list(arguments))
    refuse(list(_misspelled(unused, parser)))
    args.unused_flags, args.planning = unused, validate_planning_args(args)
    args.config = PolicyLossConfig.from_args(validate_policy_loss_args(args))
    return ExplainOptions.from_args(args)


def _misspelled(unused: Sequence[str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield words that are nearly a flag of this command: unread, they would explain another
    objective.
    """
    for word in unused:
        flag = word.split("=")[0]
        # From 0.9 on no flag of Megatron's is taken for one of these (--test-mode and --tis-mode at
        # 0.85).
        near = difflib.get_close_matches(flag, parser._option_string_actions, 1, cutoff=0.9)
        if flag.startswith("--") and near:
            yield f"{flag} is not a flag. Did you mean {near[0]}?"


def build_parser() -> ProgramParser:
    """Build the parser of lengths, parallelism, output, and the flags of a launch line that matter
    here.
    """
    parser = ProgramParser(
        prog="megatron-pg explain",
        usage="megatron-pg explain (--lengths L,L,... | --log-normal MEDIAN,SIGMA | "
        "--rollout-files PATH ...) [flags]",
        description="Which objective am I really optimizing? The weight of a token under each "
        "aggregation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("lengths").add_argument
    text = "Active tokens of the samples, in order; repeated until the step is full."
    add("--lengths", type=list_of_lengths, default=(), metavar="L,L,...", help=text)
    text = "Draw the lengths: median in tokens and sigma of the logarithm."
    add("--log-normal", type=median_and_sigma, default=(), metavar="MEDIAN,SIGMA", help=text)
    add_args(parser, ExplainOptions, "what to explain")
    parser.add_config_args()
    # Megatron's flags that the validation of a launch line reads, with Megatron's names and types.
    add = parser.add_argument_group(
        "flags of Megatron", "Those that decide whether per-token mode is on, and what is refused."
    ).add_argument
    add("--num-experts", type=int, metavar="N")
    add("--mtp-num-layers", type=int, metavar="N")
    add("--expert-model-parallel-size", type=int, default=1, metavar="N")
    add("--vocab-size", type=int, metavar="N", help="A row with another token is a bad row.")
    add("--moe-router-load-balancing-type", nargs="+", choices=BALANCING, default="aux_loss")
    add("--moe-aux-loss-coeff", type=float, nargs="+", default=0.0, metavar="X")
    add("--moe-z-loss-coeff", type=float, metavar="X")
    switches = "use-torch-fsdp2 use-megatron-fsdp ddp-average-in-collective use-mup"
    for name in (*switches.split(), "defer-embedding-wgrad-compute"):
        add(f"--{name}", action="store_true")
    add_policy_loss_args(add_planning_args(parser))
    parser.set_defaults(max_tokens_per_microbatch=1)  # nothing here depends on it
    return parser
