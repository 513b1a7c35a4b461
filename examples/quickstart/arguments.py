"""The command line: the flags of this example beside Megatron's."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_pg.config import add_policy_loss_args, validate_policy_loss_args
from megatron_pg.config.planning import add_planning_args, validate_planning_args

from . import megatron_arguments
from .refusals import refuse

LOG_PROBS_AND_GROUPS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "group_index")
"""The optional fields of `Sample` that this example fills, or that its rollout files may."""


def add_example_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The package's flags and those of this example; an `extra_args_provider` of Megatron's parser."""
    add_policy_loss_args(parser)
    add_planning_args(parser)
    parser.set_defaults(max_tokens_per_microbatch=2048)
    group = parser.add_argument_group("example")
    add = group.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cpu: gloo; cuda: NCCL")
    add("--run-dir", type=Path, required=True, help="metrics, report and checkpoints go here")
    add(
        "--dry-run",
        action="store_true",
        help="check the flags for WORLD_SIZE processes, print the plan and a memory estimate, start nothing",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the last whole checkpoint in --run-dir. Reading one unpickles parts of it, as Megatron's format "
        "has it, and a pickle can run any program: only from a folder that you trust",
    )
    add(
        "--keep-last-checkpoints",
        type=int,
        default=2,
        metavar="K",
        help="whole checkpoints that stay; older ones are removed once a new one is whole",
    )
    add("--rollout-batch-size", type=int, default=64, help="prompts of one round of generation")
    add("--n-samples-per-prompt", type=int, default=8, help="answers to each prompt")
    add("--max-response-len", type=int, default=None, help="tokens; default: the longest answer")
    add("--num-training-tasks", type=int, default=16384)
    add("--num-held-out-tasks", type=int, default=256, help="scored before and after")
    add("--warm-start-iters", type=int, default=250, help="supervised steps before RL")
    add("--warm-start-lr", type=float, default=2e-3)
    add("--warm-start-batch-size", type=int, default=128, help="answers of a supervised step")
    add(
        "--warm-start-corruption",
        type=float,
        default=0.5,
        help="share of the supervised answers with two letters exchanged: the skill is there, and unreliable",
    )
    add(
        "--warm-start-stutter",
        type=float,
        default=0.0,
        help="share of the supervised answers in which a letter is said 1 to 6 times more: wrong answers of other lengths",
    )
    _mend_help(parser)
    return parser


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Megatron-Core 0.19.2 has a bare % in a help text, with which --help ends in an error."""
    for action in parser._actions:
        try:
            if action.help:
                action.help % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line and validate it; the only place of this example that changes arguments.

    Raises:
        ValueError, NotImplementedError: naming the flag and what to do.
    """
    args = megatron_arguments.parse(add_example_args)
    megatron_arguments.adapt(args)
    refuse(args)
    validate_planning_args(args)
    validate_policy_loss_args(args, sample_fields=LOG_PROBS_AND_GROUPS)
    megatron_arguments.validate(args)
    return args
