"""The command line: Megatron's own parser where the installed wheel has it, the same flag names elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from megatron_pg.arguments import add_policy_loss_args, validate_policy_loss_args
from megatron_pg.megatron.versions import has_megatron_training
from megatron_pg.planning import add_planning_args, validate_planning_args

from .run_directory import RunDirectoryError

LOG_PROBS_AND_GROUPS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "group_index")
"""The optional fields of `Sample` that this example fills, or that its rollout files may."""

COUNTS = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "global_batch_size",
    "num_training_tasks",
    "num_held_out_tasks",
    "warm_start_batch_size",
)
"""Arguments of online generation that must be 1 or more."""


def add_example_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The package's flags and those of this example; an `extra_args_provider` of Megatron's parser."""
    add_policy_loss_args(parser)
    add_planning_args(parser)
    parser.set_defaults(max_tokens_per_microbatch=2048)
    group = parser.add_argument_group("example")
    add = group.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cpu: gloo; cuda: NCCL")
    add("--run-dir", type=Path, required=True, help="metrics, report and checkpoints go here")
    add("--resume", action="store_true", help="go on from the last whole checkpoint in --run-dir")
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
    return parser


def _add_megatron_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags of Megatron that this example uses, under their names, for wheels without its parser."""
    group = parser.add_argument_group("megatron")
    add = group.add_argument
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads"):
        add(flag, type=int, required=True)
    for flag in ("--seq-length", "--max-position-embeddings", "--train-iters"):
        add(flag, type=int, required=True)
    add("--global-batch-size", type=int, default=None, help="samples of an optimizer step")
    add("--vocab-size", type=int, default=None, help="token ids of --rollout-files are below it")
    for axis in ("tensor-model", "pipeline-model", "context"):
        add(f"--{axis}-parallel-size", type=int, default=1)
    add("--position-embedding-type", choices=["learned_absolute"], default="learned_absolute")
    add("--transformer-impl", choices=["local", "transformer_engine"], default="local")
    add("--attention-dropout", type=float, default=0.1)
    add("--hidden-dropout", type=float, default=0.1)
    add("--init-method-std", type=float, default=0.02)
    add("--lr", type=float, required=True)
    add("--min-lr", type=float, default=0.0)
    add("--lr-decay-style", choices=["constant", "linear", "cosine"], default="linear")
    add("--lr-warmup-iters", type=int, default=0)
    add("--weight-decay", type=float, default=0.01)
    add("--clip-grad", type=float, default=1.0)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.999)
    add("--bf16", action="store_true")
    add("--calculate-per-token-loss", action="store_true")
    add("--save-interval", type=int, default=None, help="steps between checkpoints; default: none")
    add("--tensorboard-dir", type=Path, default=None, help="default: a folder of --run-dir")
    add("--seed", type=int, default=1234)
    return parser


def parse_arguments() -> argparse.Namespace:
    """Parse the command line and validate it; the only place of this example that changes arguments.

    Raises:
        ValueError, NotImplementedError: naming the flag and what to do.
    """
    if has_megatron_training():
        from megatron.training.arguments import parse_args

        args: argparse.Namespace = parse_args(extra_args_provider=add_example_args)
    else:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        args = add_example_args(_add_megatron_args(parser)).parse_args()
        args.rank = int(os.environ.get("RANK", "0"))
        args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    _adapt_to_device(args)
    _check(args)
    validate_planning_args(args)
    validate_policy_loss_args(args, sample_fields=LOG_PROBS_AND_GROUPS)
    if has_megatron_training():
        _validate_as_megatron_does(args)
    return args


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """End the process with the message, said once, of an error that the user can mend."""
    try:
        yield
    except (ValueError, NotImplementedError, RunDirectoryError) as error:
        sys.exit(f"error: {error}" if os.environ.get("RANK", "0") == "0" else 1)


def _adapt_to_device(args: argparse.Namespace) -> None:
    """What is no choice: one pack a micro-batch, and what needs a device or a package that is not there."""
    args.micro_batch_size = 1
    # Of Apex, or of a Transformer Engine that is new enough.
    args.gradient_accumulation_fusion = _is_installed("fused_weight_gradient_mlp_cuda")
    if args.device == "cpu":
        args.distributed_backend = "gloo"
        args.use_cpu_initialization = True
    if args.device == "cpu" or not _is_installed("transformer_engine"):
        args.transformer_impl = "local"
        args.no_persist_layer_norm = True
        for fusion in ("masked_softmax", "bias_gelu", "bias_swiglu", "bias_dropout", "apply_rope"):
            setattr(args, f"{fusion}_fusion", False)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _validate_as_megatron_does(args: argparse.Namespace) -> None:
    from megatron.training import arguments

    with contextlib.ExitStack() as stack:
        # It prints every one of its arguments, 600 lines.
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if args.device == "cpu":
            # Under context parallelism it asks for the architecture of a GPU.
            stack.enter_context(mock.patch.object(arguments, "get_device_arch_version", lambda: 10))
        arguments.validate_args(args)


def _check(args: argparse.Namespace) -> None:
    """Refuse what this example does not do, before anything is started or written."""
    model_ranks = args.tensor_model_parallel_size * args.context_parallel_size
    if args.pipeline_model_parallel_size > 1:
        raise NotImplementedError(
            "--pipeline-model-parallel-size above 1: this example generates with the training model, whole on "
            "each tensor-parallel group; use --tensor-model-parallel-size"
        )
    if getattr(args, "sequence_parallel", False):
        raise NotImplementedError(
            "--sequence-parallel: generation one token at a time cannot shard the sequence; drop it"
        )
    if getattr(args, "use_distributed_optimizer", False):
        raise NotImplementedError(
            "--use-distributed-optimizer: this example's checkpoints hold unsharded states; drop it"
        )
    if args.position_embedding_type != "learned_absolute":
        raise NotImplementedError(
            f"--position-embedding-type {args.position_embedding_type}: generation here ignores context parallelism, "
            "which rotary embeddings do not; use learned_absolute"
        )
    if args.world_size % model_ranks:
        raise ValueError(
            f"{args.world_size} processes cannot be split in groups of tensor x context = {model_ranks}: change "
            "--nproc-per-node of torchrun, --tensor-model-parallel-size or --context-parallel-size"
        )
    if args.device == "cpu" and (args.attention_dropout or args.hidden_dropout):
        raise NotImplementedError(
            "--attention-dropout and --hidden-dropout need Megatron's CUDA random state: give 0 with --device cpu"
        )
    for flag in ("train_iters", "keep_last_checkpoints"):
        _check_count(args, flag)
    if args.rollout_files:
        _check_files(args)
    else:
        _check_batches(args, data_parallel_size=args.world_size // model_ranks)


def _check_files(args: argparse.Namespace) -> None:
    for flag in ("docs_per_step", "vocab_size"):
        if getattr(args, flag) is None:
            raise ValueError(
                f"--rollout-files needs --{flag.replace('_', '-')}: "
                + {
                    "docs_per_step": "the documents (rollouts) of a step",
                    "vocab_size": "the token ids of the files are below it",
                }[flag]
            )
        _check_count(args, flag)


def _check_count(args: argparse.Namespace, flag: str) -> None:
    if getattr(args, flag) is None or getattr(args, flag) < 1:
        raise ValueError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}: give 1 or more")


def _check_batches(args: argparse.Namespace, data_parallel_size: int) -> None:
    for flag in COUNTS:
        _check_count(args, flag)
    shares = (args.warm_start_corruption, args.warm_start_stutter)
    if not (min(shares) >= 0 and sum(shares) <= 1):
        raise ValueError(
            "--warm-start-corruption {} and --warm-start-stutter {} are shares of the same answers: give numbers "
            "from 0 on whose sum is at most 1".format(*shares)
        )
    if args.docs_per_step is not None:
        raise ValueError(
            "--docs-per-step is about --rollout-files: a round of generation is cut into steps of --global-batch-size"
        )
    for flag in ("rollout_batch_size", "warm_start_batch_size"):
        if getattr(args, flag) > args.num_training_tasks:
            raise ValueError(
                f"--{flag.replace('_', '-')} is {getattr(args, flag)}, more than --num-training-tasks "
                f"{args.num_training_tasks}"
            )
    rollouts = args.rollout_batch_size * args.n_samples_per_prompt
    if rollouts % args.global_batch_size:
        raise ValueError(
            f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt} is "
            f"no multiple of --global-batch-size {args.global_batch_size}: a round of generation is cut into whole steps"
        )
    if args.global_batch_size % (args.n_samples_per_prompt * data_parallel_size):
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --n-samples-per-prompt "
            f"{args.n_samples_per_prompt} x {data_parallel_size} data-parallel ranks: a prompt's answers stay together"
        )
    if args.train_iters % (rollouts // args.global_batch_size):
        raise ValueError(
            f"--train-iters {args.train_iters} is no multiple of {rollouts // args.global_batch_size}, the steps of one "
            "round of generation"
        )
