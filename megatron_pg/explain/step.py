"""The step to explain: which samples it holds, of how many active tokens, in which prompt groups.

It is the first that training would take with the same flags: ``StepCollector`` takes it here too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_pg.explain.files import CountedFiles, FileSample
from megatron_pg.explain.flags import MAX_COUNT, MAX_TOKENS
from megatron_pg.explain.options import ExplainOptions, LengthSource
from megatron_pg.step import IteratorSource, SampleSource, StepCollector
from megatron_pg.step.sources import no_sample_in
from megatron_pg.step.totals import BareSample, StepTotals, step_totals

DEFAULT_NUM_GROUPS = 32
"""Prompt groups of a step of drawn lengths, unless --docs-per-step says otherwise."""

MAX_SAMPLES = 2**20
"""Of a step that is not read from files: far beyond any, and quickly made."""

CHUNK = 1024
"""Lengths drawn at a time."""


@dataclass(frozen=True)
class ExplainedStep:
    """The samples of one step, and what is known of the groups that it was cut from."""

    samples: tuple[BareSample, ...]
    totals: StepTotals
    cut_groups: Mapping[int, tuple[int, int]]
    """Samples in the step and samples in all, of each prompt group that the step's end cuts."""
    num_skipped: int = 0
    """Bad rows that were passed on the way."""

    @property
    def group_sizes(self) -> Counter[int]:
        """Samples of each prompt group in the step."""
        return Counter(s.group_index for s in self.samples if s.group_index is not None)

    @property
    def missing_fields(self) -> Counter[str]:
        """By field of ``Sample`` that the flags ask for: how many samples of the files have none."""
        of_files = (sample for sample in self.samples if isinstance(sample, FileSample))
        return Counter(field for sample in of_files for field in sample.missing_fields)


def explained_step(options: ExplainOptions) -> ExplainedStep:
    """The step that the options describe.

    Raises:
        ValueError: a step that training would refuse, a rollout file that cannot be read or has no sample, or lengths
            that are out of range.
        FileNotFoundError: a rollout file that does not exist.
    """
    planning = options.planning
    source = _source(options)
    collector = StepCollector(
        source,
        docs_per_step=planning.docs_per_step or MAX_COUNT,
        mode=planning.docs_per_step_mode,
        keep_prompt_groups=planning.keep_prompt_groups,
        refuse_cut_groups=options.config.loss_aggregation == "prompt_mean",
    )
    collected = collector.collect()
    if collected is None:
        # Lengths always give a step.
        raise no_sample_in(planning.rollout_files, collector.state().num_skipped)
    samples = collected.samples
    carried = [sample for _, sample in collector.state().carried]
    return ExplainedStep(
        samples,
        step_totals(samples),
        _cut_groups(samples, carried, source),
        collected.num_skipped,
    )


def _source(options: ExplainOptions) -> SampleSource[BareSample]:
    if options.planning.rollout_files:
        return CountedFiles(options.planning, options.config, options.vocab_size)
    source, count = options.source, options.planning.docs_per_step
    wanted = count or _default_count(source)
    if max(wanted, source.group_size) > MAX_SAMPLES:
        raise ValueError(
            f"--group-size {source.group_size} in a step of {wanted} samples: expected at most {MAX_SAMPLES} of either; "
            "give a smaller --group-size or --docs-per-step"
        )
    # Without --docs-per-step the step ends where the lengths do.
    samples = itertools.islice(_samples(source), None if count else wanted)
    return IteratorSource(samples)


def _default_count(source: LengthSource) -> int:
    if source.lengths is None:
        return DEFAULT_NUM_GROUPS * source.group_size
    return math.lcm(len(source.lengths), source.group_size)


def _samples(source: LengthSource) -> Iterator[BareSample]:
    """Endless: training reads on beyond a step, to see whether a prompt group goes on."""
    lengths = _drawn(source) if source.lengths is None else itertools.cycle(source.lengths)
    for index, length in enumerate(lengths):
        yield BareSample(length, index // source.group_size, name=f"sample {index}")


def _drawn(source: LengthSource) -> Iterator[int]:
    median, sigma = source.log_normal or (1.0, 0.0)
    generator = np.random.default_rng(source.seed)
    while True:
        drawn = generator.lognormal(math.log(median), sigma, size=CHUNK)
        for length in np.maximum(np.rint(drawn), 1).tolist():
            if length > MAX_TOKENS:
                raise ValueError(
                    f"--log-normal {median:g},{sigma:g} has drawn a length of {length:.3g} tokens, more than {MAX_TOKENS}: "
                    "sigma is of the logarithm and not in tokens; give a smaller one, such as 1"
                )
            yield int(length)


def _cut_groups(
    samples: Sequence[BareSample], carried: Sequence[BareSample], source: SampleSource[BareSample]
) -> dict[int, tuple[int, int]]:
    """The groups that go on after the step: in what was pulled with it, and in what comes next."""
    inside = Counter(sample.group_index for sample in samples)
    beyond = Counter(sample.group_index for sample in carried)
    latest = (carried or samples)[-1].group_index
    if latest is not None and latest in inside:
        beyond[latest] += _num_following(source, latest)
    return {
        group: (inside[group], inside[group] + count)
        for group, count in beyond.items()
        if group is not None and group in inside and count
    }


def _num_following(source: SampleSource[BareSample], group: int) -> int:
    """The samples of a group that come next."""
    count = 0
    while True:
        try:
            slots = source.pull(1)
        except ValueError:  # a bad row after the step is nothing of it
            return count
        if not slots or (slots[0] is not None and slots[0].group_index != group):
            return count
        count += slots[0] is not None
