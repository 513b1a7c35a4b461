"""Every aggregation of a step: the weight of a token, its shares, and the factors of Megatron."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_pg.config.policy_loss import required_inputs
from megatron_pg.explain.step import ExplainedSample, ExplainedStep, ExplainOptions
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation
from megatron_pg.megatron.scale_contract import scale_contract
from megatron_pg.step.totals import StepTotals

Report = Mapping[str, Any]
"""A report as `--json` prints it; the tables and the picture are drawn from it."""
NUM_QUANTILES = 4
FAR = 4.0
"""A divisor is far from the lengths where the loss becomes this many times sample_mean's, or one in so many."""


def explain_step(step: ExplainedStep, options: ExplainOptions) -> Report:
    """Return the report of a step; `constant` takes the longest sample for L where the flags give none."""
    totals, config, samples = step.totals, options.config, step.samples
    lengths = [sample.num_active_tokens for sample in samples]
    parallelism: dict[str, Any] = {
        "data_parallel_size": options.data_parallel_size,
        "context_parallel_size": options.context_parallel_size,
        "num_microbatches": options.num_microbatches,
        "calculate_per_token_loss": config.calculate_per_token_loss,
    }
    contract = scale_contract(None, totals, **parallelism)
    factors = (contract.factor, contract.schedule_factor, contract.gradient_factor)
    names = ("returned", "schedule", "gradients", "net")
    scale = dict(zip(names, (*factors, math.prod(factors)), strict=True))
    constant = config.loss_aggregation_divisor or float(max(1, *lengths))
    counted = totals.counted_in(config.loss_weight_denominator)
    reports: dict[str, Report] = {}
    reasons: dict[str, str] = {}
    for name, mode in AGGREGATIONS.items():
        try:
            found = _aggregation_report(mode, step, counted, constant if mode.needs else None)
            reports[name] = found | {"megatron_scale": scale}
        except ValueError as error:
            reasons[name] = str(error)
    ratio = reports["constant"]["learning_rate_ratio"]
    return {
        "step": {
            "num_samples": len(lengths),
            "num_rollouts": totals.num_rollouts,
            "num_prompt_groups": totals.num_prompt_groups,
            "num_active_tokens": totals.num_active_tokens,
            "num_skipped": step.num_skipped,
            "active_tokens": lengths,
            "group_index": [sample.group_index for sample in samples],
            "rollout_id": [sample.rollout_id for sample in samples],
            "kept_sets": _kept_sets(samples),
        },
        "parallelism": parallelism,
        "loss_aggregation": config.loss_aggregation,
        "aggregations": reports,
        "regularizers": _regularizers(options, reports),
        "unavailable": reasons,
        "warnings": [*_of_the_lengths(step, options, ratio), *_of_the_flags(step, options)],
        "unused_flags": options.unused_flags,
    }


def _regularizers(options: ExplainOptions, reports: Mapping[str, Report]) -> Report | None:
    """Return the aggregation of the KL and entropy terms; None without either term, or where a custom reducer weighs the loss."""
    config = options.config
    policy = config.loss_aggregation
    has_term = config.kl_loss_coef or config.entropy_coef
    if not has_term or AGGREGATIONS.is_replaced(config) or policy not in reports:
        return None
    name = policy if config.regularizer_aggregation == "loss" else "sample_mean"
    both = (reports[each]["token_coefficient"] for each in (name, policy))
    # Of one active token of each sample: the coefficient in those terms over that in the policy loss.
    relative = [own / of_policy for own, of_policy in zip(*both, strict=True)]
    return {"aggregation": name, "relative_coefficient": relative}


def _kept_sets(samples: Sequence[ExplainedSample]) -> dict[str, float] | None:
    """Count the active tokens with a kept set, and the sets' sizes; None without any."""
    sizes = [size for sample in samples for size in sample.kept_set_sizes]
    if not sizes:
        return None
    return {"num_tokens": len(sizes), "mean_size": sum(sizes) / len(sizes), "largest": max(sizes)}


def _aggregation_report(
    mode: Aggregation, step: ExplainedStep, totals: StepTotals, divisor: float | None
) -> dict[str, Any]:
    """Report one aggregation over the step, its denominators those of `totals`; lists are in the order of its samples."""
    lengths = [sample.num_active_tokens for sample in step.samples]
    # Of a sample's tokens together: their number, or the sum of their loss weights.
    sizes = [
        sample.num_active_tokens if sample.loss_weight is None else sample.loss_weight
        for sample in step.samples
    ]
    sample_mean = AGGREGATIONS["sample_mean"]
    outer_count = mode.outer_count(totals)
    weights = 1.0 / mode.divisors_of(totals, step.samples, divisor)
    total = mode.expected_sums(totals, divisor)[0]
    of_samples = weights * torch.tensor(sizes, dtype=torch.float64)
    shares: list[float] = (of_samples / (total or 1)).tolist()
    group_shares: dict[int, float] = {}
    for sample, share in zip(step.samples, shares, strict=True):
        if sample.group_index is not None:
            group_shares[sample.group_index] = group_shares.get(sample.group_index, 0.0) + share
    reference = sample_mean.expected_sums(totals)[0] / sample_mean.outer_count(totals)
    return {
        "formula": mode.formula,
        "divisor": divisor,
        "outer_count": outer_count,
        # Of one active token of each sample, with a loss weight of 1: in the inner sum, and over the outer count, which is what the gradient of
        # that token's loss is multiplied by.
        "token_weight": weights.tolist(),
        "token_coefficient": (weights / outer_count).tolist(),
        "sample_share": shares,
        "quantile_shares": _quantile_shares(lengths, shares),
        "group_shares": group_shares,
        # What a loss of 1 at every token adds up to.
        "total_weight": total / outer_count,
        "learning_rate_ratio": total / outer_count / reference if reference else None,
    }


def _quantile_shares(lengths: Sequence[int], shares: Sequence[float]) -> list[dict[str, float]]:
    """Cut the samples into four parts of equal number, shortest first, with the share of each."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    count = min(NUM_QUANTILES, len(order))
    bounds = [len(order) * part // count for part in range(count + 1)]
    return [
        {
            "shortest": lengths[order[low]],
            "longest": lengths[order[high - 1]],
            "num_samples": high - low,
            "share": sum(shares[index] for index in order[low:high]),
        }
        for low, high in itertools.pairwise(bounds)
    ]


def _of_the_lengths(
    step: ExplainedStep, options: ExplainOptions, ratio: float | None
) -> Iterator[str]:
    """Warn of likely mistakes, with reason and remedy; `ratio` is the learning rate ratio of `constant`."""
    totals, divisor = step.totals, options.config.loss_aggregation_divisor
    if divisor is not None and ratio is not None and not 1 / FAR <= ratio <= FAR:
        mean = totals.num_active_tokens / totals.num_rollouts
        yield (
            f"--loss-aggregation-divisor {divisor:g} is far from the lengths seen: a rollout has {mean:.4g} "
            f"active tokens on average, so the gradient is about {ratio:.3g} times that of sample_mean. SGD and "
            "--clip-grad see that factor, Adam does not: choose a divisor near the longest response, or scale them."
        )
    for group, (inside, whole) in step.cut_groups.items():
        yield (
            f"The step ends inside prompt group {group}: {inside} of its {whole} samples are in it. prompt_mean then "
            "gives the prompt a full weight in two steps, and is refused; group-relative advantages need the whole "
            "group. Make --docs-per-step a multiple of the group size, or give --keep-prompt-groups."
        )
    groups = Counter(sample.group_index for sample in step.samples)
    sizes = {n for group, n in groups.items() if group is not None and group not in step.cut_groups}
    if len(sizes) > 1:
        yield (
            f"Prompt groups have {min(sizes)} to {max(sizes)} samples. prompt_mean gives each prompt the same weight, "
            "so a sample of a small group counts for more; sample_mean gives each sample the same, so a prompt with "
            "more samples counts for more. Choose which of the two is meant."
        )
    if count := sum(sample.num_active_tokens == 0 for sample in step.samples):
        yield (
            f"{count} of {len(step.samples)} samples have no active token. They add nothing to the loss and still "
            "count in N (sample_mean, constant), so that filtering does not change the scale."
        )


def _of_the_flags(step: ExplainedStep, options: ExplainOptions) -> Iterator[str]:
    """Warn of fields that rows lack, and of differences on other ranks."""
    flags = required_inputs(options.config)
    missing = Counter(field for sample in step.samples for field in sample.missing_fields)
    for field, count in missing.items():
        yield (
            f"{count} of {len(step.samples)} samples have no {field}, needed by {' and '.join(flags[field])}. They are "
            "counted here. Training that takes it from the files stops at such a row, or leaves it out with "
            "--on-bad-row skip."
        )
    planning, data_size = options.planning, options.data_parallel_size
    if planning.docs_per_step is None or planning.docs_per_step_mode != "at_least":
        return
    # Such a step keeps all that its windows brought, and how much that is depends on who pulls them.
    depends = (
        planning.docs_per_step % data_size > 0
        or planning.keep_prompt_groups
        or options.config.loss_aggregation == "prompt_mean"
        or any(sample.rollout_id is not None for sample in step.samples)
        or step.num_skipped > 0
    )
    if data_size > 1 and depends:
        yield (
            f"The step is that of one data-parallel rank. With --docs-per-step-mode at_least, {data_size} ranks that "
            "pull rows at once may keep others beyond --docs-per-step; exact steps are the same at every size."
        )
