"""The totals of a step: counts over every data-parallel rank and micro-batch, known before the step begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_pg.step.agreement import gather


class CountedSample(Protocol):
    """What the totals of a step and the aggregations ask of a sample: its counts and ids, not its tokens."""

    @property
    def num_active_tokens(self) -> int:
        """Response tokens that the loss mask keeps."""

    @property
    def group_index(self) -> int | None:
        """The prompt group, any int64."""

    @property
    def rollout_id(self) -> int | None:
        """Samples with the same id, any int64, are one rollout; None makes the sample a rollout of its own."""

    @property
    def name(self) -> str:
        """How error messages call the sample."""


AnySample = TypeVar("AnySample", bound=CountedSample)


@dataclass(frozen=True)
class BareSample:
    """A `CountedSample` of which nothing more is known: a row of a matrix, a length without tokens."""

    num_active_tokens: int
    group_index: int | None = None
    rollout_id: int | None = None
    name: str = "sample"


@dataclass(frozen=True)
class StepTotals:
    """Counts of one optimizer step over all data-parallel ranks. Built by `step_totals`; equal on every rank
    but for the two mappings, which hold the ids of this rank's samples."""

    num_rollouts: int
    """N: rollouts, those without an active token included."""
    num_prompt_groups: int | None
    """P: prompt groups, those without an active token included; None where samples lack a `group_index`."""
    num_active_tokens: int
    """T: active tokens."""
    num_active_rollouts: int
    """Rollouts with at least one active token."""
    num_active_prompt_groups: int | None
    """Prompt groups with at least one active token."""
    rollout_active_tokens: Mapping[int, int]
    """D by `rollout_id`."""
    group_active_tokens: Mapping[int, int]
    """G by `group_index`."""
    num_tokens: int | None = None
    """All packed tokens of the step over every rank, padding included; only per-token mode with a mixture-of-experts
    auxiliary loss or multi-token prediction needs it, and a plan of the step gives it."""

    def rollout_denominators(self, samples: Sequence[CountedSample]) -> Tensor:
        """The denominators D, [len(samples)] float64: active tokens of each sample's rollout over the step."""
        return torch.tensor(
            [
                sample.num_active_tokens
                if sample.rollout_id is None
                else _known(self.rollout_active_tokens, sample, "rollout_id")
                for sample in samples
            ],
            dtype=torch.float64,
        )

    def group_denominators(self, samples: Sequence[CountedSample]) -> Tensor:
        """The denominators G, [len(samples)] float64: active tokens of each sample's prompt group over the step."""
        return torch.tensor(
            [_known(self.group_active_tokens, sample, "group_index") for sample in samples],
            dtype=torch.float64,
        )


def _known(totals: Mapping[int, int], sample: CountedSample, field: str) -> int:
    identifier = getattr(sample, field)
    if identifier is None:
        raise ValueError(
            f"{sample.name} has no {field}: --loss-aggregation prompt_mean needs one on every sample"
        )
    if identifier not in totals:
        raise ValueError(
            f"{sample.name}: {field} {identifier} is not in the step's totals: they must be counted with it, "
            "before the step, over all samples that this data-parallel rank trains on in the step (step_totals; for "
            f"padded rows, padded_totals with {field})"
        )
    return totals[identifier]


def step_totals(
    samples: Sequence[CountedSample], *, data_parallel_group: dist.ProcessGroup | None = None
) -> StepTotals:
    """Counts the samples of one optimizer step over the data-parallel group.

    Every data-parallel rank must call it, once a step, with all samples that it trains on in that step; ranks that
    differ only in their context-, tensor- or pipeline-parallel place pass the same samples. One exchange of
    `(group_index, rollout_id, active tokens)` per sample over the group; none where it is None or of size 1.

    Args:
        samples: this data-parallel rank's samples of the step, over all its micro-batches.
        data_parallel_group: the data-parallel group *without* context parallelism.

    Raises:
        ValueError: a rollout whose samples belong to different prompt groups, or to one and to none.
    """
    return totals_of_counts(gather(sample_counts(samples), data_parallel_group), samples)


SAMPLE_COUNTS = np.dtype(
    [
        ("group_index", np.int64),
        ("has_group_index", np.bool_),
        ("rollout_id", np.int64),
        ("has_rollout_id", np.bool_),
        ("active_tokens", np.int64),
    ]
)
"""What one data-parallel rank tells the others of a sample. Any int64 may be an id, so none can mean None: it is 0 where
the sample has none."""

SampleCounts = NDArray[np.void]
"""An array [samples] of `SAMPLE_COUNTS`, cheap to send."""


def sample_counts(samples: Sequence[CountedSample]) -> SampleCounts:
    """The counts and ids [samples] of one rank's samples."""
    counts = np.zeros(len(samples), SAMPLE_COUNTS)
    counts["active_tokens"] = [sample.num_active_tokens for sample in samples]
    for field in ("group_index", "rollout_id"):
        ids = [getattr(sample, field) for sample in samples]
        counts[f"has_{field}"] = [value is not None for value in ids]
        counts[field] = [0 if value is None else value for value in ids]
    return counts


def totals_of_counts(
    everyone: Sequence[SampleCounts], samples: Sequence[CountedSample]
) -> StepTotals:
    """The totals of a step from the counts of every data-parallel rank, with the mappings of this rank's samples.

    Raises:
        ValueError: see `step_totals`.
    """
    step = np.concatenate(everyone)
    _check_rollouts_have_one_group(step)
    rollouts, groups = (_active_tokens_by(field, step) for field in ("rollout_id", "group_index"))
    alone = step["active_tokens"][~step["has_rollout_id"]]
    is_grouped = bool(step["has_group_index"].all())
    return StepTotals(
        num_rollouts=alone.size + len(rollouts),
        num_prompt_groups=len(groups) if is_grouped else None,
        num_active_tokens=int(step["active_tokens"].sum()),
        num_active_rollouts=int(np.count_nonzero(alone)) + sum(map(bool, rollouts.values())),
        num_active_prompt_groups=sum(map(bool, groups.values())) if is_grouped else None,
        rollout_active_tokens={
            id_: rollouts[id_] for s in samples if (id_ := s.rollout_id) is not None
        },
        group_active_tokens={
            id_: groups[id_] for s in samples if (id_ := s.group_index) is not None
        },
    )


def _active_tokens_by(field: str, counts: SampleCounts) -> dict[int, int]:
    """The active tokens of each id; samples without one are left out."""
    counts = counts[counts[f"has_{field}"]]
    ids, index = np.unique(counts[field], return_inverse=True)
    sums = np.zeros(ids.size, dtype=np.int64)
    np.add.at(sums, index, counts["active_tokens"])
    return dict(zip(ids.tolist(), sums.tolist(), strict=True))


def _check_rollouts_have_one_group(step: SampleCounts) -> None:
    rows = step[step["has_rollout_id"]]
    ids, first, index = np.unique(rows["rollout_id"], return_index=True, return_inverse=True)
    expected = rows[first][index]
    group = ["group_index", "has_group_index"]
    differs = np.flatnonzero(rows[group] != expected[group])
    if differs.size:
        at = differs[0]
        one, other = (
            int(row["group_index"]) if row["has_group_index"] else None
            for row in (expected[at], rows[at])
        )
        raise ValueError(
            f"rollout_id {int(ids[index[at]])} has samples of group_index {one} and {other}: a rollout answers one prompt"
        )
