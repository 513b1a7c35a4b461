"""`megatron-pg explain`: which objective is really optimized, from lengths or rollout files and the launch flags."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence

from megatron_pg.config import PolicyLossConfig, add_policy_loss_args, validate_policy_loss_args
from megatron_pg.explain.report import explain_step
from megatron_pg.explain.show import plot, print_report
from megatron_pg.explain.step import MAX_COUNT, MAX_TOKENS, ExplainOptions, explained_step
from megatron_pg.step import add_planning_args, validate_planning_args

__all__ = ["build_parser", "main", "parse_options"]

EPILOG = """\
examples:
  megatron-pg explain --lengths 200,4000,12000 --group-size 8 --pg-loss-divisor 8192
  megatron-pg explain --log-normal 2000,1 --group-size 16 --docs-per-step 512 --data-parallel-size 8 \\
      --context-parallel-size 2 --num-microbatches 4 --loss-aggregation prompt_mean --plot weights.png
  megatron-pg explain --rollout-files rollouts.parquet --docs-per-step 512 --keep-prompt-groups

The rest of a launch line may be left in: what is no flag of this command is listed as not used.
"""
MAX_SIGMA = 10.0
"""The largest sigma: a factor of 22026; more is a number of tokens given by mistake."""
ANY_BUDGET = 1
"""Training needs --max-tokens-per-microbatch; nothing here depends on it."""
BALANCING = (
    "aux_loss",
    "seq_aux_loss",
    "global_aux_loss",
    "sinkhorn",
    "quantile_balancing",
    "none",
)
"""The choices of Megatron 0.19; earlier versions have some of them."""


def main(arguments: Sequence[str]) -> int:
    """Explains the step that a command line describes.

    Args:
        arguments: the command line after `megatron-pg explain`.

    Returns:
        The exit status: 0, or 2 for flags that cannot be explained (the reason is on stderr).
    """
    try:
        options = parse_options(arguments)
        step = explained_step(options)
        report = explain_step(step, options)
        if options.plot is not None:
            plot(report, options.plot)
        if options.json:
            print(json.dumps(report, indent=2))
        else:
            print_report(step, report, options)
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        print(f"megatron-pg explain: {error}", file=sys.stderr)
        return 2
    return 0


def parse_options(arguments: Sequence[str]) -> ExplainOptions:
    """The options of a command line; exits as argparse does for `--help` and malformed values.

    Raises:
        ValueError: flags of the launch line contradict each other, or a number is out of range.
        NotImplementedError: a layout without a token window.
    """
    args, unused = build_parser().parse_known_args(list(arguments))
    if sum(given is not None for given in (args.lengths, args.log_normal, args.rollout_files)) != 1:
        raise ValueError(
            "expected one source of lengths: give one of --lengths, --log-normal and --rollout-files, such as "
            "--lengths 200,4000,12000"
        )
    planning = validate_planning_args(args)
    validate_policy_loss_args(args)
    return ExplainOptions(
        config=PolicyLossConfig.from_args(args),
        planning=planning,
        lengths=args.lengths or (),
        log_normal=args.log_normal or (),
        group_size=args.group_size,
        seed=args.seed,
        data_parallel_size=args.data_parallel_size,
        context_parallel_size=args.context_parallel_size,
        num_microbatches=args.num_microbatches,
        vocab_size=args.vocab_size,
        unused_flags=tuple(unused),
        json=args.json,
        plot=args.plot,
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser: lengths, parallelism, output, and the flags of a launch line that decide what is explained."""
    parser = argparse.ArgumentParser(
        prog="megatron-pg explain",
        usage="megatron-pg explain (--lengths L,L,... | --log-normal MEDIAN,SIGMA | --rollout-files PATH ...) [flags]",
        description="Which objective am I really optimizing? The weight of a token under each aggregation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_lengths(parser)
    count = _integer(1, MAX_COUNT)
    add = parser.add_argument_group("what Megatron scales a loss by").add_argument
    for flag, meaning in (
        ("--data-parallel-size", "DP, without context parallelism."),
        ("--context-parallel-size", "CP."),
        ("--num-microbatches", "M, micro-batches of a data-parallel rank in the step."),
    ):
        add(flag, type=count, default=1, metavar="N", help=f"{meaning} (default: 1)")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="One JSON object, every sample in it.")
    add("--plot", metavar="PATH", help="Draw the coefficient of a token against length.")
    _add_megatron_flags(parser)
    add_policy_loss_args(add_planning_args(parser))
    parser.set_defaults(max_tokens_per_microbatch=ANY_BUDGET)
    return parser


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("lengths of the step").add_argument
    add(
        "--lengths",
        type=_lengths,
        metavar="L,L,...",
        help="Active tokens of the samples, in order; repeated until the step is full.",
    )
    add(
        "--log-normal",
        type=_log_normal,
        metavar="MEDIAN,SIGMA",
        help="Draw the lengths: median in tokens and sigma of the logarithm.",
    )
    add(
        "--rollout-files",
        nargs="+",
        metavar="PATH",
        help="Parquet or JSON Lines files of samples, or folders of them; needs pyarrow.",
    )
    add(
        "--group-size",
        type=_integer(1, MAX_COUNT),
        default=1,
        metavar="G",
        help="Samples of a prompt; that many in order form a prompt group. Rollout files name their own. (default: 1)",
    )
    add(
        "--docs-per-step",
        type=_integer(1, MAX_COUNT),
        metavar="N",
        help="Rollouts in the step. (default: as many as give whole groups of all --lengths; 32 drawn groups; all of "
        "the files)",
    )
    help_text = "Of --log-normal. (default: 0)"
    add("--seed", type=_integer(0, 2**63 - 1), default=0, metavar="N", help=help_text)


def _add_megatron_flags(parser: argparse.ArgumentParser) -> None:
    """What the validation of a launch line reads of Megatron's flags, with Megatron's names and types."""
    add = parser.add_argument_group(
        "flags of Megatron", "Those that decide whether per-token mode is on, and what is refused."
    ).add_argument
    add("--num-experts", type=int, metavar="N")
    add("--mtp-num-layers", type=int, metavar="N")
    add("--expert-model-parallel-size", type=int, default=1, metavar="N")
    is_bad = "A row with another token is a bad row."
    add("--vocab-size", type=_integer(1, MAX_COUNT), metavar="N", help=is_bad)
    add("--moe-router-load-balancing-type", nargs="+", choices=BALANCING, default="aux_loss")
    add("--moe-aux-loss-coeff", type=float, nargs="+", default=0.0, metavar="X")
    add("--moe-z-loss-coeff", type=float, metavar="X")
    for flag in ("--use-torch-fsdp2", "--ddp-average-in-collective", "--use-mup"):
        add(flag, action="store_true")


def _integer(lowest: int, highest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if lowest <= int(text) <= highest:
                return int(text)
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected an integer from {lowest} to {highest}"
        )

    return parse


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(_integer(0, MAX_TOKENS), text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; give token counts such as 200,4000") from None


def _log_normal(text: str) -> tuple[float, float]:
    with contextlib.suppress(ValueError):
        median, sigma = map(float, text.split(","))
        if 0 < median <= MAX_TOKENS and 0 <= sigma <= MAX_SIGMA:
            return median, sigma
    raise argparse.ArgumentTypeError(
        f"{text!r}: expected MEDIAN,SIGMA with a median above 0 and up to {MAX_TOKENS} tokens, and a sigma from 0 to "
        f"{MAX_SIGMA:g}. Sigma is of the logarithm and not in tokens: give 2000,1 for lengths of which two thirds "
        "are between 2000 / e and 2000 e"
    )
