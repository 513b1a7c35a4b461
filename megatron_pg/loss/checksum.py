"""`aggregation_checksum`: whether each sample of the step was trained on once, on the rank that counted it.

Three sums of the weights that were used, on the device, over what the step's totals say they add up to; they travel with
the metrics.

    sum of w                of weights             samples lost, twice, or wrong totals
    sum of w c_t            times coefficients     also: one twice and another never, a stale micro-batch, another window
    sum of w c_t c_rank     times that of a rank   also: samples of another data-parallel rank

c_t in [0.25, 2.25) is fixed by a hash of the sample and by the token's position (`megatron_pg.step.identity`). The hash is of
tokens, response length, loss mask, loss weights and kept sets; and of advantages, log-probs, old values and returns, those
of them that every sample of the rank had when the step was counted. Under a custom reducer, whose weights are its own, w
is 1 for every active token.

"""

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.step.counts import StepCounts
from megatron_pg.step.identity import store_hashes
from megatron_pg.step.sample import Sample

logger = logging.getLogger("megatron_pg")

CHECKSUM = "aggregation_checksum"
CHECKSUMS = (CHECKSUM, f"{CHECKSUM}_of_samples", f"{CHECKSUM}_of_ranks")
"""The three sums, as a micro-batch carries them; a step reports the first that is not 1 as `aggregation_checksum`."""
CHECKSUM_TOLERANCE = 1e-5
# Sums of a million samples in float64 are off by 2e-14, and an exchange is missed in proportion to it.
IDENTITY_TOLERANCE = 1e-11
NUM_NAMED = 5  # samples that a message names of each kind

MEANINGS = (
    "Above 1, samples were trained on twice or are missing from step_totals(); below 1, samples were dropped; either, "
    "num_microbatches is not the number that the schedule runs, or a micro-batch was packed for another context-parallel "
    "rank than the one that ran it.",
    "The weights add up to 1, and not those of the samples that the totals count: a sample or micro-batch was trained on "
    "twice and another never, a micro-batch is of another step, its masks, advantages or log-probs have changed since "
    "step_totals() or plan_step(), or one was packed for another context-parallel rank than the one that ran it.",
    "Every sample was trained on once, and not each on the data-parallel rank that passed it to step_totals() or "
    "plan_step(): samples or micro-batches were exchanged between ranks.",
)
"""The reasons for which each of the three sums is not 1, where those before it are."""


def _ranks_of(
    samples_by_rank: Mapping[int, Sequence[Sample]], counts: StepCounts
) -> dict[int, int]:
    """Find the data-parallel ranks that counted the trained samples, by identity. Coefficients stand for identities there."""
    rank_of = dict(
        zip(counts.rows["active_coefficients"].tolist(), counts.ranks.tolist(), strict=True)
    )
    trained: Iterable[Any] = itertools.chain(*samples_by_rank.values())
    return {
        sample.identity: rank_of[sample.active_coefficients]
        for sample in trained
        if sample.active_coefficients and sample.active_coefficients in rank_of
    }


def check_checksum(
    config: PolicyLossConfig,
    sums: Mapping[str, float],
    micro_batches: Sequence[Mapping[str, Tensor]] = (),
) -> float:
    """Return the first of the three sums that is not 1; for it, raise under --check-aggregation, or else warn."""
    values = [sums.get(name, 1.0) for name in CHECKSUMS]
    is_off = [not abs(value - 1.0) <= IDENTITY_TOLERANCE for value in values]
    # Where the hashes see nothing, so small a difference of the weights is rounding.
    if not any(is_off[1:]):
        is_off[0] = not abs(values[0] - 1.0) <= CHECKSUM_TOLERANCE
    if True not in is_off:
        return values[0]
    first = is_off.index(True)
    value = values[first]
    shown = f"1 {value - 1.0:+.1e}" if abs(value - 1.0) < 1e-5 else f"{value:.6f}"
    message = (
        f"{CHECKSUM} is {shown}, expected 1: the weights of the tokens that reached the loss add up to "
        f"{values[0]:.6f} times what the step's totals hold, and to {values[1]:.6f} times with every sample "
        f"weighed by what it is. {MEANINGS[first]}{_samples_at_fault(micro_batches)}"
    )
    if config.check_aggregation:
        raise RuntimeError(message)
    warn_once(CHECKSUM, f"{message} --check-aggregation makes it an error.")
    return value


def _samples_at_fault(micro_batches: Sequence[Mapping[str, Tensor]]) -> str:
    """Name the samples that this rank trained on twice, wrongly or never; "" where nothing is known of them."""
    # By window: a process that evaluates all parts of a step has each sample in every window.
    samples_by_rank, totals = defaultdict[int, list[Sample]](list), None
    for metrics in micro_batches:
        if batch := getattr(metrics, "batch", None):
            samples_by_rank[batch.window.cp_rank] += batch.samples
        totals = getattr(metrics, "totals", None) or totals
    if totals is None or not totals.knows_identities:
        return ""
    rank, trained = totals.data_parallel_rank, Counter[int | None]()
    names = dict[int | None, str]()
    for samples in samples_by_rank.values():
        store_hashes(samples, totals.hashed_fields)
        trained |= Counter(sample.identity for sample in samples if sample.num_active_tokens)
        names |= {sample.identity: sample.name for sample in samples}
    mine: Sequence[Any] = totals.counts.here.get(rank, ())
    names |= {count.identity: count.name for count in mine}
    # A sample without active tokens changes none of the sums.
    expected = Counter(count.identity for count in mine if count.num_active_tokens)
    rank_of = _ranks_of(samples_by_rank, totals.counts)
    strangers = [sample for sample in trained if sample not in expected]
    samples_by_mistake = {
        "trained on twice": [names[x] for x in trained - expected if x in expected],
        "counted on another rank": [
            f"{names[x]} (rank {rank_of[x]})" for x in strangers if x in rank_of
        ],
        "not of this step": [names[x] for x in strangers if x not in rank_of],
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
    """Warn of a subject for the first time in this process."""
    if subject not in _warned_of:
        _warned_of.add(subject)
        logger.warning("%s (said once)", message)
