"""Megatron's initialization (global variables, process groups, random state) and the model, on GPUs
or a CPU.
"""

import ctypes
import functools
import logging
import os
import signal
import sys
from argparse import Namespace
from typing import Any
from unittest import mock

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
from megatron.core.transformer import TransformerConfig
from megatron.training import get_args, initialize
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.global_vars import set_global_variables

from megatron_pg.config.versions import needs_kept_pipeline_outputs
from megatron_pg.megatron import enable_cpu_runtime, hybrid_stack_spec, torch_block_spec

TALKATIVE = ("rerun_state_machine", "dist_checkpointing.strategies.torch")
"""Modules of Megatron-Core that warn about settings that no user chose."""


class StepMicrobatches(ConstantNumMicroBatchesCalculator):  # type: ignore[misc]
    """The number of micro-batches of each step's plan, instead of a constant number."""

    def __init__(self, data_parallel_size: int) -> None:
        self._data_parallel_size = data_parallel_size
        self.plan(1)

    def plan(self, number: int) -> None:
        """Set this rank's number for the starting step."""
        size = self._data_parallel_size
        super().__init__(number * size, 1, size, decrease_batch_size_if_needed=False, rank=0)

    def update(self, *_: object, **__: object) -> None:
        """Reset the number, because Megatron's loop checks between steps whether it changed."""
        self.plan(1)


def start_megatron(args: Namespace) -> StepMicrobatches:
    """Initialize Megatron without the model. Every rank must call it."""
    _die_with_launcher()
    # One line per parameter and setting would hide the progress.
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    for name in TALKATIVE:
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    is_on_cpu = args.device == "cpu"
    if is_on_cpu:
        enable_cpu_runtime()
    set_global_variables(args, build_tokenizer=False)
    microbatches = StepMicrobatches(args.data_parallel_size)
    num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = microbatches
    # Count the learning rate in steps: Megatron multiplies iterations by this size.
    args.global_batch_size = 1
    # It initializes model parallelism only if it counts a GPU.
    count = (lambda: 1) if is_on_cpu else torch.cuda.device_count
    with (
        # It would compile the index of Megatron's data sets with a C++ compiler.
        mock.patch.object(initialize, "_compile_dependencies", lambda: None),
        mock.patch.object(torch.cuda, "device_count", count),
    ):
        initialize.initialize_megatron(allow_no_cuda=is_on_cpu)
    return microbatches


def _die_with_launcher() -> None:
    """Let Linux kill this process when torchrun is killed, which would otherwise leave its workers
    running.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig, prctl = 1, ctypes.CDLL(None).prctl
        die_with_parent = functools.partial(prctl, pr_set_pdeathsig, signal.SIGKILL)
        die_with_parent()
        os.register_at_fork(after_in_child=die_with_parent)


def provide_model(
    config: TransformerConfig | None = None, vp_stage: int | None = None, **place: Any
) -> Any:
    """Build one chunk of a pipeline stage: a HybridModel if there is a pattern, else a GPTModel."""
    args = get_args()
    if config is None:
        config = core_transformer_config_from_args(args)
    if config.virtual_pipeline_model_parallel_size is not None and needs_kept_pipeline_outputs():
        config.deallocate_pipeline_outputs = False
    same_name = "fp16_lm_cross_entropy position_embedding_type rotary_percent rotary_base".split()
    settings = {name: getattr(args, name) for name in same_name} | {
        "config": config,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
        "vp_stage": vp_stage,
        **place,
    }
    has_engine = args.transformer_impl == "transformer_engine"
    if pattern := getattr(args, "hybrid_layer_pattern", None):
        from megatron.core.models.hybrid.hybrid_model import HybridModel  # old versions lack it

        layers = hybrid_stack_spec(config, use_transformer_engine=has_engine)
        return HybridModel(hybrid_stack_spec=layers, hybrid_layer_pattern=pattern, **settings)
    if has_engine:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, qk_l2_norm=args.qk_l2_norm, vp_stage=vp_stage
        )
    else:
        spec = torch_block_spec(config, vp_stage)
    return GPTModel(
        transformer_layer_spec=spec,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        **settings,
    )
