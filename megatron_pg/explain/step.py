"""The step to explain: the first one that training would take with the same flags, collected by the
same `StepCollector`.
"""

import argparse
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megatron_pg.config import PlanningConfig, PolicyLossConfig
from megatron_pg.config.settings import Settings, setting
from megatron_pg.config.values import Interval
from megatron_pg.rollout_files import IteratorSource, RolloutFiles, StepCollector
from megatron_pg.rollout_files.collector import no_sample_in
from megatron_pg.step.totals import BareSample, StepTotals, step_totals

DEFAULT_NUM_GROUPS = 32
"""Prompt groups per step of drawn lengths, unless --docs-per-step is set."""
MAX_SAMPLES = 2**20
"""Maximum samples in a step without files, so that explain stays fast."""
MAX_TOKENS = 2**40
"""Maximum tokens per sample, so that a step's tokens add up in 64 bits."""
MAX_SIGMA = 10.0
"""Maximum sigma, a factor of 22026. A larger one is a number of tokens by mistake."""
MAX_SIZE = 2**31 - 1
SIZE = Interval(1, MAX_SIZE, closed=True, metavar="N")


def list_of_lengths(text: str) -> tuple[int, ...]:
    """Parse `--lengths`."""
    for part in text.split(","):
        if not (part.isdecimal() and int(part) <= MAX_TOKENS):
            expected = f"is not an integer from 0 to {MAX_TOKENS}. Use token counts"
            raise argparse.ArgumentTypeError(f"{part!r} {expected} such as 200,4000")
    return tuple(map(int, text.split(",")))


def median_and_sigma(text: str) -> tuple[float, ...]:
    """Parse `--log-normal`."""
    with contextlib.suppress(ValueError):
        median, sigma = map(float, text.split(","))
        if 0 < median <= MAX_TOKENS and 0 <= sigma <= MAX_SIGMA:
            return median, sigma
    raise argparse.ArgumentTypeError(
        f"{text!r} is not MEDIAN,SIGMA with a median above 0 and up to {MAX_TOKENS} tokens and a "
        f"sigma from 0 to {MAX_SIGMA:g}. Sigma is the logarithm's, not in tokens: 2000,1 draws "
        "mostly lengths from 2000 / e to 2000 e"
    )


@dataclass(frozen=True)
class ExplainOptions(Settings):
    """Options for the step and its display."""

    # fmt: off
    config: PolicyLossConfig = field(metadata={"flag": False})
    planning: PlanningConfig = field(metadata={"flag": False})
    unused_flags: tuple[str, ...] = field(metadata={"flag": False})
    """Words on the command line that are not flags of this command."""
    lengths: tuple[int, ...] = setting((), flag=False)
    log_normal: tuple[float, ...] = setting((), flag=False)
    vocab_size: int | None = setting(None, SIZE, """
        Token ids in the rollout files are below it. None leaves them unchecked.""", flag=False)
    group_size: int = setting(1, SIZE, """
        Consecutive samples that form a prompt group. Rollout files have their own groups.""")
    docs_per_step: int | None = setting(None, SIZE, """
        Rollouts in the step. Unset: whole groups with all --lengths, 32 drawn groups, or all rows
        of the files.""")
    seed: int = setting(0, Interval(0, 2**63 - 1, closed=True, metavar="N"), """
        Random seed for --log-normal.""")
    data_parallel_size: int = setting(1, SIZE, "Ranks DP, without context parallelism.")
    context_parallel_size: int = setting(1, SIZE, "Ranks CP per sequence.")
    num_microbatches: int = setting(1, SIZE, """
        Micro-batches M per data-parallel rank in the step.""")
    json: bool = setting(False, "Print one JSON object with every sample.")
    plot: str | None = setting(None, "Plot a token's coefficient against length.")
    html: str | None = setting(None, """
        Write all rows of --rollout-files to this HTML file: prompts, responses, rewards, and tokens
        colored by their numbers.""")
    tokenizer: str | None = setting(None, """
        Hugging Face folder, or JSON file with texts by token id, for --html.""")
    # fmt: on

    def conflicts(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield missing or duplicate sources of lengths, and flags without effect."""
        if self.html is not None and not self.planning.rollout_files:
            yield f"--html {self.html} requires --rollout-files. Add it."
        if self.tokenizer is not None and self.html is None:
            yield f"--tokenizer {self.tokenizer} has no effect without --html. Add it."
        if [self.lengths, self.log_normal, self.planning.rollout_files].count(()) != 2:
            sources = "--lengths, --log-normal and --rollout-files"
            yield (
                f"expected one source of lengths. Use one of {sources}, such as --lengths "
                "200,4000,12000."
            )


class ExplainedSample(BareSample):
    """Counted sample, with missing fields and sampling set sizes from its row in a rollout file."""

    missing_fields: tuple[str, ...] = ()
    """Fields of `Sample` that the flags require and the row lacks."""
    kept_set_sizes: tuple[int, ...] = ()
    """Sizes of the active tokens' sampling sets."""


class ExplainedStep(NamedTuple):
    """Samples of one step, and the groups that its end splits."""

    samples: tuple[ExplainedSample, ...]
    totals: StepTotals
    cut_groups: Mapping[int, tuple[int, int]]
    """Rollouts in the step and in total, by prompt group."""
    num_skipped: int
    """Number of skipped bad rows."""


def explained_step(options: ExplainOptions) -> ExplainedStep:
    """Collect the step that the options describe. Raise an error if training would, or if files
    have no samples.
    """
    planning = options.planning
    stream = _rows(options) if planning.rollout_files else _generated(options)
    collector = StepCollector(
        IteratorSource(stream),
        docs_per_step=planning.docs_per_step or MAX_SIZE,
        mode=planning.docs_per_step_mode,
        keep_prompt_groups=planning.keep_prompt_groups,
        refuse_cut_groups=options.config.loss_aggregation == "prompt_mean",
    )
    step = collector.collect()
    if step is None:  # lengths always give a step
        raise no_sample_in(planning.rollout_files, collector.num_skipped)
    cut_groups = _cut_groups(step.samples, collector.carried, stream)
    is_strict = planning.rollout_files and options.config.loss_aggregation == "prompt_mean"
    totals = step_totals(
        step.samples,
        allow_different_prompts=planning.allow_different_prompts_in_group,
        allow_different_group_sizes=planning.allow_different_group_sizes or not is_strict,
    )
    return ExplainedStep(step.samples, totals, cut_groups, step.num_skipped)


def rollout_files_of(options: ExplainOptions) -> RolloutFiles:
    """Open the rollout files as training does, except that log-probs are not required."""
    required, planning = options.config.required_sample_fields, options.planning
    return RolloutFiles(
        planning.rollout_files,
        on_bad_row=planning.on_bad_row,
        required_fields={"group_index"}.intersection(required),
        vocab_size=options.vocab_size,
        distinct_ids=planning.distinct_ids == "file",
    )


def _rows(options: ExplainOptions) -> Iterator[ExplainedSample | None]:
    """Read the rollout files as training does, without keeping tokens. Yield None for a bad row.

    A row without log-probs is valid here: weights do not depend on them, and a training script may
    compute them.
    """
    required, files = options.config.required_sample_fields, rollout_files_of(options)
    while pulled := files.pull(1):
        if (row := pulled[0]) is None:
            yield None
            continue
        sample = ExplainedSample(*(getattr(row, name) for name in BareSample._fields))
        sample.missing_fields = tuple(field for field in required if getattr(row, field) is None)
        if row.kept_tokens is not None:
            sizes = row.kept_tokens.sizes[row.loss_mask]
            sample.kept_set_sizes = tuple(sizes[sizes > 0].tolist())
        yield sample


def _generated(options: ExplainOptions) -> Iterator[ExplainedSample]:
    """Yield samples with given or drawn lengths. With --docs-per-step they are endless, because
    training reads beyond a step.
    """
    count, size, lengths = options.planning.docs_per_step, options.group_size, options.lengths
    wanted = count or (math.lcm(len(lengths), size) if lengths else DEFAULT_NUM_GROUPS * size)
    if max(wanted, size) > MAX_SAMPLES:
        remedy = "Use a smaller --group-size or --docs-per-step."
        limit = f"exceed {MAX_SAMPLES}"
        raise ValueError(f"--group-size {size} in a step of {wanted} samples {limit}. {remedy}")
    endless = itertools.cycle(lengths) if lengths else _drawn(options)
    for index, length in enumerate(itertools.islice(endless, None if count else wanted)):
        yield ExplainedSample(length, index // size, name=f"sample {index}")


def _drawn(options: ExplainOptions) -> Iterator[int]:
    median, sigma = options.log_normal
    generator = np.random.default_rng(options.seed)
    while (length := max(round(generator.lognormal(math.log(median), sigma)), 1)) <= MAX_TOKENS:
        yield length
    raise ValueError(
        f"--log-normal {median:g},{sigma:g} has drawn a length of {length:.3g} tokens, more than "
        f"{MAX_TOKENS}. Sigma is the logarithm's, not in tokens. Use a smaller one, such as 1."
    )


def _cut_groups(
    samples: Sequence[BareSample],
    carried: Sequence[BareSample],
    following: Iterable[BareSample | None],
) -> dict[int, tuple[int, int]]:
    """Find the groups that continue after the step, in the carried and the following samples."""
    latest, following_rows = (carried or samples)[-1].group_index, list(carried)
    inside = rollouts_of_groups(samples)
    if latest in inside:
        goes_on = itertools.takewhile(lambda s: s is None or s.group_index == latest, following)
        with contextlib.suppress(ValueError):  # a bad row after the step does not matter
            following_rows.extend(sample for sample in goes_on if sample)
    beyond = rollouts_of_groups(following_rows)
    return {group: (n, n + beyond[group]) for group, n in inside.items() if beyond[group]}


def rollouts_of_groups(samples: Sequence[BareSample]) -> Counter[int]:
    """Count the rollouts of each prompt group."""
    rollouts = {
        (sample.group_index, sample.rollout_id, number if sample.rollout_id is None else None)
        for number, sample in enumerate(samples)
    }
    return Counter(group for group, *_ in rollouts if group is not None)
