"""One step of a check beside its reference: how far every gradient is from the unsharded one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_pg.check.sharded_parameters import Shard, gradient_slices
from megatron_pg.samples import Sample

TOLERANCES = {
    ("loss only", "fp32"): 1e-6,
    # Rounding through a whole model, on hardware of any summation order. A wrong factor is off by far more.
    ("end to end", "fp32"): 5e-6,
    ("end to end", "bf16"): 2e-2,
}


@dataclass(frozen=True)
class Step:
    """What was run, and the loss that it reported."""

    model: str
    aggregation: str
    calculate_per_token_loss: bool
    dtype: str
    loss: float

    @property
    def tolerance(self) -> float:
        """Of the gradient error; the loss has twice that."""
        return TOLERANCES[self.model, self.dtype]


@dataclass(frozen=True)
class Reference:
    """What a step should give: its samples, the loss by aggregation, and whole gradients by aggregation and name."""

    samples: list[Sample]
    losses: dict[str, float]
    gradients: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Row:
    """A step compared with the reference. Equal on every rank."""

    step: Step
    reference_loss: float
    gradient_error: float
    """The largest over all parameters and ranks, of max|g - reference| / max|reference| (bf16: of the norms)."""
    worst_parameter: str
    worst_ratio: float
    """<g, reference> / <reference, reference> of the worst parameter's slice."""
    common_ratio: float
    """The same of all parameters together: a wrong scale shows here."""
    scaled_error: float
    """|g - common_ratio * reference| / |common_ratio * reference| of all parameters together."""
    wrong_parameters: int
    """How many parameters are beyond the tolerance on some rank."""
    num_parameters: int

    @property
    def loss_agrees(self) -> bool:
        """Whether the reported loss is the reference's; NaN is not."""
        scale = max(1.0, abs(self.reference_loss))
        return abs(self.step.loss - self.reference_loss) <= 2 * self.step.tolerance * scale

    @property
    def passed(self) -> bool:
        """Whether loss and gradients agree; NaN does not."""
        return self.loss_agrees and self.gradient_error <= self.step.tolerance


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
        num_parameters=len(expected),
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
