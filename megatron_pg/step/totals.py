"""The totals of a step: counts over every data-parallel rank and micro-batch, known before the step begins."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
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
        known = [_known(self.rollout_active_tokens, sample, "rollout_id") for sample in samples]
        return torch.tensor(known, dtype=torch.float64)

    def group_denominators(self, samples: Sequence[CountedSample]) -> Tensor:
        """The denominators G, [len(samples)] float64: active tokens of each sample's prompt group over the step."""
        known = [_known(self.group_active_tokens, sample, "group_index") for sample in samples]
        return torch.tensor(known, dtype=torch.float64)


def _known(totals: Mapping[int, int], sample: CountedSample, field: str) -> int:
    identifier = getattr(sample, field)
    if identifier is None and field == "rollout_id":
        return sample.num_active_tokens
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


SampleCounts = list[tuple[int | None, int | None, int]]
"""What one data-parallel rank tells the others: `group_index`, `rollout_id` and active tokens of each of its samples."""


def sample_counts(samples: Sequence[CountedSample]) -> SampleCounts:
    """The counts and ids of one rank's samples."""
    return [(sample.group_index, sample.rollout_id, sample.num_active_tokens) for sample in samples]


def totals_of_counts(
    everyone: Sequence[SampleCounts],
    samples: Sequence[CountedSample],
    num_tokens: int | None = None,
) -> StepTotals:
    """The totals of a step from the counts of every data-parallel rank, with the mappings of this rank's samples.

    Raises:
        ValueError: see `step_totals`.
    """
    groups: Counter[int | None] = Counter()
    rollouts: Counter[object] = Counter()
    group_of_rollout: dict[object, int | None] = {}
    for number, (group, rollout_id, num_active) in enumerate(itertools.chain(*everyone)):
        rollout = ("sample", number) if rollout_id is None else rollout_id
        groups[group] += num_active
        rollouts[rollout] += num_active
        if (other := group_of_rollout.setdefault(rollout, group)) != group:
            raise ValueError(
                f"rollout_id {rollout} has samples of group_index {other} and {group}: a rollout answers one prompt"
            )
    is_grouped = None not in groups
    own_rollouts, own_groups = {s.rollout_id for s in samples}, {s.group_index for s in samples}
    return StepTotals(
        num_rollouts=len(rollouts),
        num_prompt_groups=len(groups) if is_grouped else None,
        num_active_tokens=groups.total(),
        num_active_rollouts=sum(map(bool, rollouts.values())),
        num_active_prompt_groups=sum(map(bool, groups.values())) if is_grouped else None,
        rollout_active_tokens={id_: rollouts[id_] for id_ in own_rollouts if id_ is not None},
        group_active_tokens={id_: groups[id_] for id_ in own_groups if id_ is not None},
        num_tokens=num_tokens,
    )
