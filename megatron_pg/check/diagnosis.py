"""What a failed row looks like, in words."""

from __future__ import annotations

import itertools
import math

from megatron_pg.check.options import CheckOptions
from megatron_pg.check.rows import Row


def diagnosis(row: Row, options: CheckOptions, world_size: int) -> str:
    """The likely mistake behind a failed row; "" for one that passed.

    Args:
        row: the row.
        options: what was checked.
        world_size: processes of the job.
    """
    if row.passed:
        return ""
    found = _gradient_diagnosis(row, options, world_size)
    if not row.samples_counted_once:
        found += (
            f"; the weights that reached the loss are {row.step.checksum:.4g} times those of the step's totals "
            "(aggregation_checksum)"
        )
    return found


def _gradient_diagnosis(row: Row, options: CheckOptions, world_size: int) -> str:
    if not math.isfinite(row.gradient_error) or not math.isfinite(row.common_ratio):
        return f"not finite in {row.worst_parameter}"
    tolerance = row.step.tolerance
    if row.gradient_error <= tolerance and row.loss_agrees:
        return "gradients agree"
    if row.gradient_error <= tolerance:
        return f"gradients agree; the reported loss is {_times(row.step.loss, row.reference_loss)}"
    data_size = world_size // options.model_parallel_size
    if row.scaled_error <= 10 * tolerance:
        return f"gradient is {row.common_ratio:.4g} times the reference" + _factors(
            row.common_ratio, 10 * tolerance, options, data_size
        )
    worst = f"{row.worst_parameter} is {row.worst_ratio:.4g} times the reference"
    if row.wrong_parameters < row.num_parameters:
        return (
            f"{row.wrong_parameters} of {row.num_parameters} gradients differ, {worst}: a reduction over one group "
            "is missing or done twice"
        )
    counts = sorted({options.num_microbatches(rank) for rank in range(data_size)})
    for product, low, high in (
        ("M", counts[0], counts[-1]),
        ("1/M", 1 / counts[-1], 1 / counts[0]),
    ):
        if low < row.common_ratio < high:
            return (
                f"gradient is about {row.common_ratio:.4g} times the reference: {product}, the data-parallel ranks "
                f"having {' and '.join(map(str, counts))} micro-batches"
            )
    return (
        f"no common factor, {worst}: tokens have wrong weights, as from the totals of a micro-batch, of a rank or of a "
        "context-parallel shard, or the window is misplaced"
    )


def _times(found: float, expected: float) -> str:
    ratio = found / expected if expected else math.nan
    return f"{found:.6g} and not {expected:.6g} ({ratio:.4g} times)"


def _factors(ratio: float, tolerance: float, options: CheckOptions, data_size: int) -> str:
    """ ": 2 = CP or 2 = DP" of the sizes whose product, or its inverse, the ratio is; "" if there are none."""
    counts = {options.num_microbatches(rank) for rank in range(data_size)}
    sizes = {
        "CP": options.context_parallel_size,
        "DP": data_size,
        "M": counts.pop() if len(counts) == 1 else 1,
        "TP": options.tensor_model_parallel_size,
        "PP": options.pipeline_model_parallel_size,
    }
    names = [name for name, size in sizes.items() if size > 1]
    for count in (1, 2, 3):
        matches = []
        for chosen in itertools.combinations(names, count):
            factor = math.prod(sizes[name] for name in chosen)
            product = " * ".join(chosen)
            if math.isclose(ratio, factor, rel_tol=tolerance):
                matches.append(f"{factor} = {product}")
            if math.isclose(ratio * factor, 1.0, rel_tol=tolerance):
                matches.append(
                    f"1/{factor} = 1/({product})" if count > 1 else f"1/{factor} = 1/{product}"
                )
        if matches:
            return f": {' or '.join(matches)}"
    return ""
