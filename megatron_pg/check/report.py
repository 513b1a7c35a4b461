"""What a check found, for people and as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_pg.check.diagnosis import diagnosis
from megatron_pg.check.options import CheckOptions, has_transformer_engine
from megatron_pg.check.rows import Row
from megatron_pg.config.versions import megatron_core_version, supports_output_processor


def versions() -> dict[str, str]:
    """What is installed here, by name; "absent" where it is not."""
    found = {
        "torch": torch.__version__,
        "megatron-core": ".".join(map(str, megatron_core_version())),
        "transformer-engine": _version("transformer-engine")
        if has_transformer_engine()
        else "absent",
        "apex": _version("apex") if importlib.util.find_spec("amp_C") else "absent",
        "triton": _version("triton"),
    }
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def accelerations(options: CheckOptions) -> dict[str, str]:
    """Which parts of the loss and of the tiny model run accelerated in this check."""
    on_gpu = options.device == "cuda"
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "attention": "Transformer Engine"
        if options.transformer_impl == "transformer_engine"
        else "torch",
        "log-probs": "Triton kernels" if on_gpu and has_triton else "torch",
        "fused output layer": _fused_output_layer(options),
    }


def _fused_output_layer(options: CheckOptions) -> str:
    if options.fused_lm_head:
        return "checked"
    return "available" if supports_output_processor() else "needs megatron-core 0.18"


def as_json(rows: Sequence[Row], options: CheckOptions, world_size: int) -> str:
    """The whole report; a number that is not finite is null."""
    return json.dumps(
        {
            "passed": all(row.passed for row in rows),
            "world_size": world_size,
            "options": dataclasses.asdict(options),
            "versions": versions(),
            "accelerations": accelerations(options),
            "rows": [_row_as_json(row, options, world_size) for row in rows],
        },
        indent=2,
        allow_nan=False,
    )


def _row_as_json(row: Row, options: CheckOptions, world_size: int) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    fields = fields.pop("step") | {"tolerance": row.step.tolerance} | fields
    fields |= {"passed": row.passed, "diagnosis": diagnosis(row, options, world_size)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def as_text(rows: Sequence[Row], options: CheckOptions, world_size: int) -> str:
    """Versions, the table, and the verdict; plain text, a failed row's diagnosis below it."""
    lines = [
        "megatron-pg check: "
        + ", ".join(f"{name} {version}" for name, version in versions().items()),
        ", ".join(f"{name}: {what}" for name, what in accelerations(options).items()),
        describe(options, world_size),
        "",
        f"{'model':<12}{'dtype':<6}{'aggregation':<13}{'loss mode':<16}{'loss':>12}"
        f"{'gradient error':>16}{'tolerance':>11}  result",
    ]
    for row in rows:
        step = row.step
        mode = "per token" if step.calculate_per_token_loss else "per micro-batch"
        lines.append(
            f"{step.model:<12}{step.dtype:<6}{step.aggregation:<13}{mode:<16}{step.loss:>12.6f}"
            f"{row.gradient_error:>16.1e}{step.tolerance:>11.0e}  {'PASS' if row.passed else 'FAIL'}"
        )
        if not row.passed:
            lines.append(f"{'':<12}{diagnosis(row, options, world_size)}")
    failed = sum(not row.passed for row in rows)
    verdict = "PASS: every gradient is the unsharded one" if not failed else f"FAIL: {failed} rows"
    return "\n".join([*lines, "", f"{verdict} ({len(rows)} rows)"])


def describe(options: CheckOptions, world_size: int) -> str:
    """The sharding in one line."""
    parts = [
        f"TP {options.tensor_model_parallel_size}{' + SP' if options.sequence_parallel else ''}",
        f"PP {options.pipeline_model_parallel_size}",
        f"VPP {options.virtual_pipeline_model_parallel_size}" if options.num_chunks > 1 else "",
        f"CP {options.context_parallel_size}",
        f"EP {options.expert_model_parallel_size}" if options.num_experts else "",
        f"DP {world_size // options.model_parallel_size}",
        "distributed optimizer" if options.use_distributed_optimizer else "",
        "average in collective" if options.average_in_collective else "",
    ]
    return f"{world_size} processes on {options.device}: {', '.join(p for p in parts if p)}"
