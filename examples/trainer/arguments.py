"""The command line: Megatron's flags, those of the policy loss and of planning, and a few of this
program.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import traceback
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer import TransformerConfig
from megatron.training import arguments as megatron
from megatron.training.checkpointing import load_args_from_checkpoint

from megatron_pg.config import add_policy_loss_args, validate_policy_loss_args
from megatron_pg.config.command_line import ProgramParser, text_of_words
from megatron_pg.config.planning import add_planning_args, validate_planning_args
from megatron_pg.config.tables import OPTIONAL_SAMPLE_FIELDS
from megatron_pg.config.values import flag_of, refuse
from megatron_pg.megatron.varying_log_probs import varying_settings
from megatron_pg.step.advantages import METHODS

from .hugging_face_config import megatron_arguments_of, read_config
from .refusals import COUNTS, FLAGS, GROUPS, refuse_combinations, refuse_flags

FUSIONS = """
    masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion
    moe_permute_fusion
"""
"""Kernels of Transformer Engine or Apex, or compiled by torch for a GPU."""
TEXTS = {
    "--hf-model FOLDER": "Hugging Face weights to begin with (docs/models.md); they say what the "
    "model is too",
    "--save-hf FOLDER": "write the trained model there, as --hf-model was",
    "--ref-load FOLDER": "reference policy of the KL term, for rollouts without ref_log_probs, of "
    "either format",
    "--task NAME": "train on this reasoning-gym task, with the model's answers",
    "--task-settings JSON": "of the task's generator",
    "--system-prompt TEXT": "before every question",
}
"""Flags of this program that take words, and their meaning."""
OWN = ("options", "settings in a file", "policy loss", "planning", "trainer")
"""Groups of flags that --help shows."""


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
            parsers[0].presets = megatron_arguments_of(read_config(folder))
        return parser

    args: Namespace = megatron.parse_args(extra_args_provider=add_trainer_args)
    args.settings_file = text_of_words(parsers[0].words)
    refuse_flags(args, parsers[0])
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args)
    _settle(args)
    refuse_combinations(args)
    validate_planning_args(args)
    validate_policy_loss_args(args, sample_fields=OPTIONAL_SAMPLE_FIELDS)
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
    args.settings_of_run = _settings_of_run(args, parsers[0])
    return args


def _settings_of_run(args: Namespace, parser: Any) -> str:
    """Write this program's flags and the given ones of Megatron as JSON; report.py titles runs
    by it.
    """
    own = [a for group in parser._action_groups if group.title in OWN for a in group._group_actions]
    given = (parser._option_string_actions.get(word.partition("=")[0]) for word in parser.words)
    names = dict.fromkeys(action.dest for action in (*own, *filter(None, given)))
    values = {name: str(value) for name, value in vars(args).items() if name in names}
    return json.dumps(values | {"seed": str(args.seed)}, indent=2)


def _add_flags(parser: Any) -> Any:
    parser.__class__ = _TrainerParser  # Megatron makes it, for this program alone
    parser.add_config_args()
    add_policy_loss_args(parser)
    add_planning_args(parser)
    add = parser.add_argument_group("trainer").add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: gloo; cuda: NCCL")
    told = (
        "check the flags for WORLD_SIZE processes, print the plan and a memory estimate, start "
        "nothing"
    )
    add("--dry-run", action="store_true", help=told)
    for usage, told in TEXTS.items():
        flag, metavar = usage.split()
        add(flag, metavar=metavar, type=json.loads if metavar == "JSON" else str, help=told)
    for name, (_, default, told) in COUNTS.items():
        add(flag_of(name), type=int, default=default, help=told)
    told = (
        "of rewards in their prompt group, grpo: (reward - mean) / std, dr_grpo: reward - mean, "
        "rloo: reward - mean of the others, "
        "maxrl: (reward - mean) / mean; step_rloo: reward - mean of the step's others; reward: as "
        "it is"
    )
    add("--advantage", choices=METHODS, default="grpo", help=told)
    told = "bring advantages to mean 0 and standard deviation 1 over the active tokens of the step"
    add("--whiten-advantages", action="store_true", help=told)
    told = "Megatron's flags: the model, parallelism, optimizer, checkpoints, logs"
    add("--help-megatron", action=_MegatronHelp, nargs=0, help=told)
    # Checkpoints are read at any sharding, the distributed optimizer's part too.
    parser.set_defaults(dist_ckpt_optim_fully_reshardable=True)
    parser.set_defaults(log_interval=1, enable_one_logger=False)  # a step takes long
    for action in parser._actions:
        try:
            str(action.help) % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            # A bare % of Megatron-Core 0.19.2, with which --help ends in an error.
            action.help = str(action.help).replace("%", "%%")
        if action.dest in FLAGS:
            action.help = argparse.SUPPRESS
    return parser


class _TrainerParser(ProgramParser):
    """Prints the flags of some groups and no usage, which Megatron's flags make 700 lines long."""

    shown: Sequence[str] = OWN

    def format_help(self) -> str:
        self.usage = argparse.SUPPRESS
        self.description = "torchrun --nproc-per-node N examples/trainer FLAGS (docs/trainer.md)"
        groups = [group for group in self._action_groups if group.title in self.shown]
        with mock.patch.object(self, "_action_groups", groups):
            return super().format_help()


class _MegatronHelp(argparse.Action):
    """Prints what --help leaves out, and ends."""

    def __call__(self, parser: Any, *_: Any) -> None:
        titles = [group.title for group in parser._action_groups]
        parser.shown = [title for title in titles if title not in (*OWN, *GROUPS)]
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
    # Megatron asks for a name.
    args.wandb_exp_name = (
        args.wandb_exp_name or Path(args.save or args.wandb_save_dir or "run").name
    )
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
            setattr(args, fusion, False)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


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
