"""Step totals: counts over every data-parallel rank and micro-batch, known before the step."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_pg.step.counts import BareSample as BareSample
from megatron_pg.step.counts import CountedSample, Indices, SampleCounts, StepCounts
from megatron_pg.step.ids import check_ids, odd_group
from megatron_pg.step.sample import number_samples
from megatron_pg.step.values import host_float64

AnySample = TypeVar("AnySample", bound=CountedSample)


@dataclass(frozen=True)
class StepTotals:
    """Counts of one optimizer step over all data-parallel ranks, equal on every rank, built by
    `step_totals`.
    """

    num_rollouts: int
    """N: rollouts, including those without an active token."""
    num_prompt_groups: int | None
    """P: prompt groups, including those without an active token. None if samples lack a
    `group_index`."""
    num_active_tokens: float
    """T: active tokens, a whole number."""
    rollout_active_tokens: Mapping[int, float]
    """D by `rollout_id`."""
    group_active_tokens: Mapping[int, float]
    """G by `group_index`."""
    num_tokens: int | None = None
    """All tokens of the step's samples over every rank, from `plan_step`. Per-token mode with a
    router loss needs it."""
    counts_loss_weights: bool = False
    """Whether D, G and T are sums of loss weights."""
    counts_accepted: bool = False
    """Whether D, G and T count only tokens that no rejection drops."""
    odd_group: str = field(default="", compare=False)
    """Description of a prompt group with an unusual number of rollouts, "" if all are equal or may
    differ."""
    data_parallel_rank: int = field(default=0, compare=False)
    """The rank that counted these totals."""
    counts: StepCounts = field(
        default_factory=functools.partial(StepCounts.of, ()), compare=False, repr=False
    )
    """The counted samples."""
    _expected_sums: dict[Hashable, list[float]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def expected_sums(
        self, divisors_of: Callable[[Sequence[CountedSample]], Tensor], key: Hashable
    ) -> list[float]:
        """Compute the two checksum sums over the samples of all ranks, once per `key`.

        The first sums each sample's active tokens (or loss weights) over its divisor. The second
        sums the same quotients times the sample's coefficient.
        """
        if key not in self._expected_sums:
            sizes = torch.from_numpy(_sizes(self.counts, loss_weights=True))
            parts = sizes / divisors_of(self.counts)
            coefficients = torch.from_numpy(self.counts.coefficients_of(self.counts))
            self._expected_sums[key] = [float(parts.sum()), float((parts * coefficients).sum())]
        return self._expected_sums[key]

    def rollout_denominators(self, samples: Sequence[CountedSample]) -> Tensor:
        """Look up D, the active tokens in each sample's rollout over the step, [len(samples)]
        float64.
        """
        if samples is self.counts:
            return self._denominators(self.counts.first_of_rollout)
        own, rollouts = self._size, self.rollout_active_tokens
        return host_float64(
            [
                own(s) if s.rollout_id is None else _known(rollouts, "rollout_id", number, s)
                for number, s in enumerate(samples)
            ]
        )

    def group_denominators(self, samples: Sequence[CountedSample]) -> Tensor:
        """Look up G, the active tokens in each sample's prompt group over the step, [len(samples)]
        float64.
        """
        if samples is self.counts and self.counts.has("group_index").all():
            return self._denominators(self.counts.first_of_group)
        groups = self.group_active_tokens
        return host_float64([_known(groups, "group_index", *each) for each in enumerate(samples)])

    def _denominators(self, first: Indices) -> Tensor:
        sizes = _sizes(self.counts, self.counts_loss_weights, accepted=self.counts_accepted)
        return torch.from_numpy(self.counts.sums_of(first, sizes))

    def _size(self, sample: CountedSample) -> float:
        """Return D of a sample that is a rollout."""
        if self.counts_accepted:
            return sample.accepted_size or 0.0
        weight = sample.loss_weight if self.counts_loss_weights else None
        return sample.num_active_tokens if weight is None else weight

    def counted_in(self, denominator: str, *, accepted: bool = False) -> StepTotals:
        """Return totals with D, G and T over the loss mask ("mask") or loss weights ("weights").

        Args:
            denominator: "mask" or "weights".
            accepted: count only tokens that no rejection drops.

        Raises:
            ValueError: weights are requested but no sample has any, or accepted tokens are
                requested but a sample did not go through `accepted_samples`.
        """
        if accepted:
            return self.counted_in(denominator)._accepted
        if denominator == "mask" or not self.num_rollouts:
            return self
        if not self.counts.has("loss_weight").any():
            raise ValueError(
                "--loss-weight-denominator weights requires loss_weights, which no sample of the "
                "step has. Pass Sample(loss_weights=...) or remove the flag."
            )
        return self._in_loss_weights

    @functools.cached_property
    def _in_loss_weights(self) -> StepTotals:
        sizes = _sizes(self.counts, loss_weights=True)
        return dataclasses.replace(
            self, counts_loss_weights=True, **_active_tokens(self.counts, sizes)
        )

    @functools.cached_property
    def _accepted(self) -> StepTotals:
        is_counted = self.counts.has("accepted_size")
        if not is_counted.all() or (self.num_rollouts and not len(self.counts)):
            first = int(np.argmin(is_counted)) if len(is_counted) else 0
            name = self.counts.place(first) if len(is_counted) else "these totals"
            raise ValueError(
                f"--rejection-denominator accepted: {name} did not go through accepted_samples. "
                "Call samples = accepted_samples(config, samples) before plan_step or step_totals, "
                "or use --rejection-denominator original."
            )
        sizes = _sizes(self.counts, accepted=True)
        return dataclasses.replace(self, counts_accepted=True, **_active_tokens(self.counts, sizes))


def _known(totals: Mapping[int, float], field: str, number: int, sample: CountedSample) -> float:
    identifier, name = getattr(sample, field), sample.name or f"sample {number}"
    if identifier is None:
        raise ValueError(
            f"{name} has no {field}, which --loss-aggregation prompt_mean requires of every sample"
        )
    if identifier not in totals:
        raise ValueError(
            f"{name}: {field} {identifier} is not in the step totals. Count all samples of this "
            "data-parallel rank with it before the step (step_totals, or for padded rows "
            f"padded_totals with {field})."
        )
    return totals[identifier]


def step_totals(
    samples: Sequence[CountedSample],
    *,
    data_parallel_group: dist.ProcessGroup | None = None,
    allow_different_prompts: bool = False,
    samples_per_group: int | None = None,
    allow_different_group_sizes: bool = False,
) -> StepTotals:
    """Count the samples of one optimizer step over the data-parallel group.

    Every data-parallel rank must call it once per step, with all its samples of the step. Ranks
    that differ only in their context-, tensor- or pipeline-parallel rank pass the same samples. It
    takes one exchange over the group, of 64 bytes per sample, and a second one, for a name, if
    prompt groups differ in size.

    Args:
        samples: the samples of this data-parallel rank, over all its micro-batches of the step.
        data_parallel_group: the data-parallel group *without* context parallelism. None: only this
            rank.
        allow_different_prompts: the samples of a prompt group may have different prompts
            (`--allow-different-prompts-in-group`).
        samples_per_group: the number of rollouts in every prompt group. Any other size is an error,
            because the end of the step may have split the group. None: any size, but the prompt
            mean then rejects different sizes on every rank.
        allow_different_group_sizes: the prompt mean accepts prompt groups of different sizes, for
            dynamic sampling and agentic rollouts (`--allow-different-group-sizes`).

    Raises:
        ValueError: a prompt group does not have `samples_per_group` rollouts, a rollout is in
            several prompt groups, ranks or files, or a prompt group has different prompts.
    """
    counts, _, _ = StepCounts.over_ranks(
        lambda: (sample_counts(samples), None, None), data_parallel_group
    )
    return totals_of_counts(
        counts,
        counts.rank,
        allow_different_prompts=allow_different_prompts,
        samples_per_group=samples_per_group,
        allow_different_group_sizes=allow_different_group_sizes,
    )


def sample_counts(samples: Sequence[CountedSample]) -> SampleCounts:
    """Give one rank's samples numbers, and collect their counts and ids."""
    number_samples(samples)
    return list(map(BareSample._make, map(operator.attrgetter(*BareSample._fields), samples)))


def totals_of_counts(
    everyone: StepCounts | Sequence[SampleCounts],
    data_parallel_rank: int,
    num_tokens: int | None = None,
    *,
    allow_different_prompts: bool = False,
    samples_per_group: int | None = None,
    allow_different_group_sizes: bool = False,
) -> StepTotals:
    """Compute step totals from the counts of every data-parallel rank, as in `step_totals`. All
    ranks call it.
    """
    counts = everyone if isinstance(everyone, StepCounts) else StepCounts.of(everyone)
    groups = check_ids(
        counts, allow_different_prompts=allow_different_prompts, samples_per_group=samples_per_group
    )
    may_differ = allow_different_group_sizes or samples_per_group is not None
    return StepTotals(
        num_rollouts=int(counts.is_first_of_rollout.sum()),
        num_prompt_groups=len(groups.first) if counts.has("group_index").all() else None,
        num_tokens=num_tokens,
        odd_group="" if may_differ else odd_group(counts, groups),
        data_parallel_rank=data_parallel_rank,
        counts=counts,
        **_active_tokens(counts, _sizes(counts)),
    )


def _sizes(
    counts: StepCounts, loss_weights: bool = False, *, accepted: bool = False
) -> NDArray[Any]:
    """Return each sample's contribution to D, G and T, [samples]."""
    if accepted:
        return np.asarray(counts.rows["accepted_size"])
    active: NDArray[Any] = counts.rows["num_active_tokens"].astype(np.int64)
    weights = counts.rows["loss_weight"]
    return np.where(counts.has("loss_weight"), weights, active) if loss_weights else active


def _active_tokens(counts: StepCounts, sizes: NDArray[Any]) -> dict[str, Any]:
    """Compute T, D and G for `StepTotals`, by field name."""

    def by_id(field: str, first: Indices) -> dict[int, float]:
        of_things = np.flatnonzero(counts.has(field) & (first == np.arange(len(counts))))
        sums = counts.sums_of(first, sizes)[of_things].astype(sizes.dtype)
        return dict(zip(counts.rows[field][of_things].tolist(), sums.tolist(), strict=True))

    return {
        "num_active_tokens": sizes.sum().item(),
        "rollout_active_tokens": by_id("rollout_id", counts.first_of_rollout),
        "group_active_tokens": by_id("group_index", counts.first_of_group),
    }
