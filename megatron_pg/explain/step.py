"""The step to explain: which samples it holds, of how many active tokens, in which prompt groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_pg.aggregation import StepTotals
from megatron_pg.counted import CountedSample, counted_totals
from megatron_pg.explain.options import LengthSource

DEFAULT_NUM_GROUPS = 32
"""Prompt groups of a step of drawn lengths, unless --docs-per-step says otherwise."""


@dataclass(frozen=True)
class ExplainedStep:
    """The samples of one step, and what is known of the groups that it was cut from."""

    samples: tuple[CountedSample, ...]
    totals: StepTotals
    cut_groups: Mapping[int, tuple[int, int]]
    """Samples in the step and samples in all, of each prompt group that the step's end cuts."""

    @property
    def group_sizes(self) -> Counter[int]:
        """Samples of each prompt group in the step."""
        return Counter(s.group_index for s in self.samples if s.group_index is not None)


def explained_step(source: LengthSource) -> ExplainedStep:
    """The step that the options describe."""
    size = source.group_size
    lengths = _lengths(source)
    samples = tuple(
        CountedSample(length, group_index=index // size, name=f"sample {index}")
        for index, length in enumerate(lengths)
    )
    in_last_group = len(samples) % size
    cut = {len(samples) // size: (in_last_group, size)} if in_last_group else {}
    return ExplainedStep(samples, counted_totals(samples), cut)


def _lengths(source: LengthSource) -> list[int]:
    """Active tokens of each sample of the step."""
    if source.lengths is not None:
        given = source.lengths
        count = source.docs_per_step or math.lcm(len(given), source.group_size)
        return [given[index % len(given)] for index in range(count)]
    median, sigma = source.log_normal or (1.0, 0.0)
    count = source.docs_per_step or DEFAULT_NUM_GROUPS * source.group_size
    drawn = np.random.default_rng(source.seed).lognormal(math.log(median), sigma, size=count)
    return [int(length) for length in np.maximum(np.rint(drawn), 1)]
