"""What ``megatron-pg explain`` is asked, from its command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pg.config import PolicyLossConfig, validate_policy_loss_args
from megatron_pg.explain.flags import build_parser
from megatron_pg.step import PlanningConfig, validate_planning_args


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
    """Where the lengths of the step come from, unless from rollout files: one of the first two is then set."""

    lengths: tuple[int, ...] | None = None
    log_normal: tuple[float, float] | None = None
    """(median in tokens, sigma of the logarithm)."""
    group_size: int = 1
    seed: int = 0


@dataclass(frozen=True)
class ExplainOptions:
    """What to explain, and how to show it."""

    config: PolicyLossConfig
    """The validated flags."""
    planning: PlanningConfig
    """The validated flags that say what a step holds; the rollout files are among them."""
    source: LengthSource
    vocab_size: int | None
    """Token ids of the rollout files are below it; None leaves them unchecked."""
    parallelism: Parallelism
    unused_flags: tuple[str, ...]
    as_json: bool
    plot_path: str | None


def parse_options(arguments: Sequence[str]) -> ExplainOptions:
    """The options of a command line; exits as argparse does for ``--help`` and malformed values.

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
        source=LengthSource(args.lengths, args.log_normal, args.group_size, args.seed),
        vocab_size=args.vocab_size,
        parallelism=Parallelism(
            args.data_parallel_size, args.context_parallel_size, args.num_microbatches
        ),
        unused_flags=tuple(unused),
        as_json=args.json,
        plot_path=args.plot,
    )
