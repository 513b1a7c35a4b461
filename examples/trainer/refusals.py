"""What this program does not do: flags of Megatron that nothing here would read, refused before anything is started."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

FILES = "samples come from --rollout-files or --task; drop it"
GPT = "the model is a GPTModel; drop it"
DDP = "the model is wrapped in DDP; use --use-distributed-optimizer"
ABSENT = "nothing here would start it; drop it"

GROUPS = {
    "rl": "Megatron's own RL loop is not run; the flags of this program are in the groups 'policy loss', 'planning' and "
    "'trainer' of --help",
    "sft": "for supervised fine-tuning give --policy-loss sft and --rollout-files",
    "In-process restart": "a run that was ended is started anew, with --load; drop it",
    "one logger": "metrics go to --tensorboard-dir and --wandb-project; drop it",
    "autoresume": "use --exit-signal-handler and --exit-duration-in-mins",
    "validation": "there is no validation set; drop it",
    "msc": "checkpoints and rollouts are files; drop it",
    **dict.fromkeys(("data and dataloader", "tokenizer"), FILES),
    **dict.fromkeys(("biencoder", "vision", "heterogeneous architecture"), GPT),
    **dict.fromkeys(("experimental_attention_variant", "kitchen"), GPT),
    **dict.fromkeys(("inference", "rerun engine", "straggler", "workload inspector"), ABSENT),
    **dict.fromkeys(("ft_package", "fault injector", "Logits Distillation"), ABSENT),
}
"""Groups of Megatron's flags, by their titles in --help."""

KEPT = ("seq_length", "vocab_size", "make_vocab_size_divisible_by")
"""Flags of those groups that are read."""

REASONS = {
    "a step holds --docs-per-step rollouts, in micro-batches of --max-tokens-per-microbatch tokens; drop it": """
        micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed""",
    "steps are counted here, not samples: give the flag of the same name that counts iterations": """
        train_samples lr_decay_samples lr_warmup_samples lr_wsd_decay_samples""",
    "its buffers have one size and micro-batches differ in length; drop it": """
        cuda_graph_impl enable_cuda_graph external_cuda_graph optimizer_cuda_graph tp_comm_overlap""",
    "a checkpoint that holds no place in the rollouts cannot be gone on from; drop it": """
        non_persistent_save_interval no_save_optim override_ckpt_iteration""",
    FILES: "dataloader_type iterations_to_skip exit_signal_handler_for_dataloader",
    GPT: "mtp_num_layers hybrid_layer_pattern hybrid_override_pattern encoder_num_layers spec",
    DDP: "use_megatron_fsdp use_torch_fsdp2",
    "every sample is split over all context-parallel ranks; drop it": "hybrid_context_parallel",
    "make the checkpoint first with Megatron's tools; drop it": "moe_use_upcycling ckpt_convert_format",
    "settings are flags here; drop it": "yaml_cfg",
}
FLAGS = {name: reason for reason, names in REASONS.items() for name in names.split()}
"""Further flags, by the attribute that they store to, and what to do."""

LEAST = {
    "prompts_per_step": 1,
    "samples_per_prompt": 1,
    "max_response_tokens": 1,
    "held_out_tasks": 0,
    "prompt_examples": 0,
}
"""Numbers of --task, and the smallest that each may be."""

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
        ValueError: naming the flag and what to do.
    """
    for name, value in vars(args).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in values):
            raise ValueError(f"--{name.replace('_', '-')} is {value}: give a finite number")
    of_source = _of_tasks if args.task else _of_files
    for is_wrong, message in (*of_source(args), *_of_any(args)):
        if is_wrong:
            raise ValueError(message)


def _of_any(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    axes = ("tensor_model", "pipeline_model", "context")
    model_ranks = math.prod(getattr(args, f"{axis}_parallel_size") for axis in axes)
    yield not args.vocab_size, "--vocab-size is missing: token ids are below it"
    yield not args.train_iters, "--train-iters is missing: steps, at most"
    yield (
        args.save_hf and (not args.hf_model or Path(args.save_hf).exists()),
        f"--save-hf {args.save_hf}: it is written with the config and tokenizer of --hf-model, as a new folder; give "
        "--hf-model, and a name that is free",
    )
    yield (
        bool(args.save) and (args.save_interval or 0) < 1,
        f"--save {args.save} with --save-interval {args.save_interval}: give the steps from one checkpoint to the next",
    )
    folder = args.wandb_save_dir or args.save
    yield (
        bool(args.wandb_project) and not (args.wandb_exp_name and folder),
        "--wandb-project goes with --wandb-exp-name, the run's name, and with --save or --wandb-save-dir: give them too",
    )
    yield (
        bool(args.wandb_project) and importlib.util.find_spec("wandb") is None,
        f"--wandb-project {args.wandb_project}: the package wandb is not installed; pip install wandb, or drop the flag",
    )
    yield (
        args.ckpt_format != "torch_dist",
        f"--ckpt-format {args.ckpt_format}: checkpoints are read at any sharding; give torch_dist",
    )
    yield (
        args.position_embedding_type not in POSITIONS,
        f"--position-embedding-type {args.position_embedding_type}: give one of {', '.join(POSITIONS)}",
    )
    yield (
        args.device == "cpu" and bool(args.attention_dropout or args.hidden_dropout),
        "--attention-dropout and --hidden-dropout need Megatron's CUDA random state: give 0 with --device cpu",
    )
    yield (
        0 < (args.train_iters or 0) <= (args.lr_warmup_iters or 0),
        f"--lr-warmup-iters {args.lr_warmup_iters} is not below --train-iters {args.train_iters}: the learning rate "
        "would not get to --lr; give fewer",
    )
    yield (
        bool(args.world_size % model_ranks),
        f"{args.world_size} processes cannot be split in groups of tensor x pipeline x context = {model_ranks}: "
        "change --nproc-per-node of torchrun, --tensor-model-parallel-size, --pipeline-model-parallel-size or "
        "--context-parallel-size",
    )


def _of_files(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    yield not args.rollout_files, "what to train on: give one of --rollout-files and --task"
    yield not args.docs_per_step, "--docs-per-step is missing: the documents (rollouts) of a step"


def _of_tasks(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """The sampler has the stages of the model that is trained, each rank one of them, a token at a time."""
    yield bool(args.rollout_files), "what to train on: give one of --rollout-files and --task"
    yield (
        not args.hf_model,
        "--task needs --hf-model: its tokenizer and chat template make the prompts",
    )
    yield args.docs_per_step is not None, "--docs-per-step with --task: give --prompts-per-step"
    for name, least in LEAST.items():
        value = getattr(args, name)
        yield value < least, f"--{name.replace('_', '-')} is {value}: give {least} or more"
    yield (
        args.distinct_ids is not None,
        "--distinct-ids with --task: tasks are numbered over all ranks; drop it",
    )
    yield (
        args.replay_sampling_set,
        "--replay-sampling-set with --task: answers are sampled from the whole vocabulary; drop it",
    )
    for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        flag = f"--{name.replace('_', '-')}"
        message = f"{flag} with --task: answers are generated with one chunk of layers a stage"
        yield getattr(args, name, None) is not None, f"{message}; drop it"
    for name in ("expert_model_parallel_size", "sequence_parallel"):
        flag = f"--{name.replace('_', '-')}"
        message = f"{flag} with --task: every tensor-parallel group generates by itself, a token at a time"
        yield getattr(args, name) > 1 or getattr(args, name) is True, f"{message}; drop it"
