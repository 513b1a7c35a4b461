"""Samples of which only the counts and ids are known: enough for the totals of a step and its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor

from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals, step_totals


@dataclass(frozen=True)
class CountedSample:
    """What an aggregation asks of a :class:`~megatron_pg.step.sample.Sample`, without its tokens."""

    num_active_tokens: int
    group_index: int | None = None
    rollout_id: int | None = None
    name: str = "sample"


def counted_totals(
    samples: Sequence[CountedSample], *, data_parallel_group: dist.ProcessGroup | None = None
) -> StepTotals:
    """:func:`~megatron_pg.loss.aggregation.step_totals` of counted samples; every data-parallel rank must call it."""
    return step_totals(cast(Sequence[Sample], samples), data_parallel_group=data_parallel_group)


def counted_denominators(
    mode: Aggregation, totals: StepTotals, samples: Sequence[CountedSample]
) -> Tensor | None:
    """[len(samples)] float64 D or G of each sample, on the host; None for a mode that divides by neither."""
    return mode.denominators(totals, cast(Sequence[Sample], samples))
