"""How far every gradient of a step is from the unsharded one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_pg.check.rows import Row, Step
from megatron_pg.check.sharded_parameters import Shard, gradient_slices
from megatron_pg.step.sample import Sample


@dataclass(frozen=True)
class Reference:
    """What a step should give: its samples, the loss by aggregation, and whole gradients by aggregation and name."""

    samples: list[Sample]
    losses: dict[str, float]
    gradients: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class _Slice:
    """One rank's slice of one gradient beside the reference's."""

    error: float
    name: str
    products: tuple[float, float, float]
    """<g, reference>, <reference, reference>, <g, g>."""

    @property
    def ratio(self) -> float:
        return self.products[0] / (self.products[1] or 1.0)


def compare(step: Step, chunks: Sequence[Any], reference: Reference) -> Row:
    """Compares the gradients in DDP's buffers of all ranks; every rank of the world calls it, and gets the same row.

    Raises:
        RuntimeError: the ranks together hold other parameters than the unsharded model.
    """
    expected = reference.gradients[step.aggregation]
    mine = [
        _compare_slice(shard, gradient, expected[shard.name], by_norm=step.dtype == "bf16")
        for shard, gradient in gradient_slices(chunks)
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    slices: list[_Slice] = [each for of_rank in gathered for each in of_rank]
    missing = expected.keys() - {each.name for each in slices}
    if missing:
        raise RuntimeError(f"no rank holds {sorted(missing)}, which the unsharded model has")
    worst = max(slices, key=lambda each: each.error)
    common, squared, own = (sum(column) for column in zip(*(s.products for s in slices)))  # noqa: B905
    ratio = common / (squared or 1.0)
    rest = math.sqrt(max(own - ratio * common, 0.0)) if math.isfinite(own) else math.inf
    return Row(
        step=step,
        reference_loss=reference.losses[step.aggregation],
        gradient_error=worst.error,
        worst_parameter=worst.name,
        worst_ratio=worst.ratio,
        common_ratio=ratio,
        scaled_error=rest / ((abs(ratio) * math.sqrt(squared)) or 1.0),
        wrong_parameters=len({s.name for s in slices if not s.error <= step.tolerance}),
        num_parameters=sum(bool(gradient.any()) for gradient in expected.values()),
    )


def _compare_slice(shard: Shard, gradient: Tensor, whole: Tensor, *, by_norm: bool) -> _Slice:
    expected = shard.cut(whole).double()
    found = gradient.double()
    difference = found - expected
    if by_norm:
        error, scale = float(difference.norm()), float(expected.norm())
    else:
        error, scale = float(difference.abs().max()), float(whole.double().abs().max())
    if error != 0.0:
        error = error / scale if scale else math.inf
    return _Slice(
        error if error == error else math.inf,
        shard.name,
        (
            float((found * expected).sum()),
            float(expected.square().sum()),
            float(found.square().sum()),
        ),
    )
