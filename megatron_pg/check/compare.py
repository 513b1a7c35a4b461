"""The comparison of a step with the reference: loss, checksum, every gradient and its copies."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.check.options import CheckOptions
from megatron_pg.check.placement import Part, Piece
from megatron_pg.check.places import AXES, Place, names_of, place_of
from megatron_pg.check.reference import Expected
from megatron_pg.loss.checksum import CHECKSUM_TOLERANCE
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.step.agreement import gather

TOLERANCES = {"fp32": 1e-6, "bf16": 2e-2}
STEPS = 10.0
"""The tolerance of the user's model in units. A number's unit is how far it moves when every weight
of the unsharded model moves by one epsilon of its dtype."""


@dataclass(frozen=True)
class Fault:
    """A wrong parameter."""

    name: str
    kind: str
    ratio: float | None = None
    """The factor that `kind` names."""


@dataclass(frozen=True)
class CheckRow:
    """A step and its errors, equal on every rank."""

    model: str
    aggregation: str
    calculate_per_token_loss: bool
    dtype: str
    loss: float
    checksum: float  # the metric `aggregation_checksum`: 1 where every sample was counted once
    _: KW_ONLY
    what: str = "gradient"  # the case's name (`cases.py`)
    gradient_norm: float | None = None  # the optimizer's, None without its step
    reference_loss: float
    reference_norm: float | None = None
    gradient_error: float
    """The largest max|g - reference| / max|reference| over parameters and ranks (bf16: the ratio of
    norms). In a row with a `limit`: the largest |g - reference| in units."""
    limit: float | None = None
    """The tolerance of a row of the user's model, for gradients in units."""
    loss_limit: float = 0.0
    norm_limit: float = 0.0
    """With a `limit`, the tolerances of the loss and the gradient norm."""
    words: str = ""
    """What is wrong, in a row of the user's model."""
    ratio: float | None = None
    """The factor that `words` name."""
    faults: tuple[Fault, ...] = ()
    """The wrong parameters."""
    worst_parameter: str
    worst_rank: int = 0
    worst_name: str = ""  # the worst rank with host and coordinates, "" for a single rank
    worst_ratio: float  # <g, reference> / <reference, reference> of the worst parameter's slice
    common_ratio: float  # the same ratio of all parameters, which shows a wrong scale
    scaled_error: float
    """|g - common_ratio * reference| / |common_ratio * reference| of all parameters together."""
    num_parameters: int  # of those with a nonzero gradient
    wrong: tuple[str, ...] = ()  # the parameters that are beyond the tolerance on some rank
    wrong_ratio: float = 1.0  # `common_ratio` and, below, `scaled_error` of only the wrong slices
    wrong_scaled_error: float = 0.0
    wrong_ranks: tuple[int, ...] = ()
    wrong_stages: tuple[int, ...] = ()  # pipeline stages that hold a wrong parameter
    wrong_places: str = ""
    """The wrong ranks in words, by host and coordinates (`names_of`), or "" if all are wrong."""
    replica_error: float = 0.0  # the largest difference between copies of a slice, over its 2-norm
    replica_axes: tuple[str, ...] = ()
    """The `AXES` along which copies disagree while the remaining coordinates are equal."""
    replica_parameters: tuple[str, ...] = ()

    @property
    def tolerance(self) -> float:
        """The bound of the gradient error, and half the bound of the loss and gradient norm."""
        return TOLERANCES[self.dtype] if self.limit is None else self.limit

    # NaN fails each comparison.

    @property
    def loss_agrees(self) -> bool:
        bound = 2 * self.tolerance * max(1.0, abs(self.reference_loss))
        if self.limit is not None:
            bound = self.loss_limit
        return abs(self.loss - self.reference_loss) <= bound

    @property
    def norm_agrees(self) -> bool:
        found, expected = self.gradient_norm, self.reference_norm or 0.0
        bound = 2 * self.tolerance * expected if self.limit is None else self.norm_limit
        return found is None or abs(found - expected) <= bound

    @property
    def samples_counted_once(self) -> bool:
        return abs(self.checksum - 1.0) <= CHECKSUM_TOLERANCE

    @property
    def gradients_agree(self) -> bool:
        return max(self.gradient_error, self.replica_error) <= self.tolerance

    @property
    def passed(self) -> bool:
        numbers_agree = self.loss_agrees and self.norm_agrees and self.samples_counted_once
        return self.gradients_agree and numbers_agree


class _Slice(NamedTuple):
    """One rank's slice g of a gradient, compared with the reference."""

    name: str
    part: tuple[int, ...]  # the `Piece`'s offset
    place: Place
    error: float
    product: float  # <g, reference>
    square: float  # <reference, reference>
    own_square: float  # <g, g>
    prints: tuple[float, ...]  # two projections of g: equal copies have equal ones
    expected_prints: tuple[float, ...]


def compare(
    parts: Iterable[Part], expected: Expected, options: CheckOptions, **step: Any
) -> CheckRow:
    """Compare the ranks' slices of gradients or updates with the reference. Every rank calls it and
    gets the same row.
    """
    place, dtype = _own_place(options), options.dtype
    limit = STEPS if expected.units else None
    tolerance = limit or TOLERANCES[dtype]
    units = {expected.label(name): unit for name, unit in expected.units.items()}
    mine = []
    for piece, part in parts:
        unit = expected.units.get(piece.name)
        measured = _measure(piece, part, expected.gradients[piece.name], place, dtype, unit)
        mine.append(measured._replace(name=expected.label(piece.name)))
    places, of_ranks = zip(*gather((place, mine), dist.group.WORLD), strict=True)
    slices = list(itertools.chain(*of_ranks))
    if missing := {*map(expected.label, expected.gradients)} - {each.name for each in slices}:
        raise RuntimeError(f"no rank holds {sorted(missing)} of the unsharded model")
    worst = max(slices, key=lambda each: each.error)
    wrong = [each for each in slices if not each.error <= tolerance]
    wrong_places = sorted({each.place for each in wrong})
    ratio, scaled_error = _common_ratio(slices)
    wrong_ratio, wrong_scaled_error = _common_ratio(wrong)
    replica_error, axes, disagreeing = _replicas(slices, tolerance, units)
    by_name: dict[str, list[_Slice]] = {}
    for each in slices:
        by_name.setdefault(each.name, []).append(each)
    names = {each.name for each in wrong} | {*disagreeing}
    faults = [_fault(by_name[name], tolerance, units) for name in by_name if name in names]
    return CheckRow(
        **step,
        dtype=dtype,
        reference_loss=expected.loss,
        reference_norm=expected.norm,
        gradient_error=worst.error,
        limit=limit,
        loss_limit=STEPS * expected.loss_unit,
        norm_limit=STEPS * expected.norm_unit,
        faults=tuple(faults),
        worst_parameter=worst.name,
        worst_rank=worst.place.rank,
        worst_name=names_of([worst.place], places),
        worst_ratio=worst.product / (worst.square or 1.0),
        common_ratio=ratio,
        scaled_error=scaled_error,
        num_parameters=sum(bool(gradient.any()) for gradient in expected.gradients.values()),
        wrong=tuple(sorted({each.name for each in wrong})),
        wrong_ratio=wrong_ratio,
        wrong_scaled_error=wrong_scaled_error,
        wrong_ranks=tuple(place.rank for place in wrong_places),
        wrong_stages=tuple(sorted({p.coordinates[AXES.index("PP")] for p in wrong_places})),
        wrong_places=names_of(wrong_places, places),
        replica_error=replica_error,
        replica_axes=axes,
        replica_parameters=disagreeing,
    )


def compare_copies(parts: Iterable[Part], options: CheckOptions, **step: Any) -> CheckRow:
    """Compare the copies of each parameter block bit for bit. Every rank calls it and gets the same
    row.
    """
    place = _own_place(options)
    mine = [
        _measure(piece, tensor, tensor, place, options.dtype, None, is_whole=False)
        for piece, tensor in parts
    ]
    slices = list(itertools.chain(*gather(mine, dist.group.WORLD)))
    error, axes, names = _replicas(slices, 0.0, {})
    return CheckRow(
        **step,
        calculate_per_token_loss=False,
        dtype=options.dtype,
        loss=0.0,
        checksum=1.0,
        reference_loss=0.0,
        gradient_error=0.0,
        worst_parameter=names[0] if names else "",
        worst_ratio=1.0,
        common_ratio=1.0,
        scaled_error=0.0,
        num_parameters=len({each.name for each in slices}),
        limit=0.0,
        replica_error=error,
        replica_axes=axes,
        replica_parameters=names,
    )


def _own_place(options: CheckOptions) -> Place:
    groups = ParallelGroups.from_parallel_state()
    ranks = (groups.tensor_rank, groups.context_rank, groups.data_rank, groups.pipeline_rank)
    return place_of(ranks, options)


def _measure(
    piece: Piece,
    gradient: Tensor,
    whole: Tensor,
    place: Place,
    dtype: str,
    unit: float | None,
    *,
    is_whole: bool = True,
) -> _Slice:
    gradient = gradient.double()
    whole = whole.to(gradient)  # counted on the CPU, as the experts' tokens are
    expected = piece.cut(whole) if is_whole else whole
    difference = gradient - expected
    if unit is not None:
        error = _quotient(float(difference.norm()), unit)
    elif dtype == "bf16":
        error = _quotient(float(difference.norm()), float(expected.norm()))
    else:
        error = _quotient(float(difference.abs().max()), float(whole.abs().max()))
    numbers = torch.arange(gradient.numel(), device=gradient.device, dtype=torch.float64)
    waves = torch.stack([torch.cos(step * numbers) for step in (1.0, 2.3)])
    prints, expected_prints = (
        tuple((waves @ values.flatten()).tolist()) for values in (gradient, expected)
    )
    product, square, own_square = (
        float(values.sum())
        for values in (gradient * expected, expected.square(), gradient.square())
    )
    numbers_of = (error, product, square, own_square)
    return _Slice(piece.name, piece.offset, place, *numbers_of, prints, expected_prints)


def _quotient(error: float, scale: float) -> float:
    """Divide an error by its scale. Return infinity for NaN, and for an error if the scale is 0."""
    if error == 0.0:
        return 0.0
    quotient = error / scale if scale else math.inf
    return math.inf if math.isnan(quotient) else quotient


def _common_ratio(slices: Sequence[_Slice]) -> tuple[float, float]:
    """Return the factor that brings the reference nearest to the slices, and the rest."""
    common, squared = sum(each.product for each in slices), sum(each.square for each in slices)
    own = sum(each.own_square for each in slices)
    ratio = common / (squared or 1.0)
    rest = math.sqrt(max(own - ratio * common, 0.0)) if math.isfinite(own) else math.inf
    return ratio, rest / ((abs(ratio) * math.sqrt(squared)) or 1.0)


def _replicas(
    slices: Sequence[_Slice], tolerance: float, units: Mapping[str, float]
) -> tuple[float, tuple[str, ...], tuple[str, ...]]:
    """Return the largest error between copies, the axes along which they disagree, and the names of
    their parameters.
    """

    def spread(copies: Sequence[_Slice]) -> float:
        prints = zip(*(each.prints for each in copies), strict=True)
        width = max(max(values) - min(values) for values in prints)
        # A projection grows with the gradient's norm.
        return _quotient(width, units.get(copies[0].name, math.sqrt(copies[0].square)))

    everywhere = [(copies[0].name, spread(copies)) for copies in _grouped(slices, *AXES)]
    names = tuple(sorted({name for name, error in everywhere if error > tolerance}))
    axes = tuple(
        axis
        for axis in AXES
        if any(spread(copies) > tolerance for copies in _grouped(slices, axis))
    )
    return max(error for _, error in everywhere), axes, names


def _grouped(slices: Iterable[_Slice], *ignored: str) -> Iterable[list[_Slice]]:
    """Group the slices of one part of one parameter on ranks that differ only along the ignored
    axes.
    """
    groups: dict[tuple[object, ...], list[_Slice]] = {}
    for each in slices:
        place = zip(AXES, each.place.coordinates, strict=True)
        key = each.name, each.part, *(number for axis, number in place if axis not in ignored)
        groups.setdefault(key, []).append(each)
    return groups.values()


def _fault(slices: Sequence[_Slice], tolerance: float, units: Mapping[str, float]) -> Fault:
    """Describe a parameter's fault, with its axis or ranks."""
    name = slices[0].name
    _, axes, _ = _replicas(slices, tolerance, units)
    # Rounding moves a sum of copies by about one unit.
    slack = max(2.0 * units.get(name, 0.0), 1e-2 * math.sqrt(slices[0].square))
    for axis in AXES:
        if all(_is_partial(copies, slack) for copies in _grouped(slices, axis)):
            kind = f"each {axis} rank holds a partial sum, which is not reduced over them"
            return Fault(name, kind)
    empty = sorted({s.place.rank for s in slices if not s.own_square and s.square})
    wrong = sorted({s.place.rank for s in slices if not s.error <= tolerance})
    ranks = ", ".join(map(str, empty or wrong))
    if empty and len(empty) < len({s.place.rank for s in slices}):
        return Fault(name, f"missing on rank {ranks}")
    ratio, rest = _common_ratio([each for each in slices if not each.error <= tolerance])
    if wrong and rest <= 1e-2 < abs(ratio - 1.0):
        differ = f", and the copies differ along {' and '.join(axes)}" if axes else ""
        return Fault(name, f"{ratio:.4g} times the expected{differ}", ratio)
    if axes:
        on = f", wrong on rank {ranks}" if wrong else ""
        return Fault(name, f"its copies differ along {' and '.join(axes)}{on}")
    return Fault(name, "it differs, not by one factor")


def _is_partial(copies: Sequence[_Slice], slack: float) -> bool:
    """Tell whether the copies of a slice differ and add up to the expected one, with a nonzero one
    after the first.
    """
    prints = list(zip(*(each.prints for each in copies), strict=True))
    differ = any(max(values) - min(values) > slack for values in prints)
    sums = map(sum, prints)
    adds_up = all(abs(a - b) <= slack for a, b in zip(sums, copies[0].expected_prints, strict=True))
    return differ and adds_up and any(each.own_square for each in copies[1:])
