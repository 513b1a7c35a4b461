"""Refusals before anything is started: flags that nothing here would read, and a run that goes on
with other settings.
"""

import argparse
import importlib.util
import math
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megatron_pg.config.planning import PlanningConfig
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.settings import fields_of
from megatron_pg.config.values import flag_of

FILES = "samples come from --rollout-files or --task; drop it"
GPT = "the model is a GPTModel; drop it"
DDP = "the model is wrapped in DDP; use --use-distributed-optimizer"
ABSENT = "nothing here would start it; drop it"

GROUPS = {
    "rl": "Megatron's own RL loop is not run; see the groups 'policy loss', 'planning' and "
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
    "a step holds --docs-per-step rollouts, in micro-batches of --max-tokens-per-microbatch "
    "tokens; drop it": """
        micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule
        decrease_batch_size_if_needed""",
    "steps are counted here, not samples: give the flag of the same name that counts "
    "iterations": """
        train_samples lr_decay_samples lr_warmup_samples lr_wsd_decay_samples""",
    "its buffers have one size and micro-batches differ in length; drop it": """
        cuda_graph_impl enable_cuda_graph external_cuda_graph optimizer_cuda_graph
        tp_comm_overlap""",
    "a checkpoint that holds no place in the rollouts cannot be gone on from; drop it": """
        non_persistent_save_interval no_save_optim override_ckpt_iteration""",
    FILES: "dataloader_type iterations_to_skip exit_signal_handler_for_dataloader",
    GPT: "mtp_num_layers hybrid_layer_pattern hybrid_override_pattern encoder_num_layers spec",
    DDP: "use_megatron_fsdp use_torch_fsdp2",
    "every sample is split over all context-parallel ranks; drop it": "hybrid_context_parallel",
    "make the checkpoint first with Megatron's tools; drop it": "moe_use_upcycling "
    "ckpt_convert_format",
    "settings are flags here; drop it": "yaml_cfg",
}
FLAGS = {name: reason for reason, names in REASONS.items() for name in names.split()}
"""Further flags, by the attribute that they store to, and what to do."""

COUNTS = {
    "prompt_examples": (0, 0, "tasks with their answers before every question"),
    "prompts_per_step": (1, 16, "questions of a step of --task"),
    "samples_per_prompt": (1, 8, "answers to each"),
    "max_response_tokens": (1, 128, "of an answer, at most"),
    "held_out_tasks": (0, 64, "scored before and after, never trained on"),
}
"""Flags of --task that take a number: the smallest, the default and the meaning."""
ONE_AT_A_TIME = "every tensor-parallel group generates by itself, a token at a time"
CANNOT_GENERATE = {
    "num_layers_per_virtual_pipeline_stage": "answers are generated with one chunk of layers a "
    "stage",
    "num_virtual_stages_per_pipeline_rank": "answers are generated with one chunk of layers a "
    "stage",
    "sequence_parallel": ONE_AT_A_TIME,
    "expert_model_parallel_size": ONE_AT_A_TIME,
    "replay_sampling_set": "answers are sampled from the whole vocabulary",
    "replay_routing": "the model itself generates, and its routers' choices are not recorded",
    "distinct_ids": "tasks are numbered over all ranks",
}
"""Settings that --task cannot be given, by the attribute, and why."""
POSITIONS = ("learned_absolute", "rope", "none")

MODEL_KEPT = """
    num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention
    num_query_groups kv_channels swiglu squared_relu openai_gelu quick_geglu normalization
    layernorm_epsilon apply_residual_connection_post_layernorm add_bias_linear add_qkv_bias
    qk_layernorm untie_embeddings_and_output_weights vocab_size position_embedding_type
    max_position_embeddings rotary_base rotary_percent rotary_seq_len_interpolation_factor
    use_rope_scaling rope_scaling_factor multi_latent_attention attention_dropout hidden_dropout
    num_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk moe_router_topk_scaling_factor
    moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
    moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_expert_capacity_factor
"""
TRAINING_KEPT = """
    bf16 fp16 optimizer use_distributed_optimizer clip_grad adam_beta1 adam_beta2 adam_eps seed
    task task_settings system_prompt advantage whiten_advantages
"""
"""The learning rate and the weight decay Megatron compares itself, with flags of its own about
them."""
FREE = ("max_tokens_per_microbatch", "oversized_samples", "ragged_microbatches", "rollout_files")
"""Settings of planning that change the order of sums alone; the files are compared by their
contents."""


def refuse_flags(args: Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise a NotImplementedError where a flag was given that this program does not read.

    `args` are as parsed, before anything has changed them.
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


def refuse_combinations(args: Namespace) -> None:
    """Raise a ValueError unless this program can run these arguments."""
    for name, value in vars(args).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in values):
            raise ValueError(f"{flag_of(name)} is {value}: give a finite number")
    if message := next(_problems(args), ""):
        raise ValueError(message)


def _problems(args: Namespace) -> Iterator[str]:
    if bool(args.rollout_files) == bool(args.task):
        yield "what to train on: give one of --rollout-files and --task"
    if args.task:
        yield from _problems_of_task(args)
    elif not args.docs_per_step:
        yield "--docs-per-step is missing: the documents (rollouts) of a step"
    if not args.vocab_size:
        yield "--vocab-size is missing: token ids are below it"
    if not args.train_iters:
        yield "--train-iters is missing: steps, at most"
    if args.save_hf and (not args.hf_model or Path(args.save_hf).exists()):
        needs = "it is written with the config and tokenizer of --hf-model, as a new folder"
        yield f"--save-hf {args.save_hf}: {needs}; give --hf-model, and a name that is free"
    if args.save and (args.save_interval or 0) < 1:
        yield (
            f"--save {args.save} with --save-interval {args.save_interval}: give the steps between "
            f"checkpoints"
        )
    if args.wandb_project:
        if not (args.save or args.wandb_save_dir):
            yield "--wandb-project needs a folder for its files: give --save or --wandb-save-dir"
        if importlib.util.find_spec("wandb") is None:
            yield (
                "--wandb-project: the package wandb is not installed; pip install wandb, or drop "
                "the flag"
            )
    if args.ckpt_format != "torch_dist":
        yield (
            f"--ckpt-format {args.ckpt_format}: checkpoints are read at any sharding; give "
            f"torch_dist"
        )
    if args.position_embedding_type not in POSITIONS:
        yield (
            f"--position-embedding-type {args.position_embedding_type}: give one of "
            f"{', '.join(POSITIONS)}"
        )
    if args.device == "cpu" and (args.attention_dropout or args.hidden_dropout):
        yield (
            "--attention-dropout and --hidden-dropout need CUDA's random state: give 0 with "
            "--device cpu"
        )
    if 0 < args.train_iters <= (args.lr_warmup_iters or 0):
        found = f"--lr-warmup-iters {args.lr_warmup_iters} is not below --train-iters"
        yield f"{found} {args.train_iters}: the learning rate would not get to --lr; give fewer"
    axes = [f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context")]
    if args.world_size % (ranks := math.prod(getattr(args, axis) for axis in axes)):
        flags = ", ".join(["--nproc-per-node of torchrun", *map(flag_of, axes)])
        yield (
            f"{args.world_size} processes cannot be split in groups of {ranks}: change one of "
            f"{flags}"
        )


def _problems_of_task(args: Namespace) -> Iterator[str]:
    """The sampler has the stages of the model that is trained, each rank one of them, a token at a
    time.
    """
    if not args.hf_model:
        yield "--task needs --hf-model: its tokenizer and chat template make the prompts"
    if args.docs_per_step is not None:
        yield "--docs-per-step with --task: give --prompts-per-step"
    for name, (least, _, _) in COUNTS.items():
        if (value := getattr(args, name)) < least:
            yield f"{flag_of(name)} is {value}: give {least} or more"
    given = vars(args) | {"expert_model_parallel_size": args.expert_model_parallel_size > 1}
    for name, reason in CANNOT_GENERATE.items():
        if given.get(name) not in (None, False):
            yield f"{flag_of(name)} with --task: {reason}; drop it"


def refuse_other_settings(args: Namespace, stored: Namespace) -> None:
    """Raise a ValueError unless the settings are those that are stored in the checkpoint."""
    kept = [*MODEL_KEPT.split(), *TRAINING_KEPT.split(), *COUNTS, *fields_of(PolicyLossConfig)]
    kept += [name for name in fields_of(PlanningConfig) if name not in FREE]
    for name in kept:
        then, now = getattr(stored, name, None), getattr(args, name, None)
        if then != now and hasattr(stored, name):
            raise ValueError(
                f"{args.load} was made with {name} {then!r} and this run has {now!r}: a run that "
                f"goes on repeats what "
                "the first would have done, so give the same, or begin anew with its weights "
                "(--finetune, and another "
                "--save)"
            )
    if (stored.expert_model_parallel_size > 1) != (args.expert_model_parallel_size > 1):
        raise ValueError(
            f"--expert-model-parallel-size was {stored.expert_model_parallel_size} in {args.load} "
            f"and is "
            f"{args.expert_model_parallel_size}: Megatron keeps one optimizer more where experts "
            f"are parallel"
        )
