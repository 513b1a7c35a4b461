"""The step to explain: which samples it holds, of how many active tokens, in which prompt groups."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_pg.aggregation import StepTotals
from megatron_pg.counted import CountedSample, counted_totals
from megatron_pg.explain.options import LengthSource

DEFAULT_NUM_GROUPS = 32
"""Prompt groups of a step of drawn lengths, unless --docs-per-step says otherwise."""

WINDOW_ROWS = 256
"""Rows of a rollout file that are held at a time."""


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
    """The step that the options describe.

    Raises:
        ValueError: a rollout file that cannot be read, or has no sample.
        FileNotFoundError: a rollout file that does not exist.
    """
    if source.rollout_files is not None:
        return _step_of_files(source.rollout_files, source.docs_per_step)
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


def _step_of_files(paths: Sequence[str], docs_per_step: int | None) -> ExplainedStep:
    """The first rollouts of the files. Samples of a rollout and of a prompt group follow each other there."""
    stream = _counted_samples(paths)
    samples: list[CountedSample] = []
    num_documents = 0
    latest: int | None = None
    beyond: CountedSample | None = None
    for sample in stream:
        begins_document = sample.rollout_id is None or sample.rollout_id != latest
        if begins_document and num_documents == docs_per_step:
            beyond = sample
            break
        num_documents += begins_document
        latest = sample.rollout_id
        samples.append(sample)
    if not samples:
        raise ValueError(f"--rollout-files {' '.join(paths)}: no sample in them")
    return ExplainedStep(
        tuple(samples), counted_totals(samples), _cut_groups(samples, beyond, stream)
    )


def _cut_groups(
    samples: Sequence[CountedSample], beyond: CountedSample | None, stream: Iterator[CountedSample]
) -> dict[int, tuple[int, int]]:
    """The group that goes on after the step's last sample, if it does."""
    group = samples[-1].group_index
    if beyond is None or group is None or beyond.group_index != group:
        return {}
    inside = sum(1 for sample in samples if sample.group_index == group)
    rest = itertools.takewhile(lambda sample: sample.group_index == group, stream)
    return {group: (inside, inside + 1 + sum(1 for _ in rest))}


def _counted_samples(paths: Sequence[str]) -> Iterator[CountedSample]:
    """The samples of the files in order, without their tokens."""
    from megatron_pg.rollout_files import RolloutFiles

    files = RolloutFiles(paths)
    while window := files.pull(WINDOW_ROWS):
        for sample in window:
            if sample is not None:
                yield CountedSample(
                    sample.num_active_tokens, sample.group_index, sample.rollout_id, sample.name
                )
