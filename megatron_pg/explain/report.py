"""What every aggregation makes of a step: the weight of a token, who gets how much of it, what Megatron does to it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_pg.config.policy_loss import required_inputs
from megatron_pg.explain.step import ExplainedStep, ExplainOptions
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation
from megatron_pg.megatron.scale_contract import scale_contract

NUM_QUANTILES = 4
FAR = 4.0
"""A divisor is far from the lengths where the loss becomes this many times sample_mean's, or one in so many."""


@dataclass(frozen=True)
class MegatronScale:
    """The factors between the local loss of a micro-batch and the gradient, see `megatron_pg.megatron.scale_contract`."""

    returned: float
    """What the package multiplies the loss by before it returns it."""
    schedule: float
    """What the schedule multiplies it by."""
    gradients: float
    """What their sum over the data- and context-parallel ranks is multiplied by."""
    net: float
    """Their product: 1, whatever the parallelism."""


@dataclass(frozen=True)
class QuantileShare:
    """A part of the samples, by length, and its share of the weight."""

    shortest: int
    longest: int
    num_samples: int
    share: float


@dataclass(frozen=True)
class AggregationReport:
    """One aggregation over the step. Per-sample lists are in the order of the step's samples."""

    formula: str
    divisor: float | None
    """L of `constant`."""
    outer_count: int
    token_weight: list[float]
    """Weight of one active token of each sample in the inner sum."""
    token_coefficient: list[float]
    """The same over the outer count: what the gradient of that token's loss is multiplied by."""
    sample_share: list[float]
    """Each sample's part of the total weight; 0 where there is none."""
    quantile_shares: list[QuantileShare]
    group_shares: dict[int, float]
    total_weight: float
    """Sum of the coefficients of all active tokens: what a loss of 1 at every token adds up to."""
    learning_rate_ratio: float | None
    """The total weight over that of `sample_mean`; None where that is 0."""
    megatron_scale: MegatronScale


@dataclass(frozen=True)
class StepReport:
    """What there is to say of a step."""

    aggregations: dict[str, AggregationReport]
    unavailable: dict[str, str]
    """The reason for each aggregation that has no report."""
    scale: MegatronScale
    """The factors of the loss mode that the flags choose, whatever the aggregation."""
    warnings: list[str]
    """One line for each thing that is likely not meant: what, why, and what to do."""


def explain_step(step: ExplainedStep, options: ExplainOptions) -> StepReport:
    """The report of every aggregation; `constant` takes the longest sample for L where the flags give none."""
    longest = max(1, *(sample.num_active_tokens for sample in step.samples))
    constant = options.config.loss_aggregation_divisor or float(longest)
    scale = _megatron_scale(step, options)
    reports: dict[str, AggregationReport] = {}
    reasons: dict[str, str] = {}
    for name, mode in AGGREGATIONS.items():
        try:
            reports[name] = _report(mode, step, constant if name == "constant" else None, scale)
        except ValueError as error:
            reasons[name] = str(error)
    warnings = [
        *_of_the_divisor(step, reports["constant"], options),
        *_of_prompt_groups(step),
        *_of_samples(step, options),
        *_of_other_ranks(step, options),
    ]
    return StepReport(reports, reasons, scale, warnings)


def _megatron_scale(step: ExplainedStep, options: ExplainOptions) -> MegatronScale:
    contract = scale_contract(
        None,
        step.totals,
        calculate_per_token_loss=options.config.calculate_per_token_loss,
        data_parallel_size=options.data_parallel_size,
        context_parallel_size=options.context_parallel_size,
        num_microbatches=options.num_microbatches,
        num_active_tokens=step.totals.num_active_tokens,
        num_local_tokens=step.totals.num_active_tokens,
    )
    factors = (contract.factor, contract.schedule_factor, contract.gradient_factor)
    return MegatronScale(*factors, net=math.prod(factors))


def _report(
    mode: Aggregation, step: ExplainedStep, divisor: float | None, scale: MegatronScale
) -> AggregationReport:
    outer_count = mode.outer_count(step.totals)
    lengths = torch.tensor([s.num_active_tokens for s in step.samples], dtype=torch.float64)
    denominators = mode.denominators(step.totals, step.samples)
    weights = torch.ones_like(lengths) / mode.divisors(denominators, divisor)
    total = mode.inner_weight(step.totals, divisor)
    shares: list[float] = (weights * lengths / (total or 1)).tolist()
    of_groups: Counter[int] = Counter()
    for sample, share in zip(step.samples, shares, strict=True):
        if sample.group_index is not None:
            of_groups[sample.group_index] += share
    # The total weight of sample_mean: 1, but for rollouts without an active token.
    reference = step.totals.num_active_rollouts / max(step.totals.num_rollouts, 1)
    return AggregationReport(
        formula=mode.formula,
        divisor=divisor,
        outer_count=outer_count,
        token_weight=weights.tolist(),
        token_coefficient=(weights / outer_count).tolist(),
        sample_share=shares,
        quantile_shares=_quantile_shares(step, shares),
        group_shares=of_groups,
        total_weight=total / outer_count,
        learning_rate_ratio=total / outer_count / reference if reference else None,
        megatron_scale=scale,
    )


def _quantile_shares(step: ExplainedStep, shares: Sequence[float]) -> list[QuantileShare]:
    """The samples in four parts of equal number, shortest first, and the share of each."""
    lengths = [sample.num_active_tokens for sample in step.samples]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    count = min(NUM_QUANTILES, len(order))
    bounds = [len(order) * part // count for part in range(count + 1)]
    parts = [order[low:high] for low, high in itertools.pairwise(bounds)]
    return [
        QuantileShare(
            lengths[part[0]], lengths[part[-1]], len(part), sum(shares[index] for index in part)
        )
        for part in parts
    ]


def _of_the_divisor(
    step: ExplainedStep, constant: AggregationReport, options: ExplainOptions
) -> Iterator[str]:
    ratio = constant.learning_rate_ratio
    if options.config.loss_aggregation_divisor is None or ratio is None:
        return
    mean = step.totals.num_active_tokens / max(step.totals.num_rollouts, 1)
    if not 1 / FAR <= ratio <= FAR:
        yield (
            f"--loss-aggregation-divisor {constant.divisor:g} is far from the lengths seen: a rollout has {mean:.4g} "
            f"active tokens on average, so the gradient is about {ratio:.3g} times that of sample_mean. SGD and "
            "--clip-grad see that factor, Adam does not: choose a divisor near the longest response, or scale them."
        )


def _of_prompt_groups(step: ExplainedStep) -> Iterator[str]:
    for group, (inside, whole) in step.cut_groups.items():
        yield (
            f"The step ends inside prompt group {group}: {inside} of its {whole} samples are in it. prompt_mean then "
            "gives the prompt a full weight in two steps, and is refused; group-relative advantages need the whole "
            "group. Make --docs-per-step a multiple of the group size, or give --keep-prompt-groups."
        )
    sizes = Counter(sample.group_index for sample in step.samples)
    whole_sizes = [
        size for group, size in sizes.items() if group is not None and group not in step.cut_groups
    ]
    if len(set(whole_sizes)) > 1:
        yield (
            f"Prompt groups have {min(whole_sizes)} to {max(whole_sizes)} samples. prompt_mean gives each prompt the "
            "same weight, so a sample of a small group counts for more; sample_mean gives each sample the same, so a "
            "prompt with more samples counts for more. Choose which of the two is meant."
        )


def _of_samples(step: ExplainedStep, options: ExplainOptions) -> Iterator[str]:
    if count := sum(sample.num_active_tokens == 0 for sample in step.samples):
        yield (
            f"{count} of {len(step.samples)} samples have no active token. They add nothing to the loss and still "
            "count in N (sample_mean, constant), so that filtering does not change the scale."
        )
    flags = required_inputs(options.config)
    missing = Counter(field for sample in step.samples for field in sample.missing_fields)
    for field, count in missing.items():
        yield (
            f"{count} of {len(step.samples)} samples have no {field}, needed by {' and '.join(flags[field])}. They are "
            "counted here. Training that takes it from the files stops at such a row, or leaves it out with "
            "--on-bad-row skip."
        )


def _of_other_ranks(step: ExplainedStep, options: ExplainOptions) -> Iterator[str]:
    """A step of `at_least` keeps all that its windows brought, and how much that is depends on who pulls them."""
    planning, data_size = options.planning, options.data_parallel_size
    count = planning.docs_per_step
    if count is None or planning.docs_per_step_mode != "at_least":
        return
    minds_groups = planning.keep_prompt_groups or options.config.loss_aggregation == "prompt_mean"
    has_rollouts = any(sample.rollout_id is not None for sample in step.samples)
    if data_size > 1 and (count % data_size or minds_groups or has_rollouts or step.num_skipped):
        yield (
            f"The step is that of one data-parallel rank. With --docs-per-step-mode at_least, {data_size} ranks that "
            "pull rows at once may keep others beyond --docs-per-step; exact steps are the same at every size."
        )
