"""What the example does not do, refused before anything is started or written."""

from __future__ import annotations

import argparse
import math

COUNTS = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "global_batch_size",
    "num_training_tasks",
    "num_held_out_tasks",
    "warm_start_batch_size",
)
"""Arguments of online generation that must be 1 or more."""

SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "train_iters",
    "keep_last_checkpoints",
)
"""Arguments of every run that must be 1 or more."""

NOT_BUILT = {
    "mtp_num_layers": "no layers for multi-token prediction are built; drop it",
    "hybrid_layer_pattern": "the model is a GPTModel; drop it",
    "heterogeneous_layers_config_path": "all layers are alike; drop it",
    "use_megatron_fsdp": "the model is wrapped in DDP; use --use-distributed-optimizer",
    "use_torch_fsdp2": "the model is wrapped in DDP; use --use-distributed-optimizer",
    "overlap_param_gather": "its hooks would have to be lifted for every checkpoint; drop it",
    "fp16": "there is no loss scaling; use --bf16",
    "load": "a run begins with random weights, or goes on with --resume from those in --run-dir; drop it",
    "pretrained_checkpoint": "a run begins with random weights, or goes on with --resume; drop it",
    "save": "checkpoints go to --run-dir every --save-interval steps; drop it",
    "lr_decay_iters": "the learning rate decays over --train-iters; drop it",
    "lr_decay_samples": "the learning rate decays over --train-iters; drop it",
    "lr_warmup_fraction": "give --lr-warmup-iters",
    "lr_warmup_samples": "give --lr-warmup-iters",
    "decoupled_lr": "one learning rate for all parameters; drop it",
}
"""Flags of Megatron that ask for something that is not here, and what to do."""

POSITIONS = ("learned_absolute", "rope", "none")


def refuse(args: argparse.Namespace) -> None:
    """Raises unless the example can run these arguments.

    Raises:
        ValueError, NotImplementedError: naming the flag and what to do.
    """
    for name, value in vars(args).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in values):
            raise ValueError(f"{_flag(name)} is {value}: give a finite number")
    for name in SIZES:
        _check_count(args, name)
    for name in ("save_interval", "expert_tensor_parallel_size"):
        if getattr(args, name) is not None:
            _check_count(args, name)
    for name, reason in NOT_BUILT.items():
        if getattr(args, name, None):
            raise NotImplementedError(f"{_flag(name)}: {reason}")
    if getattr(args, "optimizer", "adam") != "adam":
        raise NotImplementedError(
            f"--optimizer {args.optimizer}: checkpoints here know Adam's state alone; give adam"
        )
    if args.position_embedding_type not in POSITIONS:
        raise NotImplementedError(
            f"--position-embedding-type {args.position_embedding_type}: give one of {', '.join(POSITIONS)}"
        )
    if args.device == "cpu" and (args.attention_dropout or args.hidden_dropout):
        raise NotImplementedError(
            "--attention-dropout and --hidden-dropout need Megatron's CUDA random state: give 0 with --device cpu"
        )
    data_parallel_size = _data_parallel_size(args)
    if args.lr_warmup_iters >= args.train_iters:
        raise ValueError(
            f"--lr-warmup-iters {args.lr_warmup_iters} is not below --train-iters {args.train_iters}: the learning rate "
            "would not get to --lr; give fewer"
        )
    if args.rollout_files:
        _check_files(args)
    else:
        _refuse_what_the_sampler_cannot(args)
        _check_batches(args, data_parallel_size)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _data_parallel_size(args: argparse.Namespace) -> int:
    """What is left of the processes."""
    axes = ("tensor_model", "pipeline_model", "context")
    sizes = [getattr(args, f"{axis}_parallel_size") for axis in axes]
    model_ranks = sizes[0] * sizes[1] * sizes[2]
    if args.world_size % model_ranks:
        raise ValueError(
            f"{args.world_size} processes cannot be split in groups of tensor x pipeline x context = {model_ranks}: "
            "change --nproc-per-node of torchrun, --tensor-model-parallel-size, --pipeline-model-parallel-size or "
            "--context-parallel-size"
        )
    return int(args.world_size // model_ranks)


def _refuse_what_the_sampler_cannot(args: argparse.Namespace) -> None:
    """Generation is with the training model, one token at a time, without context parallelism."""
    if args.distinct_ids is not None:
        raise ValueError(
            f"--distinct-ids {args.distinct_ids}: the tasks are numbered over all ranks here; drop it"
        )
    if args.pipeline_model_parallel_size > 1:
        raise NotImplementedError(
            "--pipeline-model-parallel-size above 1: this example generates with the training model, whole on "
            "each tensor-parallel group; use --tensor-model-parallel-size, or train from --rollout-files"
        )
    if getattr(args, "sequence_parallel", False) and args.tensor_model_parallel_size > 1:
        raise NotImplementedError(
            "--sequence-parallel: generation one token at a time cannot shard the sequence; drop it, or train from "
            "--rollout-files"
        )
    if args.position_embedding_type != "learned_absolute":
        raise NotImplementedError(
            f"--position-embedding-type {args.position_embedding_type}: generation here ignores context parallelism, "
            "which rotary embeddings do not; use learned_absolute, or train from --rollout-files"
        )
    if getattr(args, "num_experts", None):
        raise NotImplementedError(
            "--num-experts: ranks here generate answers of different lengths, and experts would wait for each other; "
            "train from --rollout-files"
        )


def _check_files(args: argparse.Namespace) -> None:
    for name, why in {
        "docs_per_step": "the documents (rollouts) of a step",
        "vocab_size": "the token ids of the files are below it",
    }.items():
        if getattr(args, name) is None:
            raise ValueError(f"--rollout-files needs {_flag(name)}: {why}")
        _check_count(args, name)


def _check_count(args: argparse.Namespace, name: str) -> None:
    if getattr(args, name) is None or getattr(args, name) < 1:
        raise ValueError(f"{_flag(name)} is {getattr(args, name)}: give 1 or more")


def _check_batches(args: argparse.Namespace, data_parallel_size: int) -> None:
    for name in COUNTS:
        _check_count(args, name)
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
    for name in ("rollout_batch_size", "warm_start_batch_size"):
        if getattr(args, name) > args.num_training_tasks:
            raise ValueError(
                f"{_flag(name)} is {getattr(args, name)}, more than --num-training-tasks {args.num_training_tasks}"
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
