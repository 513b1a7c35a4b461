"""`aggregation_checksum`: whether each sample of the step was trained on once.

Two sums of the actual weights, on the device, are divided by the sums that follow from the step
totals. They are reduced with the metrics and detect

    sum of w      samples that are lost, duplicated, or missing from the totals
    sum of w c    also one sample twice and a different one never, and a stale micro-batch

c in [0.5, 1.5) is random and fixed by the sample's position in the step
(`StepCounts.coefficients_of`), and 0 for a sample outside the step. With a custom reducer, which
has its own weights, w is 1 for every active token.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.step.counts import CountedSample
from megatron_pg.step.sample import Sample

logger = logging.getLogger("megatron_pg")

CHECKSUM = "aggregation_checksum"
CHECKSUMS = (CHECKSUM, f"{CHECKSUM}_of_samples")
"""The two sums of a micro-batch. A step reports the first one that is not 1 as
`aggregation_checksum`."""
CHECKSUM_TOLERANCE = 1e-5
# Float64 sums over a million samples are off by 2e-14. A larger tolerance would miss exchanges.
NUMBERS_TOLERANCE = 1e-11
NUM_NAMED = 5  # samples that a message names per kind

MEANINGS = (
    "Above 1: samples were trained on twice or are missing from step_totals(). Below 1: samples "
    "were dropped. Either: num_microbatches differs from the schedule's number, or a micro-batch "
    "was packed for a different context-parallel rank than the one that ran it.",
    "The weights add up to 1, but belong to the wrong samples: a sample or micro-batch was trained "
    "on twice and a different one never, a micro-batch is from a different step, or samples were "
    "constructed again after step_totals() or plan_step(). Pack the counted samples, or copies of "
    "them by dataclasses.replace().",
)
"""The reason why each sum is not 1 if the sum before it is."""


def check_checksum(
    config: PolicyLossConfig,
    sums: Mapping[str, float],
    micro_batches: Sequence[Mapping[str, Tensor]] = (),
) -> float:
    """Return the first of the two sums that is not 1, after a warning, or an error with
    --check-aggregation. Return the first sum if both are 1.
    """
    values = [sums.get(name, 1.0) for name in CHECKSUMS]
    is_off = [not abs(value - 1.0) <= NUMBERS_TOLERANCE for value in values]
    # If the second sum is 1, a small difference in the first is rounding.
    if not is_off[1]:
        is_off[0] = not abs(values[0] - 1.0) <= CHECKSUM_TOLERANCE
    if True not in is_off:
        return values[0]
    first = is_off.index(True)
    value = values[first]
    shown = f"1 {value - 1.0:+.1e}" if abs(value - 1.0) < 1e-5 else f"{value:.6f}"
    message = (
        f"{CHECKSUM} is {shown}, expected 1: the token weights in the loss add up to "
        f"{values[0]:.6f} times the step totals, and to {values[1]:.6f} times with every sample "
        f"weighted by its number. {MEANINGS[first]}{_samples_at_fault(micro_batches)}"
    )
    if config.check_aggregation:
        raise RuntimeError(message)
    warn_once(CHECKSUM, f"{message} --check-aggregation makes it an error.")
    return value


def _samples_at_fault(micro_batches: Sequence[Mapping[str, Tensor]]) -> str:
    """Name the samples that this rank trained on twice, by mistake or never, or return "" if
    samples have no number.
    """
    # By window, because a process that evaluates a whole step has each sample in every window.
    samples_by_window, totals = defaultdict[int, list[Sample]](list), None
    for metrics in micro_batches:
        if batch := getattr(metrics, "batch", None):
            samples_by_window[batch.window.cp_rank] += batch.samples
        totals = getattr(metrics, "totals", None) or totals
    if totals is None or not totals.counts.are_numbered:
        return ""
    counts, rank, trained = totals.counts, totals.data_parallel_rank, Counter[int | None]()
    mine: Sequence[CountedSample] = counts.here.get(rank, ())
    names = {sample.number: sample.name for sample in mine}
    for samples in samples_by_window.values():
        trained |= Counter(sample.number for sample in samples if sample.num_active_tokens)
        names |= {sample.number: sample.name for sample in samples}
    # A sample without active tokens changes neither sum.
    expected = Counter(sample.number for sample in mine if sample.num_active_tokens)
    rank_of = dict(zip(counts.rows["number"].tolist(), counts.ranks.tolist(), strict=True))
    samples_by_mistake = {
        "trained on twice": [names[x] for x in trained - expected if x in expected],
        "counted on another rank": [
            f"{names[x]} (rank {rank_of[x]})"
            for x in trained
            if x not in expected and rank_of.get(x, rank) != rank
        ],
        "not of this step": [names[x] for x in trained if x not in rank_of],
        "never trained on": [names[x] for x in expected - trained],
    }
    listed = [
        f"{mistake}: {', '.join(samples[:NUM_NAMED])}"
        + f" and {len(samples) - NUM_NAMED} more" * (len(samples) > NUM_NAMED)
        for mistake, samples in samples_by_mistake.items()
        if samples
    ]
    return f" On data-parallel rank {rank}, {'; '.join(listed)}." if listed else ""


_warned_of: set[str] = set()


def warn_once(subject: str, message: str) -> None:
    """Warn about a subject once per process."""
    if subject not in _warned_of:
        _warned_of.add(subject)
        logger.warning("%s (logged once)", message)
