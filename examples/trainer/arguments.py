"""The command line: the flags of Megatron, policy loss, planning and this program, and the checks
before anything starts.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import traceback
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer import TransformerConfig
from megatron.training import arguments as megatron

from megatron_pg.config import add_policy_loss_args, validate_policy_loss_args
from megatron_pg.config.command_line import ProgramParser, text_of_words
from megatron_pg.config.planning import PlanningConfig, add_planning_args, validate_planning_args
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.settings import fields_of
from megatron_pg.config.tables import OPTIONAL_SAMPLE_FIELDS
from megatron_pg.config.values import flag_of, refuse
from megatron_pg.config.versions import has_hybrid_model
from megatron_pg.megatron.varying_log_probs import varying_settings
from megatron_pg.step.advantages import METHODS

HAVE_ENGINE = find_spec("transformer_engine") is not None
FUSIONS = "masked_softmax bias_gelu bias_swiglu bias_dropout apply_rope moe_permute"
"""Kernels of Transformer Engine or Apex, or compiled by torch for a GPU."""
WORDS = {
    "hf_model": "folder of initial Hugging Face weights, whose config defines the model",
    "save_hf": "folder for the trained model, in the format of --hf-model",
    "ref_load": "reference policy of the KL term, a Megatron checkpoint or Hugging Face folder",
    "task": "train on this reasoning-gym task with the model's responses",
    "system_prompt": "system prompt of every question",
}
COUNTS = {
    "prompt_examples": (0, 0, "solved tasks before every question"),
    "prompts_per_step": (1, 16, "questions per step of --task"),
    "samples_per_prompt": (1, 8, "responses per question"),
    "steps_per_round": (1, 1, "steps with responses sampled in advance by one policy"),
    "max_response_tokens": (1, 128, "largest response length"),
    "held_out_tasks": (1, 64, "tasks scored before and after, never trained on"),
}
"""Flags of this program with a word, and flags with a number: smallest value, default and
meaning."""
IGNORED = {
    "a step holds --docs-per-step rollouts, in micro-batches of --max-tokens-per-microbatch "
    "tokens": "micro_batch_size global_batch_size rampup_batch_size",
    "steps are counted here, not samples": "train_samples lr_decay_samples lr_warmup_samples",
    "micro-batches differ in length": "cuda_graph_impl enable_cuda_graph tp_comm_overlap",
    "samples come from --rollout-files or --task": "data_path train_data_path",
    "layers come from --num-layers": "hybrid_layer_pattern hybrid_override_pattern spec "
    "mtp_num_layers heterogeneous_layers_config_path experimental_attention_variant",
    "the model is wrapped in DDP": "use_megatron_fsdp use_torch_fsdp2",
    "every sample is split over all context-parallel ranks": "hybrid_context_parallel",
    "settings are flags here": "yaml_cfg use_checkpoint_args",
}
"""Megatron's flags that would silently train something else, by attribute. The flag groups below
too."""
OTHER_LOOPS = ("rl", "sft", "Logits Distillation")
OF_GPT = """
    hf_model use_rope_scaling multi_latent_attention qk_l2_norm pipeline_model_parallel_layout
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
"""
"""Settings that a HybridModel does not have. mbridge supports only GPTModel."""
CANNOT_GENERATE = """
    pipeline_model_parallel_size expert_model_parallel_size sequence_parallel replay_sampling_set
    replay_routing distinct_ids docs_per_step
"""
"""Settings that --task excludes, because every tensor-parallel group generates separately, token by
token, from the whole vocabulary."""
KEPT = "task task_settings system_prompt hf_model advantage whiten_advantages seed"
FREE = ("max_tokens_per_microbatch", "oversized_samples", "ragged_microbatches", "rollout_files")
"""Settings that a resumed run must keep in addition to the policy loss and `COUNTS`, and planning
settings that it may change, because they affect only the order of sums. Files are compared by
contents."""


def parse_arguments() -> Namespace:
    """Parse and validate the command line. No other function of this program changes arguments.

    Raises ValueError or NotImplementedError with the flag and a remedy.
    """
    # Before Blackwell, Megatron requires 1 under tensor and context parallelism.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    parsers: list[Any] = []
    before = ProgramParser(add_help=False, allow_abbrev=False)
    before.add_argument("--hf-model")
    before.add_config_args()
    folder = before.parse_known_args()[0].hf_model

    def add_trainer_args(parser: Any) -> Any:
        parsers.append(_add_flags(parser))
        if folder is not None:
            from .hugging_face import megatron_arguments_of, read_config  # needs transformers

            parser.presets = megatron_arguments_of(read_config(folder))
        return parser

    args: Namespace = megatron.parse_args(extra_args_provider=add_trainer_args)
    (parser,) = parsers
    _refuse_flags(args, parser)
    _settle(args)
    if message := next(_problems(args), ""):
        raise ValueError(message)
    validate_planning_args(args)
    validate_policy_loss_args(args, sample_fields=OPTIONAL_SAMPLE_FIELDS)
    _make_hybrid(args)
    _validate_as_megatron_does(args)
    if not args.allow_varying_log_probs:
        fields = TransformerConfig.__dataclass_fields__.keys() & vars(args).keys()
        settings = {name: getattr(args, name) for name in fields}
        refuse(varying_settings({**settings, "num_moe_experts": args.num_experts}))
    # Packs differ in length between micro-batches, so pipeline stages exchange the lengths.
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    args.settings_file = text_of_words(parser.words)
    return args


def _add_flags(parser: Any) -> Any:
    """Add this program's flags after Megatron's, where --help ends."""
    parser.__class__ = ProgramParser  # Megatron made it for only this program
    parser.usage = argparse.SUPPRESS  # Megatron's flags make it 700 lines long
    parser.add_config_args()
    add_policy_loss_args(parser)
    add_planning_args(parser)
    add = parser.add_argument_group("trainer").add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: gloo; cuda: NCCL")
    told = "check the flags for WORLD_SIZE processes and print the plan, without a run"
    add("--dry-run", action="store_true", help=told)
    for name, told in WORDS.items():
        add(flag_of(name), help=told)
    for name, (_, default, told) in COUNTS.items():
        add(flag_of(name), type=int, default=default, help=told)
    add("--task-settings", metavar="JSON", type=json.loads, help="settings of the task's generator")
    told = "temperature of responses to held-out tasks. 0: likeliest tokens"
    add("--held-out-temperature", type=float, default=0.0, help=told)
    told = "advantages of rewards in their prompt group: docs/objectives.md#advantages"
    add("--advantage", choices=METHODS, default="grpo", help=told)
    told = "normalize advantages to mean 0 and standard deviation 1 over the step's active tokens"
    add("--whiten-advantages", action="store_true", help=told)
    # Checkpoints can be loaded at any sharding, including the distributed optimizer.
    parser.set_defaults(dist_ckpt_optim_fully_reshardable=True)
    parser.set_defaults(log_interval=1, enable_one_logger=False)  # a step takes long
    for action in parser._actions:
        try:
            str(action.help) % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            # A bare % in Megatron-Core 0.19.2 breaks --help.
            action.help = str(action.help).replace("%", "%%")
    return parser


def _refuse_flags(args: Namespace, parser: Any) -> None:
    """Raise an error for a flag that would silently train something else.

    `args` are unchanged since parsing.
    """
    reasons = {name: reason for reason, names in IGNORED.items() for name in names.split()}
    for group in parser._action_groups:
        if group.title in OTHER_LOOPS:
            reasons |= {
                action.dest: "only Megatron's own loops read it" for action in group._group_actions
            }
    flags = {action.dest: action.option_strings for action in parser._actions}
    for name, reason in reasons.items():
        if getattr(args, name, None) != parser.get_default(name):
            raise NotImplementedError(
                f"{max(flags.get(name) or [name], key=len)}: {reason}. Remove it"
            )
    given = {word.partition("=")[0] for word in parser.words}
    if twice := given & {word for word in parser.presets if word.startswith("--")}:
        raise ValueError(
            f"{min(twice)} and --hf-model are mutually exclusive: its config.json has this setting"
        )


def _settle(args: Namespace) -> None:
    """Set the arguments that are fixed here (one pack per micro-batch) or follow from the device or
    missing packages.
    """
    args.micro_batch_size = 1
    args.seq_length = args.seq_length or args.max_position_embeddings
    args.do_train, args.do_valid, args.do_test = True, False, False
    args.rerun_mode = "disabled"
    args.wandb_exp_name = args.wandb_exp_name or Path(args.save or "run").name  # it needs one
    if not args.group_query_attention:  # as in Megatron's model config
        args.num_query_groups = args.num_attention_heads
    # Apex, or a recent Transformer Engine.
    args.gradient_accumulation_fusion = find_spec("fused_weight_gradient_mlp_cuda") is not None
    if args.moe_token_dispatcher_type == "allgather":
        # Packs differ in length between ranks and micro-batches.
        args.moe_token_dispatcher_type = "alltoall"
    if args.device == "cpu":
        args.distributed_backend = "gloo"
        args.use_cpu_initialization = True
        # Megatron's random state is CUDA's. On a CPU, only the initial weights are random.
        args.no_save_rng = args.no_load_rng = True
    if args.device == "cpu" or not HAVE_ENGINE:
        args.transformer_impl = "local"
        args.no_persist_layer_norm = True
        args.moe_grouped_gemm = False
        for fusion in FUSIONS.split():
            setattr(args, f"{fusion}_fusion", False)


def _problems(args: Namespace) -> Iterator[str]:
    if bool(args.rollout_files) == bool(args.task):
        yield "give either --rollout-files or --task"
    needed = {"vocab_size": "above every token id", "train_iters": "the largest number of steps"}
    if not args.task:
        needed["docs_per_step"] = "the number of rollouts per step"
    for name, meaning in needed.items():
        if not getattr(args, name):
            yield f"add {flag_of(name)}, {meaning}"
    for name, (least, _, _) in COUNTS.items():
        if (value := getattr(args, name)) < least:
            yield f"{flag_of(name)} is {value}: give {least} or more"
    for name in CANNOT_GENERATE.split() if args.task else ():
        if (value := getattr(args, name, None)) is True or value not in (None, False, 1):
            yield f"{flag_of(name)} and --task are mutually exclusive: the trained model generates"
    if args.save_hf and not args.hf_model:
        yield f"--save-hf {args.save_hf} requires --hf-model"
    if args.save_hf and Path(args.save_hf).exists():
        yield f"--save-hf {args.save_hf} exists: remove it, or give a different folder"
    if args.save and (args.save_interval or 0) < 1:
        yield f"--save {args.save} requires --save-interval, the steps between checkpoints"
    if args.ckpt_format != "torch_dist":
        yield f"--ckpt-format is {args.ckpt_format}: use torch_dist, which fits any sharding"
    if args.position_embedding_type not in ("learned_absolute", "rope", "none"):
        yield f"--position-embedding-type {args.position_embedding_type} is not supported: use rope"
    if args.device == "cpu" and (args.attention_dropout or args.hidden_dropout):
        yield "--device cpu requires --attention-dropout 0 and --hidden-dropout 0"


def _make_hybrid(args: Namespace) -> None:
    """Convert the flags to a HybridModel's, which has separate attention and MLP layers, if
    Megatron has one.
    """
    args.transformer_layers = layers = args.num_layers
    stages = args.pipeline_model_parallel_size
    is_known = has_hybrid_model() and "hybrid_layer_pattern" in vars(args)
    if not (layers and is_known) or any(getattr(args, name, None) for name in OF_GPT.split()):
        return
    chunks = stages * (args.num_virtual_stages_per_pipeline_rank or 1)
    size = args.num_layers_per_virtual_pipeline_stage or layers // chunks
    if not size or layers % (size * stages):
        raise ValueError(f"--num-layers {layers} cannot be split evenly over the pipeline's stages")
    if not isinstance(frequency := args.moe_layer_freq, list):
        frequency = [layer % frequency == 0 for layer in range(layers)]
    kinds = ["*E" if args.num_experts and has_experts else "*-" for has_experts in frequency]
    parts = ("".join(kinds[first : first + size]) for first in range(0, layers, size))
    args.hybrid_layer_pattern, args.moe_layer_freq = "|".join(parts), 1
    args.num_layers = args.num_layers_per_virtual_pipeline_stage = None
    args.num_virtual_stages_per_pipeline_rank = None


def _validate_as_megatron_does(args: Namespace) -> None:
    architecture = megatron.get_device_arch_version
    if args.device == "cpu" or not torch.cuda.is_available():
        # Under model parallelism, Megatron reads the GPU's architecture. A dry run without a GPU
        # assumes Hopper.
        architecture = functools.partial(int, 10 if args.device == "cpu" else 9)
    silent = contextlib.redirect_stdout(io.StringIO())  # it would print 600 lines of arguments
    with silent, mock.patch.object(megatron, "get_device_arch_version", architecture):
        try:
            megatron.validate_args(args)
            megatron.core_transformer_config_from_args(args)  # refuses what the model would
        except (AssertionError, ValueError) as error:
            condition = traceback.extract_tb(error.__traceback__)[-1].line
            raise ValueError(f"Megatron refuses these flags: {str(error) or condition}") from error


def refuse_other_settings(args: Namespace, stored: Namespace) -> None:
    """Raise ValueError unless the settings equal the checkpoint's.

    Megatron compares model and schedule.
    """
    kept = [*KEPT.split(), *COUNTS, *fields_of(PolicyLossConfig)]
    kept += [name for name in fields_of(PlanningConfig) if name not in FREE]
    for name in kept:
        then, now = getattr(stored, name, None), getattr(args, name, None)
        if then != now and hasattr(stored, name):
            found = f"{args.load} was saved with {name} {then!r}, but this run has {now!r}"
            raise ValueError(
                f"{found}: give the same, or start a new run (--finetune and a new --save)"
            )
