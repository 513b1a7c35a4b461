"""The command line of ``megatron-pg explain``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pg.arguments import PolicyLossConfig, add_policy_loss_args, validate_policy_loss_args

EPILOG = """\
examples:
  Three lengths, eight samples a prompt, Dr.GRPO's constant:
    megatron-pg explain --lengths 200,4000,12000 --group-size 8 --pg-loss-divisor 8192
  Log-normal lengths (median 2000 tokens, sigma 1), 512 rollouts a step, on 8 x 2 ranks with 4 micro-batches each:
    megatron-pg explain --log-normal 2000,1 --group-size 16 --docs-per-step 512 --loss-aggregation prompt_mean \\
        --data-parallel-size 8 --context-parallel-size 2 --num-microbatches 4 --plot weights.png
  The first 512 rollouts of a file:
    megatron-pg explain --rollout-files rollouts.parquet --docs-per-step 512 --loss-aggregation prompt_mean

The flags of a launch line that have no part in the aggregation may be left in; they are listed as not used.
"""


@dataclass(frozen=True)
class Parallelism:
    """What Megatron's scaling of a loss depends on."""

    data_size: int
    """DP, without context parallelism."""
    context_size: int
    """CP."""
    num_microbatches: int
    """M of a data-parallel rank."""


@dataclass(frozen=True)
class LengthSource:
    """Where the lengths of the step come from: one of the first three is set."""

    lengths: tuple[int, ...] | None = None
    log_normal: tuple[float, float] | None = None
    """(median in tokens, sigma of the logarithm)."""
    rollout_files: tuple[str, ...] | None = None
    group_size: int = 1
    docs_per_step: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class ExplainOptions:
    """What to explain, and how to show it."""

    config: PolicyLossConfig
    """The validated flags."""
    source: LengthSource
    parallelism: Parallelism
    unused_flags: tuple[str, ...]
    as_json: bool
    plot_path: str | None


def parse_options(arguments: Sequence[str]) -> ExplainOptions:
    """The options of a command line; exits as argparse does for ``--help`` and malformed values.

    Raises:
        ValueError: the flags of the policy loss contradict each other, or a number is out of range.
        NotImplementedError: a layout without a token window.
    """
    args, unused = build_parser().parse_known_args(list(arguments))
    validate_policy_loss_args(args)
    source = LengthSource(
        lengths=args.lengths,
        log_normal=args.log_normal,
        rollout_files=None if args.rollout_files is None else tuple(args.rollout_files),
        group_size=args.group_size,
        docs_per_step=args.docs_per_step,
        seed=args.seed,
    )
    sources = (source.lengths, source.log_normal, source.rollout_files)
    if sum(given is not None for given in sources) != 1:
        raise ValueError(
            "expected one source of lengths: give one of --lengths, --log-normal and --rollout-files, such as "
            "--lengths 200,4000,12000"
        )
    return ExplainOptions(
        config=PolicyLossConfig.from_args(args),
        source=source,
        parallelism=Parallelism(
            args.data_parallel_size, args.context_parallel_size, args.num_microbatches
        ),
        unused_flags=tuple(unused),
        as_json=args.json,
        plot_path=args.plot,
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser: the lengths, the parallelism, the output, and the flags of the policy loss."""
    parser = argparse.ArgumentParser(
        prog="megatron-pg explain",
        usage="megatron-pg explain (--lengths L,L,... | --log-normal MEDIAN,SIGMA | --rollout-files PATH ...) [flags]",
        description="Which objective am I really optimizing? The weight of a token under each aggregation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    lengths = parser.add_argument_group("lengths of the step")
    lengths.add_argument(
        "--lengths",
        type=_lengths,
        metavar="L,L,...",
        help="Active tokens of the samples, in order; repeated until the step is full.",
    )
    lengths.add_argument(
        "--log-normal",
        type=_log_normal,
        metavar="MEDIAN,SIGMA",
        help="Draw the lengths: median in tokens and sigma of the logarithm.",
    )
    lengths.add_argument(
        "--rollout-files",
        nargs="+",
        metavar="PATH",
        help="Parquet or JSON Lines files of samples, or folders of them; needs pyarrow.",
    )
    lengths.add_argument(
        "--group-size",
        type=_positive,
        default=1,
        metavar="G",
        help="Samples of a prompt; that many in order form a prompt group. Rollout files name their own. (default: 1)",
    )
    lengths.add_argument(
        "--docs-per-step",
        type=_positive,
        metavar="N",
        help="Rollouts in the step. (default: as many as give whole groups of all --lengths; 32 drawn groups; all of "
        "the files)",
    )
    lengths.add_argument("--seed", type=int, default=0, help="Of --log-normal. (default: 0)")
    parallel = parser.add_argument_group("what Megatron scales a loss by")
    for flag, meaning in (
        ("--data-parallel-size", "DP, without context parallelism."),
        ("--context-parallel-size", "CP."),
        ("--num-microbatches", "M, micro-batches of a data-parallel rank in the step."),
    ):
        parallel.add_argument(
            flag, type=_positive, default=1, metavar="N", help=f"{meaning} (default: 1)"
        )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="One JSON object, every sample in it.")
    output.add_argument(
        "--plot", metavar="PATH", help="Draw the coefficient of a token against length."
    )
    return add_policy_loss_args(parser)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected 1 or more")
    return number


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected token counts such as 200,4000"
        ) from error
    if min(lengths) < 0:
        raise argparse.ArgumentTypeError(f"{min(lengths)}: expected 0 or more tokens")
    return lengths


def _log_normal(text: str) -> tuple[float, float]:
    parts = tuple(float(part) for part in text.split(","))
    if len(parts) != 2 or not (0 < parts[0] < float("inf") and 0 <= parts[1] < float("inf")):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected MEDIAN,SIGMA with a median above 0 and a sigma of 0 or more"
        )
    return parts[0], parts[1]
