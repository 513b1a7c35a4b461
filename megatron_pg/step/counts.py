"""Counted samples of a step over all data-parallel ranks, as columns. Ranks exchange a `ROW` per
sample.

Rows have no names. All ranks find the same error, so that they can then fetch the names of samples
on other ranks.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_pg.step.agreement import compute_and_gather, gather
from megatron_pg.step.sample import Sample

Indices = NDArray[np.int64]
Own = TypeVar("Own")
Sent = TypeVar("Sent")


class BareSample(NamedTuple):
    """Counts and ids of a sample, with the field names of `Sample`, without its tokens.

    If samples have no number, like rows of a matrix, the step's checksum covers only weights.
    """

    num_active_tokens: int
    group_index: int | None = None
    rollout_id: int | None = None
    name: str = ""
    prompt_hash: int | None = None
    id_source: str | None = None
    loss_weight: float | None = None
    number: int | None = None
    accepted_size: float | None = None


CountedSample = Sample | BareSample
"""A sample for step totals and aggregations."""
SampleCounts = list[BareSample]
"""Counts of one data-parallel rank's samples."""

OPTIONAL = {
    "id_source": np.uint32,
    "group_index": np.int64,
    "rollout_id": np.int64,
    "prompt_hash": np.uint64,
    "number": np.int64,
    "loss_weight": np.float64,
    "accepted_size": np.float64,
}
"""Row fields that may be None. `id_source` is hashed."""
ROW = np.dtype([("num_active_tokens", np.int64), ("filled", np.int32), *OPTIONAL.items()])
"""One sample on the wire, 64 bytes. Bit i of `filled` is 0 if the i-th optional field is None."""


class Place(NamedTuple):
    """Sample of the step with its position."""

    rank: int
    number: int
    ids: CountedSample

    @property
    def source(self) -> str | int:
        return self.rank if self.ids.id_source is None else self.ids.id_source

    def __str__(self) -> str:
        name = self.ids.name or f"sample {self.number}"
        rank = f"of data-parallel rank {self.rank}"
        if name == f"sample {self.number}" and self.ids.id_source is None:
            return f"{name} {rank}"
        return f"{name} ({self.ids.id_source or f'number {self.number} {rank}'})"


class StepCounts(Sequence[CountedSample]):
    """Counted samples of a step, in the order of data-parallel ranks. Only `here` differs between
    ranks.

    Args:
        rows: [samples] of dtype `ROW`.
        sizes: the number of samples per data-parallel rank.
        here: the samples, by rank, that this process knows with names.
        group: the group that knows the other samples. None if all are known.
    """

    def __init__(
        self,
        rows: NDArray[Any],
        sizes: Sequence[int],
        here: Mapping[int, Sequence[CountedSample]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rows, self.sizes, self.here, self._group = rows, tuple(sizes), here, group
        self._ends = np.cumsum(self.sizes, dtype=np.int64)

    @classmethod
    def of(cls, everyone: Iterable[Sequence[CountedSample]]) -> StepCounts:
        """Make the counts of a step from all its samples, by data-parallel rank."""
        here = dict(enumerate(everyone))
        rows = [rows_of(samples) for samples in here.values()]
        return cls(np.concatenate([_NO_ROW, *rows]), list(map(len, rows)), here)

    @classmethod
    def over_ranks(
        cls,
        count: Callable[[], tuple[Sequence[CountedSample], Own, Sent]],
        group: dist.ProcessGroup | None,
    ) -> tuple[StepCounts, Own, list[Sent]]:
        """Count the samples of every rank in one exchange. Every rank of the group must call it.

        `count` returns this rank's samples, a value to keep, and a picklable value to send to the
        other ranks. The result is the step's counts, the kept value, and each rank's sent value.
        An error is raised on all ranks (`compute_and_gather`).
        """
        (samples, own, _), everyone = compute_and_gather(
            count, lambda found: (rows_of(found[0]).tobytes(), found[2]), group
        )
        parts, sent = zip(*everyone, strict=True)
        rank = 0 if group is None else dist.get_rank(group)
        sizes = [len(part) // ROW.itemsize for part in parts]
        rows = np.frombuffer(b"".join(parts), dtype=ROW)
        return cls(rows, sizes, {rank: samples}, group), own, list(sent)

    @property
    def rank(self) -> int:
        """The data-parallel rank of this process, or the first rank that it knows."""
        return min(self.here, default=0)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_group": None}

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> CountedSample: ...
    @overload
    def __getitem__(self, index: slice) -> list[CountedSample]: ...
    def __getitem__(self, index: int | slice) -> CountedSample | list[CountedSample]:
        if isinstance(index, slice):
            return [self.place(number).ids for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.place(index % len(self)).ids

    def place(self, index: int) -> Place:
        """Return a sample with its position. A sample on a different rank has no name."""
        rank = int(np.searchsorted(self._ends, index, side="right"))
        number = index - int(self._ends[rank]) + self.sizes[rank]
        if rank in self.here:
            return Place(rank, number, self.here[rank][number])
        fields = dict(zip(ROW.names or (), self.rows[index].tolist(), strict=True))
        filled = fields.pop("filled")
        for bit, name in enumerate(OPTIONAL):
            fields[name] = fields[name] if filled >> bit & 1 else None
        fields["id_source"] = None if fields["id_source"] is None else "another rank's id_source"
        return Place(rank, number, BareSample(**fields))

    def places(self, indices: Sequence[int]) -> list[Place]:
        """Return samples with their names, in one exchange. Every rank of the group must call it
        with the same indices.
        """
        places = [self.place(index) for index in indices]
        known = [place if place.rank in self.here else None for place in places]
        for others in gather(known, self._group):
            places = [other or place for other, place in zip(others, places, strict=True)]
        return places

    def has(self, field: str) -> NDArray[np.bool_]:
        """Return which samples fill an optional field, [samples]."""
        return (self.rows["filled"] >> list(OPTIONAL).index(field) & 1).astype(bool)

    @functools.cached_property
    def are_numbered(self) -> bool:
        """Whether every sample has a number."""
        return bool(self.has("number").all())

    @functools.cached_property
    def _coefficients(self) -> tuple[Indices, NDArray[np.float64]]:
        """The samples' numbers, ascending, and their coefficients, with a final 0 for no sample."""
        numbers, first = np.unique(self.rows["number"], return_index=True)
        # By position in the step, because numbers differ between context-parallel ranks.
        coefficients = 0.5 + np.random.default_rng(0).random(len(self))[first]
        return np.append(numbers, 2**63 - 1), np.append(coefficients, 0.0)

    def coefficients_of(self, samples: Sequence[CountedSample]) -> NDArray[np.float64]:
        """Look up each sample's checksum coefficient, [len(samples)].

        It is random in [0.5, 1.5), and 0 for a sample outside this step. All are 1 unless
        `are_numbered`.
        """
        if not self.are_numbered:
            return np.ones(len(samples))
        if samples is self:
            numbers = self.rows["number"]
        else:
            numbers = np.array([s.number or 0 for s in samples], dtype=np.int64)
        known, coefficients = self._coefficients
        places = np.searchsorted(known, numbers)
        return np.where(known[places] == numbers, coefficients[places], 0.0)

    @functools.cached_property
    def ranks(self) -> Indices:
        """The data-parallel rank of each sample, [samples]."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @functools.cached_property
    def first_of_rollout(self) -> Indices:
        """The first sample of each sample's rollout, [samples], or itself without a
        `rollout_id`.
        """
        return self._first_of("rollout_id")

    @property
    def is_first_of_rollout(self) -> NDArray[np.bool_]:
        """Whether each sample is the first of its rollout, [samples]."""
        return np.equal(self.first_of_rollout, np.arange(len(self)))

    @functools.cached_property
    def first_of_group(self) -> Indices:
        """The first sample of each sample's prompt group, [samples], or itself without a group."""
        return self._first_of("group_index")

    def _first_of(self, field: str) -> Indices:
        first, filled = np.arange(len(self)), np.flatnonzero(self.has(field))
        _, starts, places = np.unique(
            self.rows[field][filled], return_index=True, return_inverse=True
        )
        first[filled] = filled[starts[places]]
        return first

    def sums_of(self, first: Indices, sizes: NDArray[Any]) -> NDArray[np.float64]:
        """Sum sizes [samples] over each sample's rollout or prompt group, [samples]."""
        return np.bincount(first, sizes, minlength=len(self))[first]


_NO_ROW = np.zeros(0, dtype=ROW)


def rows_of(samples: Sequence[CountedSample]) -> NDArray[Any]:
    """Convert counted samples to rows [samples]."""
    rows = np.zeros(len(samples), dtype=ROW)
    rows["num_active_tokens"] = [sample.num_active_tokens for sample in samples]
    for bit, name in enumerate(OPTIONAL):
        values: list[Any] = list(map(operator.attrgetter(name), samples))
        filled: Any = 1
        if name == "id_source":
            values = [None if source is None else _hash_of_source(source) for source in values]
        if None in values:
            filled = np.array([value is not None for value in values])
            values = [0 if value is None else value for value in values]
        rows["filled"] |= filled * np.int32(1 << bit)
        rows[name] = np.array(values, dtype=OPTIONAL[name])
    return rows


@functools.lru_cache(maxsize=1 << 16)
def _hash_of_source(source: str) -> int:
    digest = hashlib.blake2b(source.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
