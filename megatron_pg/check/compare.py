"""How far a step is from what it should give: its loss, its checksum and every gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_pg.check.reference import Expected
from megatron_pg.check.sharded_parameters import Shard, gradient_slices
from megatron_pg.loss.checksum import CHECKSUM_TOLERANCE

TOLERANCES = {"fp32": 1e-6, "bf16": 2e-2}
_Slice = tuple[float, str, float, float, float]
"""Error, name, <g, reference>, <reference, reference> and <g, g> of one rank's slice of one gradient."""


@dataclass(frozen=True)
class Step:
    """What was run, and the loss that it reported."""

    model: str
    aggregation: str
    calculate_per_token_loss: bool
    dtype: str
    loss: float
    checksum: float
    """The metric `aggregation_checksum`: 1 where every sample was counted once."""

    @property
    def tolerance(self) -> float:
        """The bound of the gradient error; the loss has twice that."""
        return TOLERANCES[self.dtype]


@dataclass(frozen=True)
class Row(Step):
    """A step compared with the reference. Equal on every rank."""

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
    """How many have a gradient that is not zero."""

    @property
    def loss_agrees(self) -> bool:
        """Whether the reported loss is the reference's; NaN is not."""
        scale = max(1.0, abs(self.reference_loss))
        return abs(self.loss - self.reference_loss) <= 2 * self.tolerance * scale

    @property
    def samples_counted_once(self) -> bool:
        """Whether the checksum is 1; NaN is not."""
        return abs(self.checksum - 1.0) <= CHECKSUM_TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether loss, gradients and checksum agree; NaN does not."""
        gradients_agree = self.gradient_error <= self.tolerance
        return gradients_agree and self.loss_agrees and self.samples_counted_once


def compare(step: Step, chunks: Sequence[Any], expected: Expected) -> Row:
    """Compares the gradients in DDP's buffers of all ranks; every rank of the world calls it, and gets the same row.

    Raises:
        RuntimeError: the ranks together hold other parameters than the unsharded model.
    """
    mine = [
        _compare_slice(shard, gradient, expected.gradients[shard.name], step.dtype == "bf16")
        for shard, gradient in gradient_slices(chunks)
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    slices: list[_Slice] = list(itertools.chain(*gathered))
    errors, names, products, squares, own_squares = zip(*slices, strict=True)
    if missing := expected.gradients.keys() - set(names):
        raise RuntimeError(f"no rank holds {sorted(missing)}, which the unsharded model has")
    worst, name, product, square, _ = max(slices, key=lambda each: each[0])
    common, squared, own = sum(products), sum(squares), sum(own_squares)
    ratio = common / (squared or 1.0)
    rest = math.sqrt(max(own - ratio * common, 0.0)) if math.isfinite(own) else math.inf
    return Row(
        **vars(step),
        reference_loss=expected.loss,
        gradient_error=worst,
        worst_parameter=name,
        worst_ratio=product / (square or 1.0),
        common_ratio=ratio,
        scaled_error=rest / ((abs(ratio) * math.sqrt(squared)) or 1.0),
        wrong_parameters=len({name for error, name, *_ in slices if error > step.tolerance}),
        num_parameters=sum(bool(gradient.any()) for gradient in expected.gradients.values()),
    )


def _compare_slice(shard: Shard, gradient: Tensor, whole: Tensor, by_norm: bool) -> _Slice:
    """One rank's slice of one gradient beside the reference's."""
    expected = shard.cut(whole).double()
    found = gradient.double()
    difference = found - expected
    if by_norm:
        error, scale = float(difference.norm()), float(expected.norm())
    else:
        error, scale = float(difference.abs().max()), float(whole.double().abs().max())
    if error != 0.0:
        error = error / scale if scale else math.inf
    products = (found * expected, expected.square(), found.square())
    product, square, own_square = (float(each.sum()) for each in products)
    return math.inf if math.isnan(error) else error, shard.name, product, square, own_square
