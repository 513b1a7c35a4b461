"""The flags of ``megatron-pg explain``: its own, those of the launch line, and what their values may be."""

from __future__ import annotations

import argparse

from megatron_pg.config import add_policy_loss_args
from megatron_pg.step import add_planning_args

EPILOG = """\
examples:
  Three lengths, eight samples a prompt, Dr.GRPO's constant:
    megatron-pg explain --lengths 200,4000,12000 --group-size 8 --pg-loss-divisor 8192
  Log-normal lengths (median 2000 tokens, sigma 1), 512 rollouts a step, on 8 x 2 ranks with 4 micro-batches each:
    megatron-pg explain --log-normal 2000,1 --group-size 16 --docs-per-step 512 --loss-aggregation prompt_mean \\
        --data-parallel-size 8 --context-parallel-size 2 --num-microbatches 4 --plot weights.png
  The first step of a file, of 512 rollouts:
    megatron-pg explain --rollout-files rollouts.parquet --docs-per-step 512 --keep-prompt-groups \\
        --loss-aggregation prompt_mean

The rest of a launch line may be left in: what is no flag of this command is listed as not used.
"""

MAX_TOKENS = 2**40
"""Of a sample: beyond any there is, and the tokens of a step still add up in 64 bits."""
MAX_SIGMA = 10.0
"""One sigma is then a factor of 22026; more is a number of tokens given by mistake."""
MAX_COUNT = 2**31 - 1

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
    _add_sizes(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="One JSON object, every sample in it.")
    output.add_argument(
        "--plot", metavar="PATH", help="Draw the coefficient of a token against length."
    )
    _add_host_flags(parser)
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
        type=_count,
        default=1,
        metavar="G",
        help="Samples of a prompt; that many in order form a prompt group. Rollout files name their own. (default: 1)",
    )
    add(
        "--docs-per-step",
        type=_count,
        metavar="N",
        help="Rollouts in the step. (default: as many as give whole groups of all --lengths; 32 drawn groups; all of "
        "the files)",
    )
    add("--seed", type=_seed, default=0, metavar="N", help="Of --log-normal. (default: 0)")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what Megatron scales a loss by")
    for flag, meaning in (
        ("--data-parallel-size", "DP, without context parallelism."),
        ("--context-parallel-size", "CP."),
        ("--num-microbatches", "M, micro-batches of a data-parallel rank in the step."),
    ):
        group.add_argument(
            flag, type=_count, default=1, metavar="N", help=f"{meaning} (default: 1)"
        )


def _add_host_flags(parser: argparse.ArgumentParser) -> None:
    """What the validation of a launch line reads of Megatron's flags, with Megatron's names and types."""
    group = parser.add_argument_group(
        "flags of Megatron", "Those that decide whether per-token mode is on, and what is refused."
    )
    for flag in ("--num-experts", "--mtp-num-layers"):
        group.add_argument(flag, type=int, metavar="N")
    group.add_argument("--expert-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument(
        "--vocab-size", type=_count, metavar="N", help="A row with another token is a bad row."
    )
    group.add_argument(
        "--moe-router-load-balancing-type", nargs="+", choices=BALANCING, default="aux_loss"
    )
    group.add_argument("--moe-aux-loss-coeff", type=float, nargs="+", default=0.0, metavar="X")
    group.add_argument("--moe-z-loss-coeff", type=float, metavar="X")
    for flag in ("--use-torch-fsdp2", "--ddp-average-in-collective", "--use-mup"):
        group.add_argument(flag, action="store_true")


def _integer(text: str, lowest: int, highest: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = lowest - 1
    if not lowest <= number <= highest:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected an integer from {lowest} to {highest}"
        )
    return number


def _count(text: str) -> int:
    return _integer(text, 1, MAX_COUNT)


def _seed(text: str) -> int:
    return _integer(text, 0, 2**63 - 1)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(_integer(part, 0, MAX_TOKENS) for part in text.split(","))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; give token counts such as 200,4000") from None


def _log_normal(text: str) -> tuple[float, float]:
    try:
        median, sigma = (float(part) for part in text.split(","))
    except ValueError:
        median = sigma = float("nan")
    if not (0 < median <= MAX_TOKENS and 0 <= sigma <= MAX_SIGMA):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected MEDIAN,SIGMA with a median above 0 and up to {MAX_TOKENS} tokens, and a sigma from 0 to "
            f"{MAX_SIGMA:g}. Sigma is of the logarithm and not in tokens: give 2000,1 for lengths of which two thirds "
            "are between 2000 / e and 2000 e"
        )
    return median, sigma
