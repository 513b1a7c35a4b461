"""What a check has found, for people and as JSON, and what a failed row looks like in words."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import math
from collections.abc import Sequence

import torch

from megatron_pg.check.compare import Row
from megatron_pg.check.options import CheckOptions, has_transformer_engine
from megatron_pg.config.versions import megatron_core_version, supports_output_processor


def as_json(rows: Sequence[Row], options: CheckOptions, world_size: int) -> str:
    """The whole report; a number that is not finite is null."""
    return json.dumps(
        {
            "passed": all(row.passed for row in rows),
            "world_size": world_size,
            "options": dataclasses.asdict(options),
            "versions": versions(),
            "accelerations": accelerations(options),
            "rows": [
                {
                    name: None if isinstance(value, float) and not math.isfinite(value) else value
                    for name, value in dataclasses.asdict(row).items()
                }
                | {"tolerance": row.tolerance, "passed": row.passed}
                | {"diagnosis": diagnosis(row, options, world_size)}
                for row in rows
            ],
        },
        indent=2,
        allow_nan=False,
    )


def as_text(rows: Sequence[Row], options: CheckOptions, world_size: int) -> str:
    """Versions, the table, and the verdict; plain text, a failed row's diagnosis below it."""
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"megatron-pg check: {installed}",
        ", ".join(f"{name}: {what}" for name, what in accelerations(options).items()),
        _sharding(options, world_size),
        "",
        f"{'model':<12}{'dtype':<6}{'aggregation':<13}{'loss mode':<16}{'loss':>12}"
        f"{'gradient error':>16}{'tolerance':>11}  result",
    ]
    for row in rows:
        mode = "per token" if row.calculate_per_token_loss else "per micro-batch"
        lines.append(
            f"{row.model:<12}{row.dtype:<6}{row.aggregation:<13}{mode:<16}{row.loss:>12.6f}"
            f"{row.gradient_error:>16.1e}{row.tolerance:>11.0e}  {'PASS' if row.passed else 'FAIL'}"
        )
        if not row.passed:
            lines.append(f"{'':<12}{diagnosis(row, options, world_size)}")
    failed = sum(not row.passed for row in rows)
    verdict = "PASS: every gradient is the unsharded one" if not failed else f"FAIL: {failed} rows"
    return "\n".join([*lines, "", f"{verdict} ({len(rows)} rows)"])


def _sharding(options: CheckOptions, world_size: int) -> str:
    stages = options.virtual_pipeline_model_parallel_size
    parts = [
        f"TP {options.tensor_model_parallel_size}{' + SP' if options.sequence_parallel else ''}",
        f"PP {options.pipeline_model_parallel_size}",
        f"VPP {stages}" if stages else "",
        f"CP {options.context_parallel_size}",
        f"EP {options.expert_model_parallel_size}" if options.num_experts else "",
        f"DP {world_size // options.model_parallel_size}",
        "distributed optimizer" if options.use_distributed_optimizer else "",
        "average in collective" if options.average_in_collective else "",
    ]
    return f"{world_size} processes on {options.device}: {', '.join(p for p in parts if p)}"


def versions() -> dict[str, str]:
    """What is installed here, by name; "absent" where it is not."""
    core = ".".join(map(str, megatron_core_version()))
    found = {"torch": torch.__version__, "megatron-core": core}
    has_apex = importlib.util.find_spec("amp_C") is not None
    usable = {"transformer-engine": has_transformer_engine(), "apex": has_apex, "triton": True}
    for name, is_usable in usable.items():
        try:
            found[name] = importlib.metadata.version(name) if is_usable else "absent"
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["gpu"] = torch.cuda.get_device_name()
    return found


def accelerations(options: CheckOptions) -> dict[str, str]:
    """Which parts of the loss and of the small model run accelerated in this check."""
    has_kernels = options.device == "cuda" and importlib.util.find_spec("triton") is not None
    fused = "available" if supports_output_processor() else "needs megatron-core 0.18"
    return {
        "attention": "torch" if options.transformer_impl == "local" else "Transformer Engine",
        "log-probs": "Triton kernels" if has_kernels else "torch",
        "fused output layer": "checked" if options.fused_lm_head else fused,
    }


def diagnosis(row: Row, options: CheckOptions, world_size: int) -> str:
    """The likely mistake behind a failed row; "" for one that passed."""
    if row.passed:
        return ""
    found = _gradient_diagnosis(row, options, world_size // options.model_parallel_size)
    if not row.samples_counted_once:
        found += (
            f"; the weights that reached the loss are {row.checksum:.4g} times those of the step's totals "
            "(aggregation_checksum)"
        )
    return found


def _gradient_diagnosis(row: Row, options: CheckOptions, data_size: int) -> str:
    if not math.isfinite(row.gradient_error) or not math.isfinite(row.common_ratio):
        return f"not finite in {row.worst_parameter}"
    tolerance = row.tolerance
    if row.gradient_error <= tolerance:
        if row.loss_agrees:
            return "gradients agree"
        expected = row.reference_loss
        ratio = row.loss / expected if expected else math.nan
        loss = f"{row.loss:.6g} and not {expected:.6g} ({ratio:.4g} times)"
        return f"gradients agree; the reported loss is {loss}"
    counts = sorted({options.num_microbatches(rank) for rank in range(data_size)})
    if row.scaled_error <= 10 * tolerance:
        sizes = {
            "CP": options.context_parallel_size,
            "DP": data_size,
            "M": counts[0] if len(counts) == 1 else 1,
            "TP": options.tensor_model_parallel_size,
            "PP": options.pipeline_model_parallel_size,
        }
        factors = _factors(row.common_ratio, 10 * tolerance, sizes)
        return f"gradient is {row.common_ratio:.4g} times the reference{factors}"
    worst = f"{row.worst_parameter} is {row.worst_ratio:.4g} times the reference"
    if row.wrong_parameters < row.num_parameters:
        return (
            f"{row.wrong_parameters} of {row.num_parameters} gradients differ, {worst}: a reduction over one group "
            "is missing or done twice"
        )
    few, many = counts[0], counts[-1]
    for product, low, high in (("M", few, many), ("1/M", 1 / many, 1 / few)):
        if low < row.common_ratio < high:
            return (
                f"gradient is about {row.common_ratio:.4g} times the reference: {product}, the data-parallel ranks "
                f"having {' and '.join(map(str, counts))} micro-batches"
            )
    return (
        f"no common factor, {worst}: tokens have wrong weights, as from the totals of a micro-batch, of a rank or of a "
        "context-parallel shard, or the window is misplaced"
    )


def _factors(ratio: float, tolerance: float, sizes: dict[str, int]) -> str:
    """ ": 2 = CP or 2 = DP" of the sizes whose product, or its inverse, the ratio is; "" if there are none."""
    names = [name for name, size in sizes.items() if size > 1]
    for count in (1, 2, 3):
        matches = []
        for chosen in itertools.combinations(names, count):
            factor, product = math.prod(sizes[name] for name in chosen), " * ".join(chosen)
            if math.isclose(ratio, factor, rel_tol=tolerance):
                matches.append(f"{factor} = {product}")
            if math.isclose(ratio * factor, 1.0, rel_tol=tolerance):
                matches.append(f"1/{factor} = 1/{f'({product})' if count > 1 else product}")
        if matches:
            return f": {' or '.join(matches)}"
    return ""
