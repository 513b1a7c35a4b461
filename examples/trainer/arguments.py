"""The command line: Megatron's flags, those of the policy loss and of planning, and a few of this
program; and what is refused before anything starts.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer import TransformerConfig
from megatron.training import arguments as megatron
from megatron.training.checkpointing import load_args_from_checkpoint

from megatron_pg.config import add_policy_loss_args, validate_policy_loss_args
from megatron_pg.config.command_line import ProgramParser, text_of_words
from megatron_pg.config.planning import PlanningConfig, add_planning_args, validate_planning_args
from megatron_pg.config.policy_loss import OPTIONAL_SAMPLE_FIELDS, PolicyLossConfig
from megatron_pg.config.settings import fields_of
from megatron_pg.config.values import flag_of, refuse
from megatron_pg.config.versions import has_hybrid_model
from megatron_pg.megatron.varying_log_probs import varying_settings
from megatron_pg.step.advantages import METHODS

FUSIONS = "masked_softmax bias_gelu bias_swiglu bias_dropout apply_rope moe_permute"
"""Kernels of Transformer Engine or Apex, or compiled by torch for a GPU."""
COUNTS = {
    "prompt_examples": (0, 0, "tasks with their answers before every question"),
    "prompts_per_step": (1, 16, "questions of a step of --task"),
    "samples_per_prompt": (1, 8, "answers to each"),
    "steps_per_round": (1, 1, "steps whose answers one policy gives; all but the first train on "
    "answers of an older one"),
    "max_response_tokens": (1, 128, "of an answer, at most"),
    "held_out_tasks": (0, 64, "scored before and after, never trained on"),
}  # fmt: skip
"""Flags of --task that take a number: the smallest, the default and the meaning."""
OWN = ("options", "settings in a file", "policy loss", "planning", "trainer")
"""Groups of flags that --help shows."""
REASONS = {
    "a step holds --docs-per-step rollouts, in micro-batches of --max-tokens-per-microbatch "
    "tokens; drop it": "micro_batch_size global_batch_size rampup_batch_size",
    "steps are counted here, not samples: give the flag of the same name that counts "
    "iterations": "train_samples lr_decay_samples lr_warmup_samples lr_wsd_decay_samples",
    "its buffers have one size and micro-batches differ in length; drop it": "cuda_graph_impl "
    "enable_cuda_graph external_cuda_graph optimizer_cuda_graph tp_comm_overlap",
    "samples come from --rollout-files or --task; drop it": "data_path train_data_path",
    "the layers come from --num-layers; drop it": "hybrid_layer_pattern hybrid_override_pattern "
    "spec mtp_num_layers heterogeneous_layers_config_path experimental_attention_variant",
    "the model is wrapped in DDP; use --use-distributed-optimizer": "use_megatron_fsdp "
    "use_torch_fsdp2",
    "every sample is split over all context-parallel ranks; drop it": "hybrid_context_parallel",
    "settings are flags here; use --config": "yaml_cfg",
}
"""Flags of Megatron that would train something else without a word, by the attribute that they
store to; and those of the group below."""
OTHER_LOOPS = ("rl", "sft", "Logits Distillation")
OF_GPT = """
    hf_model use_rope_scaling multi_latent_attention qk_l2_norm pipeline_model_parallel_layout
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
"""
"""Settings that a HybridModel does not have; mbridge knows GPTModel alone."""
CANNOT_GENERATE = """
    pipeline_model_parallel_size expert_model_parallel_size sequence_parallel replay_sampling_set
    replay_routing distinct_ids
"""
"""Settings that --task cannot be given: every tensor-parallel group generates by itself, a token at
a time, from the whole vocabulary."""
KEPT = "task task_settings system_prompt hf_model advantage whiten_advantages seed"
FREE = ("max_tokens_per_microbatch", "oversized_samples", "ragged_microbatches", "rollout_files")
"""What a run that goes on must share beside the policy loss and the numbers of `COUNTS`, and
settings of planning that it may change: the order of sums. Files are compared by contents."""


def parse_arguments() -> Namespace:
    """Parse the command line and validate it; the only place of this program that changes
    arguments.

    A ValueError or NotImplementedError names the flag and what to do.
    """
    parsers: list[_TrainerParser] = []
    before = ProgramParser(add_help=False, allow_abbrev=False)
    before.add_argument("--hf-model")
    before.add_config_args()
    folder = before.parse_known_args()[0].hf_model

    def add_trainer_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(_add_flags(parser))
        if folder is not None:
            from .hugging_face import megatron_arguments_of, read_config  # needs transformers

            parsers[0].presets = megatron_arguments_of(read_config(folder))
        return parser

    args: Namespace = megatron.parse_args(extra_args_provider=add_trainer_args)
    args.settings_file = text_of_words(parsers[0].words)
    _refuse_flags(args, parsers[0])
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args)
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
    # Packs differ in length from one micro-batch to the next; pipeline stages then tell each other
    # how long they are.
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    groups = [group for group in parsers[0]._action_groups if group.title in OWN]
    names = [action.dest for group in groups for action in group._group_actions]
    kept = {name: str(getattr(args, name, None)) for name in (*names, "seed", "lr", "save")}
    args.settings_of_run = json.dumps(kept, indent=2)  # report.py titles runs by it
    return args


def _add_flags(parser: Any) -> Any:
    parser.__class__ = _TrainerParser  # Megatron makes it, for this program alone
    parser.add_config_args()
    add_policy_loss_args(parser)
    add_planning_args(parser)
    add = parser.add_argument_group("trainer").add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: gloo; cuda: NCCL")
    told = "check the flags for WORLD_SIZE processes, print the plan, start nothing"
    add("--dry-run", action="store_true", help=told)
    told = "Hugging Face weights to begin with (docs/models.md); they say what the model is too"
    add("--hf-model", metavar="FOLDER", help=told)
    add("--save-hf", metavar="FOLDER", help="write the trained model there, as --hf-model was")
    told = "reference policy of the KL term, for rollouts without ref_log_probs, of either format"
    add("--ref-load", metavar="FOLDER", help=told)
    told = "train on this reasoning-gym task, with the model's answers"
    add("--task", metavar="NAME", help=told)
    add("--task-settings", metavar="JSON", type=json.loads, help="of the task's generator")
    add("--system-prompt", metavar="TEXT", help="before every question")
    for name, (_, default, told) in COUNTS.items():
        add(flag_of(name), type=int, default=default, help=told)
    told = "of the answers to held-out tasks; 0 takes the likeliest tokens"
    add("--held-out-temperature", type=float, default=0.0, help=told)
    told = "of rewards in their prompt group: docs/objectives.md#advantages"
    add("--advantage", choices=METHODS, default="grpo", help=told)
    told = "bring advantages to mean 0 and standard deviation 1 over the active tokens of the step"
    add("--whiten-advantages", action="store_true", help=told)
    add("--help-megatron", action=_MegatronHelp, nargs=0, help="Megatron's flags")
    # Checkpoints are read at any sharding, the distributed optimizer's part too.
    parser.set_defaults(dist_ckpt_optim_fully_reshardable=True)
    parser.set_defaults(log_interval=1, enable_one_logger=False)  # a step takes long
    for action in parser._actions:
        try:
            str(action.help) % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            # A bare % of Megatron-Core 0.19.2, with which --help ends in an error.
            action.help = str(action.help).replace("%", "%%")
    return parser


class _TrainerParser(ProgramParser):
    """Prints the flags of some groups and no usage, which Megatron's flags make 700 lines long."""

    shown: Sequence[str] = OWN

    def format_help(self) -> str:
        self.usage = argparse.SUPPRESS
        self.description = "torchrun --nproc-per-node N examples/train.py FLAGS (docs/trainer.md)"
        groups = [group for group in self._action_groups if group.title in self.shown]
        with mock.patch.object(self, "_action_groups", groups):
            return super().format_help()


class _MegatronHelp(argparse.Action):
    """Prints what --help leaves out, and ends."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.shown = [g.title for g in parser._action_groups if g.title not in OWN]
        parser.print_help()
        parser.exit()


def _settle(args: Namespace) -> None:
    """Set what is no choice here: one pack a micro-batch, and what the device or absent packages
    decide.
    """
    args.micro_batch_size = 1
    args.seq_length = args.seq_length or args.max_position_embeddings
    args.do_train, args.do_valid, args.do_test = True, False, False
    args.rerun_mode = "disabled"
    args.wandb_exp_name = args.wandb_exp_name or Path(args.save or "run").name  # it needs one
    if not args.group_query_attention:  # Megatron sets it so when it makes the model's config
        args.num_query_groups = args.num_attention_heads
    # Of Apex, or of a Transformer Engine that is new enough.
    args.gradient_accumulation_fusion = _is_installed("fused_weight_gradient_mlp_cuda")
    if args.moe_token_dispatcher_type == "allgather":
        # Packs differ in length from rank to rank and from one micro-batch to the next.
        args.moe_token_dispatcher_type = "alltoall"
    if args.device == "cpu":
        args.distributed_backend = "gloo"
        args.use_cpu_initialization = True
        # Megatron's random state is that of CUDA. Nothing here is random on a CPU but the initial
        # weights.
        args.no_save_rng = args.no_load_rng = True
    if args.device == "cpu" or not _is_installed("transformer_engine"):
        args.transformer_impl = "local"
        args.no_persist_layer_norm = True
        args.moe_grouped_gemm = False
        for fusion in FUSIONS.split():
            setattr(args, f"{fusion}_fusion", False)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _make_hybrid(args: Namespace) -> None:
    """Make the flags those of a HybridModel, which has attention and MLP as layers of their own,
    where Megatron has one.
    """
    # Of attention and MLP together.
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
        # Under model parallelism Megatron asks for a GPU's architecture. A dry run without a GPU
        # takes it for Hopper's.
        architecture = functools.partial(int, 10 if args.device == "cpu" else 9)
    silent = contextlib.redirect_stdout(io.StringIO())  # it prints every argument, 600 lines
    with silent, mock.patch.object(megatron, "get_device_arch_version", architecture):
        try:
            megatron.validate_args(args)
        except AssertionError as error:
            condition = traceback.extract_tb(error.__traceback__)[-1].line
            raise ValueError(f"Megatron refuses these flags: {str(error) or condition}") from error


def _refuse_flags(args: Namespace, parser: Any) -> None:
    """Raise a NotImplementedError where a flag was given that would train something else without
    a word.

    `args` are as parsed, before anything has changed them.
    """
    reasons = {name: reason for reason, names in REASONS.items() for name in names.split()}
    for group in parser._action_groups:
        if group.title in OTHER_LOOPS:
            told = "it is not read; see 'policy loss', 'planning' and 'trainer' of --help"
            reasons |= {action.dest: told for action in group._group_actions}
    flags = {action.dest: action.option_strings for action in parser._actions}
    for name, reason in reasons.items():
        if getattr(args, name, None) != parser.get_default(name):
            raise NotImplementedError(f"{max(flags.get(name) or [name], key=len)}: {reason}")
    given = {word.partition("=")[0] for word in parser.words}
    if twice := given & {word for word in parser.presets if word.startswith("--")}:
        raise ValueError(f"{min(twice)} beside --hf-model: its config.json says it; drop the flag")


def _problems(args: Namespace) -> Iterator[str]:
    if bool(args.rollout_files) == bool(args.task):
        yield "what to train on: give one of --rollout-files and --task"
    if args.task:
        yield from _problems_of_task(args)
    elif not args.docs_per_step:
        yield "--docs-per-step is missing: the documents (rollouts) of a step"
    for name, meaning in (("vocab_size", "token ids are below it"), ("train_iters", "steps")):
        if not getattr(args, name):
            yield f"{flag_of(name)} is missing: {meaning}"
    if args.save_hf and (not args.hf_model or Path(args.save_hf).exists()):
        needs = "it is written with the config and tokenizer of --hf-model, as a new folder"
        yield f"--save-hf {args.save_hf}: {needs}; give --hf-model, and a name that is free"
    if args.save and (args.save_interval or 0) < 1:
        found = f"--save {args.save} with --save-interval {args.save_interval}"
        yield f"{found}: give the steps between checkpoints"
    if args.ckpt_format != "torch_dist":
        yield f"--ckpt-format {args.ckpt_format}: give torch_dist, which any sharding reads"
    if args.position_embedding_type not in ("learned_absolute", "rope", "none"):
        yield f"--position-embedding-type {args.position_embedding_type} is not built here"
    if args.device == "cpu" and (args.attention_dropout or args.hidden_dropout):
        yield (
            "--attention-dropout and --hidden-dropout need CUDA's random state: give 0 with "
            "--device cpu"
        )


def _problems_of_task(args: Namespace) -> Iterator[str]:
    if args.docs_per_step is not None:
        yield "--docs-per-step with --task: give --prompts-per-step"
    for name, (least, _, _) in COUNTS.items():
        if (value := getattr(args, name)) < least:
            yield f"{flag_of(name)} is {value}: give {least} or more"
    for name in CANNOT_GENERATE.split():
        if getattr(args, name, None) not in (None, False, 1):
            yield f"{flag_of(name)} with --task: the model itself generates; drop it"


def refuse_other_settings(args: Namespace, stored: Namespace) -> None:
    """Raise a ValueError unless the settings are those that are stored in the checkpoint.

    Megatron compares the model's and the schedule's.
    """
    kept = [*KEPT.split(), *COUNTS, *fields_of(PolicyLossConfig)]
    kept += [name for name in fields_of(PlanningConfig) if name not in FREE]
    for name in kept:
        then, now = getattr(stored, name, None), getattr(args, name, None)
        if then != now and hasattr(stored, name):
            raise ValueError(
                f"{args.load} was made with {name} {then!r} and this run has {now!r}: a run that "
                f"goes on repeats what the first would have done, so give the same, or begin anew "
                f"with its weights (--finetune, and another --save)"
            )
