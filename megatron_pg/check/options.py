"""What to check: the flags of ``megatron-pg check``, under Megatron's names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class CheckOptions:
    """How the tiny model is cut and run; what is left of the world is data parallel."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    num_experts: int | None = None
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    average_in_collective: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    transformer_impl: Literal["local", "transformer_engine"] = "local"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the parameters and activations of the end-to-end rows."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def pad_to_multiple(self) -> int:
        """What the packed length must divide by: sequence parallelism splits a rank's tokens over TP."""
        if not self.sequence_parallel:
            return 1
        return self.context_parallel_size * self.tensor_model_parallel_size

    @property
    def num_chunks(self) -> int:
        """Model chunks of one rank."""
        return self.virtual_pipeline_model_parallel_size or 1


def parse_options(arguments: Sequence[str]) -> tuple[CheckOptions, bool]:
    """The options, and whether the report is to be JSON.

    Raises:
        SystemExit: of argparse, for unknown flags and --help.
        ValueError: flags that do not go together, or that this machine cannot serve.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-pg check",
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
    add("--num-experts", type=int, default=None, help="check a mixture of experts")
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add(
        "--average-in-collective",
        action="store_true",
        help="DDP's; per-token rows are left out, which Megatron excludes with it",
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
    args = vars(parser.parse_args(list(arguments)))
    as_json = bool(args.pop("json"))
    args["dtype"] = args["dtype"] or ("bf16" if args["device"] == "cuda" else "fp32")
    if args["transformer_impl"] is None:
        use_te = args["device"] == "cuda" and args["dtype"] == "bf16" and has_transformer_engine()
        args["transformer_impl"] = "transformer_engine" if use_te else "local"
    options = CheckOptions(**args)
    _check(options)
    return options, as_json


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be imported, its libraries included."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def _check(options: CheckOptions) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU; use --device cpu")
    if options.transformer_impl == "transformer_engine":
        if options.device == "cpu":
            raise ValueError(
                "--transformer-impl transformer_engine runs on --device cuda only; use local"
            )
        if options.dtype == "fp32":
            raise ValueError(
                "--transformer-impl transformer_engine has no packed float32 attention; use --dtype bf16 or local"
            )
        if not has_transformer_engine():
            raise ValueError(
                "--transformer-impl transformer_engine: it cannot be imported; use local"
            )
    if options.expert_model_parallel_size > 1 and options.num_experts is None:
        raise ValueError(
            f"--expert-model-parallel-size {options.expert_model_parallel_size} needs --num-experts, a multiple of it"
        )
    if options.sequence_parallel and options.tensor_model_parallel_size == 1:
        raise ValueError("--sequence-parallel needs --tensor-model-parallel-size above 1")
    vpp = options.virtual_pipeline_model_parallel_size
    if vpp is not None and options.pipeline_model_parallel_size == 1:
        raise ValueError(
            "--virtual-pipeline-model-parallel-size needs --pipeline-model-parallel-size above 1"
        )
