"""What to check: the flags of `megatron-pg check`, under Megatron's names, and the objective of its steps."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_pg.config.custom import (
    POLICY_LOSS_PARAMETERS,
    REDUCER_KEYWORDS,
    REDUCER_PARAMETERS,
    load_function,
)
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.versions import supports_output_processor

VOCAB_SIZE = 16
DIVISOR = 24.0
KL_COEFFICIENT, ENTROPY_COEFFICIENT = 0.1, 0.05
CUSTOM = "custom"
"""In the place of an aggregation: the user's own reducer, per-token loss or both."""

PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


@dataclass(frozen=True)
class CheckOptions:
    """How the small model is cut and run; what is left of the world is data parallel."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    num_layers: int | None = None
    """default: 2, or the pipeline's number of chunks where that is more"""
    num_experts: int | None = None
    """check a mixture of experts"""
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    average_in_collective: bool = False
    """DDP's; per-token rows are left out, which Megatron excludes with it"""
    fused_lm_head: bool = False
    """the end-to-end rows through the fused output layer; needs megatron-core 0.18"""
    custom_pg_loss_reducer_function_path: str | None = None
    """also rows of your own reducer"""
    custom_policy_loss_path: str | None = None
    """the same rows with your own per-token loss"""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """default: bf16 on cuda, else fp32"""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """default: transformer_engine where it is installed, on cuda"""

    @property
    def has_custom_functions(self) -> bool:
        """Whether there are rows of the user's own functions."""
        return bool(self.custom_pg_loss_reducer_function_path or self.custom_policy_loss_path)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the parameters and activations of the end-to-end rows."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def parallel_sizes(self) -> dict[str, int | None]:
        """The sizes by Megatron's names: its process groups' arguments, and fields of its configuration."""
        return {name: getattr(self, name) for name in PARALLEL_SIZES}

    @property
    def model_parallel_size(self) -> int:
        """Processes of one copy of the model; what is left of the world is data parallel."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def num_chunks(self) -> int:
        """Model chunks of one rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def num_pipeline_chunks(self) -> int:
        """Model chunks of the whole pipeline."""
        return self.pipeline_model_parallel_size * self.num_chunks

    @property
    def vocab_size(self) -> int:
        """The samples' ids, and as many columns more as give every tensor-parallel rank the same number."""
        size = self.tensor_model_parallel_size
        return -(-VOCAB_SIZE // size) * size

    @property
    def pad_to_multiple(self) -> int:
        """What the packed length must divide by: sequence parallelism splits a rank's tokens over TP."""
        if not self.sequence_parallel:
            return 1
        return self.context_parallel_size * self.tensor_model_parallel_size

    def num_microbatches(self, data_rank: int) -> int:
        """The M of a data-parallel rank, whose last one is empty: five or six by turns."""
        # Ranks of one expert-parallel group exchange tokens in every micro-batch: as many on each.
        count = 5 + (data_rank % 2 if self.expert_model_parallel_size == 1 else 0)
        # Interleaved pipelines ask for multiples.
        multiple = self.pipeline_model_parallel_size if self.num_chunks > 1 else 1
        return -(-count // multiple) * multiple


UNSHARDED = CheckOptions().parallel_sizes
"""The sizes of a model that is whole on every rank."""


def config_of(aggregation: str, options: CheckOptions) -> PolicyLossConfig:
    """PPO with a KL and an entropy term, whose outer counts differ from the policy-gradient term's."""
    if aggregation == CUSTOM:
        return PolicyLossConfig(
            custom_pg_loss_reducer_function_path=options.custom_pg_loss_reducer_function_path,
            custom_policy_loss_path=options.custom_policy_loss_path,
            pg_metrics="none",
            kl_loss_coef=KL_COEFFICIENT,
            entropy_coef=ENTROPY_COEFFICIENT,
        )
    return PolicyLossConfig(
        loss_aggregation=aggregation,  # type: ignore[arg-type]
        loss_aggregation_divisor=DIVISOR if aggregation == "constant" else None,
        kl_loss_coef=KL_COEFFICIENT,
        entropy_coef=ENTROPY_COEFFICIENT,
    )


def parse_options(arguments: Sequence[str]) -> tuple[CheckOptions, bool]:
    """The options, and whether the report is to be JSON.

    Raises:
        SystemExit: of argparse, for unknown flags and --help.
        ValueError: flags that do not go together, or that this machine cannot serve.
    """
    args = vars(_parser().parse_args(list(arguments)))
    as_json = bool(args.pop("json"))
    args["dtype"] = args["dtype"] or ("bf16" if args["device"] == "cuda" else "fp32")
    if args["transformer_impl"] is None:
        use_te = args["device"] == "cuda" and args["dtype"] == "bf16" and has_transformer_engine()
        args["transformer_impl"] = "transformer_engine" if use_te else "local"
    options = CheckOptions(**args)
    _check(options)
    return options, as_json


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-pg check",
        allow_abbrev=False,
        description=(
            "Runs one training step of a tiny model on the real process groups for every aggregation and both of "
            "Megatron's loss modes, and compares every gradient with an unsharded reference computed in the same job. "
            "Start it as the training is started, for example: torchrun --nproc-per-node 8 -m megatron_pg check "
            "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2"
        ),
    )
    add = parser.add_argument
    add("--tensor-model-parallel-size", type=int, default=1, metavar="TP")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="PP")
    add("--virtual-pipeline-model-parallel-size", type=int, default=None, metavar="VPP")
    add("--context-parallel-size", type=int, default=1, metavar="CP")
    add("--expert-model-parallel-size", type=int, default=1, metavar="EP")
    add(
        "--num-layers",
        type=int,
        default=None,
        metavar="L",
        help="default: 2, or the pipeline's number of chunks where that is more",
    )
    add("--num-experts", type=int, default=None, help="check a mixture of experts")
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add(
        "--average-in-collective",
        action="store_true",
        help="DDP's; per-token rows are left out, which Megatron excludes with it",
    )
    add(
        "--fused-lm-head",
        action="store_true",
        help="the end-to-end rows through the fused output layer; needs megatron-core 0.18",
    )
    add(
        "--custom-pg-loss-reducer-function-path",
        metavar="PKG.MOD:FN",
        help="also rows of your own reducer",
    )
    add(
        "--custom-policy-loss-path",
        metavar="PKG.MOD:FN",
        help="the same rows with your own per-token loss",
    )
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=["fp32", "bf16"], default=None, help="default: bf16 on cuda, else fp32")
    add(
        "--transformer-impl",
        choices=["local", "transformer_engine"],
        default=None,
        help="default: transformer_engine where it is installed, on cuda",
    )
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be imported, its libraries included."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def check_world_size(options: CheckOptions, world_size: int) -> None:
    """Refuses a number of processes that the sizes do not divide.

    Raises:
        ValueError: naming the flags.
    """
    size = options.model_parallel_size
    if world_size % size:
        raise ValueError(
            f"{world_size} processes were started, and --tensor-model-parallel-size * --pipeline-model-parallel-size * "
            f"--context-parallel-size = {size} must divide them: torchrun --nproc-per-node {size} -m megatron_pg check ..."
        )
    expert_size = options.expert_model_parallel_size * options.pipeline_model_parallel_size
    if world_size % expert_size:
        raise ValueError(
            f"{world_size} processes were started, and --expert-model-parallel-size * --pipeline-model-parallel-size = "
            f"{expert_size} must divide them"
        )


def _check(options: CheckOptions) -> None:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, int) and value < 1 and not isinstance(value, bool):
            raise ValueError(f"--{field.name.replace('_', '-')} is {value}: expected 1 or more")
    _check_hardware(options)
    _check_experts(options)
    if path := options.custom_pg_loss_reducer_function_path:
        load_function(
            path,
            flag="--custom-pg-loss-reducer-function-path",
            positional=REDUCER_PARAMETERS,
            keywords=REDUCER_KEYWORDS,
        )
    if path := options.custom_policy_loss_path:
        load_function(path, flag="--custom-policy-loss-path", positional=POLICY_LOSS_PARAMETERS)
    if options.fused_lm_head and not supports_output_processor():
        raise ValueError("--fused-lm-head needs megatron-core 0.18 or later; drop it")
    chunks = options.pipeline_model_parallel_size * options.num_chunks
    if options.num_layers is not None and options.num_layers % chunks:
        raise ValueError(
            f"--num-layers {options.num_layers} with {chunks} pipeline chunks: give a multiple of that number"
        )
    if options.sequence_parallel and options.tensor_model_parallel_size == 1:
        raise ValueError("--sequence-parallel needs --tensor-model-parallel-size above 1")
    stages = options.virtual_pipeline_model_parallel_size
    if stages is not None and (stages == 1 or options.pipeline_model_parallel_size == 1):
        raise ValueError(
            f"--virtual-pipeline-model-parallel-size {stages} with --pipeline-model-parallel-size "
            f"{options.pipeline_model_parallel_size}: both must be above 1; leave it out for a pipeline that is not "
            "interleaved"
        )


def _check_hardware(options: CheckOptions) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU; use --device cpu")
    if options.transformer_impl == "local":
        return
    if options.device == "cpu":
        raise ValueError(
            "--transformer-impl transformer_engine runs on --device cuda only; use local"
        )
    if options.dtype == "fp32":
        raise ValueError(
            "--transformer-impl transformer_engine has no packed float32 attention; use --dtype bf16 or local"
        )
    if not has_transformer_engine():
        raise ValueError("--transformer-impl transformer_engine: it cannot be imported; use local")


def _check_experts(options: CheckOptions) -> None:
    experts, expert_size = options.num_experts, options.expert_model_parallel_size
    if experts is None:
        if expert_size > 1:
            raise ValueError(
                f"--expert-model-parallel-size {expert_size} needs --num-experts, a multiple of it"
            )
        return
    if experts < 2 or experts % expert_size:
        raise ValueError(
            f"--num-experts {experts} with --expert-model-parallel-size {expert_size}: give at least 2 experts, and a "
            "multiple of that size"
        )
    if options.tensor_model_parallel_size > 1 and not options.sequence_parallel:
        raise ValueError(
            f"--num-experts {experts} with --tensor-model-parallel-size {options.tensor_model_parallel_size} needs "
            "--sequence-parallel: Megatron trains no mixture of experts without it there"
        )
