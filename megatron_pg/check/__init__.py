"""``megatron-pg check``: proves on the user's own machines that the gradient does not depend on the sharding."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_pg.check.options import CheckOptions, parse_options


def main(arguments: Sequence[str]) -> int:
    """Runs the check in the job that its launcher has started; every rank calls it.

    Args:
        arguments: the command line after ``megatron-pg check``.

    Returns:
        The exit status, equal on every rank: 0 when every row passes, 1 when one fails, 2 for flags that cannot be
        served.
    """
    try:
        options, as_json = parse_options(arguments)
        _check_world_size(options)
    except ValueError as error:
        print(f"megatron-pg check: {error}", file=sys.stderr)
        return 2
    _initialize(options)
    # Importing them needs Megatron, and on the CPU its redirection.
    from megatron_pg.check import report
    from megatron_pg.check.run import run_check

    rows = run_check(options)
    if dist.get_rank() == 0:
        write = report.as_json if as_json else report.as_text
        print(write(rows, options, dist.get_world_size()), flush=True)
    dist.destroy_process_group()
    return 0 if all(row.passed for row in rows) else 1


def _check_world_size(options: CheckOptions) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model_size = (
        options.tensor_model_parallel_size
        * options.pipeline_model_parallel_size
        * options.context_parallel_size
    )
    if world_size % model_size:
        raise ValueError(
            f"{world_size} processes were started, and TP * PP * CP = {model_size} must divide them: start it with "
            f"torchrun --nproc-per-node {model_size} -m megatron_pg check ..."
        )


def _initialize(options: CheckOptions) -> None:
    """The default process group, from the launcher's environment; one process without a launcher."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29531")
    # Megatron asks for it under tensor and context parallelism before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        from megatron_pg.megatron.cpu_runtime import enable_cpu_runtime

        enable_cpu_runtime()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
