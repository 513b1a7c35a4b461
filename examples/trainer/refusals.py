"""What this program does not do: flags of Megatron that nothing here would read, refused before anything is started."""

from __future__ import annotations

import argparse
from pathlib import Path

STEP = "a step holds --docs-per-step rollouts, in micro-batches of --max-tokens-per-microbatch tokens; drop it"
SAMPLES = (
    "steps are counted here, not samples: give the flag of the same name that counts iterations"
)
SHAPES = "its buffers have one size and micro-batches differ in length; drop it"
WHOLE = "a checkpoint that holds no place in the rollouts cannot be gone on from; drop it"

GROUPS = {
    "rl": "Megatron's own RL loop is not run; the flags of this program are in the groups 'policy loss', 'planning' and "
    "'trainer' of --help",
    "data and dataloader": "samples come from --rollout-files; drop it",
    "tokenizer": "samples come from --rollout-files, as tokens; drop it",
    "validation": "there is no validation set; drop it",
    "sft": "for supervised fine-tuning give --policy-loss sft and --rollout-files",
    "inference": "no inference engine is started; drop it",
    "rerun engine": "steps are not run twice; drop it",
    "straggler": "no straggler detector is started; drop it",
    "workload inspector": "no inspector is started; drop it",
    "In-process restart": "a run that was ended is started anew, with --load; drop it",
    "one logger": "metrics go to --tensorboard-dir and --wandb-project; drop it",
    "ft_package": "its heartbeats are not sent; drop it",
    "autoresume": "use --exit-signal-handler and --exit-duration-in-mins",
    "fault injector": "faults are not injected; drop it",
    "Logits Distillation": "logits are neither written nor read; drop it",
    "biencoder": "the model is a GPTModel; drop it",
    "vision": "the model is a GPTModel; drop it",
    "heterogeneous architecture": "all layers are alike; drop it",
    "experimental_attention_variant": "the model is a GPTModel with its usual attention; drop it",
    "kitchen": "its quantization is not set up; drop it",
    "msc": "checkpoints and rollouts are files; drop it",
}
"""Groups of Megatron's flags, by their titles in --help."""

KEPT = ("seq_length", "vocab_size", "make_vocab_size_divisible_by")
"""Flags of those groups that are read."""

FLAGS = {
    "micro_batch_size": STEP,
    "global_batch_size": STEP,
    "rampup_batch_size": STEP,
    "step_batch_size_schedule": STEP,
    "decrease_batch_size_if_needed": STEP,
    "train_samples": SAMPLES,
    "lr_decay_samples": SAMPLES,
    "lr_warmup_samples": SAMPLES,
    "lr_wsd_decay_samples": SAMPLES,
    "iterations_to_skip": "take those rollouts out of the files; drop it",
    "dataloader_type": "samples come from --rollout-files, in their order; drop it",
    "exit_signal_handler_for_dataloader": "there are no dataloader workers; give --exit-signal-handler",
    "mtp_num_layers": "no layers for multi-token prediction are built; drop it",
    "hybrid_layer_pattern": "the model is a GPTModel; drop it",
    "hybrid_override_pattern": "the model is a GPTModel; drop it",
    "encoder_num_layers": "the model is a GPTModel; give --num-layers",
    "spec": "the layers are those of --transformer-impl; drop it",
    "yaml_cfg": "settings are flags here; drop it",
    "moe_use_upcycling": "make the experts' checkpoint first, and give it by --load; drop it",
    "use_megatron_fsdp": "the model is wrapped in DDP; use --use-distributed-optimizer",
    "use_torch_fsdp2": "the model is wrapped in DDP; use --use-distributed-optimizer",
    "cuda_graph_impl": SHAPES,
    "enable_cuda_graph": SHAPES,
    "external_cuda_graph": SHAPES,
    "optimizer_cuda_graph": SHAPES,
    "tp_comm_overlap": SHAPES,
    "hybrid_context_parallel": "every sample is split over all context-parallel ranks; drop it",
    "non_persistent_save_interval": WHOLE,
    "no_save_optim": WHOLE,
    "override_ckpt_iteration": WHOLE,
    "ckpt_convert_format": "convert checkpoints with Megatron's tools; drop it",
}
"""Further flags, by the attribute that they store to, and what to do."""

POSITIONS = ("learned_absolute", "rope", "none")


def refuse_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises where a flag was given that this program does not read.

    Args:
        args: as parsed, before anything has changed them.
        parser: what parsed them.

    Raises:
        NotImplementedError: naming the flag and what to do.
    """
    reasons = {
        action.dest: GROUPS[str(group.title)]
        for group in parser._action_groups
        if group.title in GROUPS
        for action in group._group_actions
        if action.dest not in KEPT
    }
    names = {action.dest: action.option_strings for action in parser._actions}
    for name, reason in (reasons | FLAGS).items():
        if getattr(args, name, None) != parser.get_default(name):
            flag = max(names.get(name) or [name], key=len)
            raise NotImplementedError(f"{flag}: {reason}")


def refuse_combinations(args: argparse.Namespace) -> None:
    """Raises unless this program can run these arguments.

    Raises:
        ValueError, NotImplementedError: naming the flag and what to do.
    """
    if bool(args.rollout_files) == bool(args.task):
        raise ValueError("what to train on: give one of --rollout-files and --task")
    if args.task:
        _refuse_what_the_sampler_cannot(args)
    own = (
        {"hf_model": "its tokenizer and chat template make the prompts"}
        if args.task
        else {"docs_per_step": "the documents (rollouts) of a step"}
    )
    for name, why in {
        **own,
        "vocab_size": "token ids are below it",
        "train_iters": "steps, at most",
    }.items():
        if not getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} is missing: {why}")
    if args.save_hf and (not args.hf_model or Path(args.save_hf).exists()):
        raise ValueError(
            f"--save-hf {args.save_hf}: it is written with the config and tokenizer of --hf-model, as a new folder; give "
            "--hf-model, and a name that is free"
        )
    if args.ckpt_format != "torch_dist":
        raise NotImplementedError(
            f"--ckpt-format {args.ckpt_format}: checkpoints are read at any sharding; give torch_dist"
        )
    if args.position_embedding_type not in POSITIONS:
        raise NotImplementedError(
            f"--position-embedding-type {args.position_embedding_type}: give one of {', '.join(POSITIONS)}"
        )
    if args.device == "cpu" and (args.attention_dropout or args.hidden_dropout):
        raise NotImplementedError(
            "--attention-dropout and --hidden-dropout need Megatron's CUDA random state: give 0 with --device cpu"
        )
    if args.lr_warmup_iters and args.lr_warmup_iters >= args.train_iters:
        raise ValueError(
            f"--lr-warmup-iters {args.lr_warmup_iters} is not below --train-iters {args.train_iters}: the learning rate "
            "would not get to --lr; give fewer"
        )
    model_ranks = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    if args.world_size % model_ranks:
        raise ValueError(
            f"{args.world_size} processes cannot be split in groups of tensor x pipeline x context = {model_ranks}: "
            "change --nproc-per-node of torchrun, --tensor-model-parallel-size, --pipeline-model-parallel-size or "
            "--context-parallel-size"
        )


def _refuse_what_the_sampler_cannot(args: argparse.Namespace) -> None:
    """It generates with the model that is trained, whole on each tensor-parallel group, one token at a time."""
    if args.docs_per_step is not None:
        raise ValueError("--docs-per-step is about --rollout-files: give --prompts-per-step")
    for name, why in {
        "pipeline_model_parallel_size": "the sampler has the whole model",
        "expert_model_parallel_size": "ranks generate answers of different lengths, and experts would wait",
    }.items():
        if getattr(args, name) > 1:
            raise NotImplementedError(
                f"--{name.replace('_', '-')} {getattr(args, name)} with --task: {why}; train from --rollout-files"
            )
    if args.sequence_parallel and args.tensor_model_parallel_size > 1:
        raise NotImplementedError(
            "--sequence-parallel with --task: one token at a time cannot be shared out; drop it"
        )
