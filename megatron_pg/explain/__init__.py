"""`megatron-pg explain`: the objective that lengths or rollout files and launch flags optimize."""

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

You can paste a whole launch line. Unknown flags are listed as not used, misspelled ones are errors.
"""
BALANCING = "aux_loss seq_aux_loss global_aux_loss sinkhorn quantile_balancing none".split()
"""Choices in Megatron 0.19. Earlier versions have a subset."""


def main(arguments: Sequence[str]) -> int:
    """Explain the step that the words after `megatron-pg explain` describe. Return 2 for invalid
    flags, else 0.
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
    """Return the options of a command line, or raise a ValueError that lists what is wrong."""
    parser = build_parser()
    args, unused = parser.parse_known_args(list(arguments))
    refuse(list(_misspelled(unused, parser)))
    args.unused_flags, args.planning = unused, validate_planning_args(args)
    args.config = PolicyLossConfig.from_args(validate_policy_loss_args(args))
    return ExplainOptions.from_args(args)


def _misspelled(unused: Sequence[str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield misspelled flags. Ignoring them would explain a different objective."""
    for word in unused:
        flag = word.split("=")[0]
        # At 0.85 Megatron's --test-mode matches --tis-mode. At 0.9 no flag of Megatron matches.
        near = difflib.get_close_matches(flag, parser._option_string_actions, 1, cutoff=0.9)
        if flag.startswith("--") and near:
            yield f"{flag} is not a flag. Did you mean {near[0]}?"


def build_parser() -> ProgramParser:
    """Build the parser for lengths, parallelism, output, and the launch flags that matter here."""
    parser = ProgramParser(
        prog="megatron-pg explain",
        usage="megatron-pg explain (--lengths L,L,... | --log-normal MEDIAN,SIGMA | "
        "--rollout-files PATH ...) [flags]",
        description="Which objective does my setup optimize? Prints token weights under each "
        "aggregation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("lengths").add_argument
    text = "Active tokens per sample, in order, repeated until the step is full."
    add("--lengths", type=list_of_lengths, default=(), metavar="L,L,...", help=text)
    text = "Draw log-normal lengths with this median in tokens and sigma of the logarithm."
    add("--log-normal", type=median_and_sigma, default=(), metavar="MEDIAN,SIGMA", help=text)
    add_args(parser, ExplainOptions, "what to explain")
    parser.add_config_args()
    # Megatron's flags that validation reads, with Megatron's names and types.
    add = parser.add_argument_group(
        "Megatron flags", "Flags that affect per-token mode and validation."
    ).add_argument
    add("--num-experts", type=int, metavar="N")
    add("--mtp-num-layers", type=int, metavar="N")
    add("--expert-model-parallel-size", type=int, default=1, metavar="N")
    add("--vocab-size", type=int, metavar="N", help="Rows with a token id of N or more are bad.")
    add("--moe-router-load-balancing-type", nargs="+", choices=BALANCING, default="aux_loss")
    add("--moe-aux-loss-coeff", type=float, nargs="+", default=0.0, metavar="X")
    add("--moe-z-loss-coeff", type=float, metavar="X")
    switches = "use-torch-fsdp2 use-megatron-fsdp ddp-average-in-collective use-mup"
    for name in (*switches.split(), "defer-embedding-wgrad-compute"):
        add(f"--{name}", action="store_true")
    add_policy_loss_args(add_planning_args(parser))
    parser.set_defaults(max_tokens_per_microbatch=1)  # required, but not used here
    return parser
