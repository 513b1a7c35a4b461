"""Report on every aggregation of a step: token weights, shares, and Megatron's factors."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_pg.config.tables import is_replaced, required_inputs
from megatron_pg.explain.step import (
    ExplainedSample,
    ExplainedStep,
    ExplainOptions,
    rollouts_of_groups,
)
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation
from megatron_pg.megatron.scale_contract import scale_contract
from megatron_pg.step.totals import StepTotals

Report = Mapping[str, Any]
"""Report as printed by `--json`, and the source of the tables and the plot."""
NUM_QUANTILES = 4
FAR = 4.0
"""A divisor is far from the lengths if the loss is more than this many times sample_mean's, or less
than its inverse."""


def explain_step(step: ExplainedStep, options: ExplainOptions) -> Report:
    """Return the report for a step. `constant` without a divisor uses the longest rollout."""
    totals, config, samples = step.totals, options.config, step.samples
    lengths = [sample.num_active_tokens for sample in samples]
    sizes = ("data_parallel_size", "context_parallel_size", "num_microbatches")
    parallelism: dict[str, Any] = {name: getattr(options, name) for name in sizes}
    parallelism["calculate_per_token_loss"] = config.calculate_per_token_loss
    contract = scale_contract(None, totals, **parallelism)
    factors = (contract.factor, contract.schedule_factor, contract.gradient_factor)
    names = ("returned", "schedule", "gradients", "net")
    scale = dict(zip(names, (*factors, math.prod(factors)), strict=True))
    longest = totals.rollout_denominators(totals.counts).max()
    constant = config.loss_aggregation_divisor or max(1.0, float(longest))
    counted = totals.counted_in(config.loss_weight_denominator)
    reports: dict[str, Report] = {}
    reasons: dict[str, str] = {}
    for name, mode in AGGREGATIONS.items():
        try:
            report = _aggregation_report(mode, step, counted, constant if mode.needs else None)
            reports[name] = report | {"megatron_scale": scale}
        except ValueError as error:
            reasons[name] = str(error)
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
        "warnings": [
            *_warnings_of_lengths(step, options, reports["constant"]["learning_rate_ratio"]),
            *_warnings_of_flags(step, options),
        ],
        "unused_flags": options.unused_flags,
    }


def _regularizers(options: ExplainOptions, reports: Mapping[str, Report]) -> Report | None:
    """Compare KL and entropy terms with the policy loss. Return None without either term or with a
    custom reducer.
    """
    config, policy = options.config, options.config.loss_aggregation
    has_term = config.kl_loss_coef or config.entropy_coef
    if not has_term or is_replaced("loss_aggregation", config) or policy not in reports:
        return None
    name = policy if config.regularizer_aggregation == "loss" else "sample_mean"
    both = (reports[each]["token_coefficient"] for each in (name, policy))
    # Per sample and active token: coefficient in the terms over coefficient in the policy loss.
    relative = [own / policy_weight for own, policy_weight in zip(*both, strict=True)]
    return {"aggregation": name, "relative_coefficient": relative}


def _kept_sets(samples: Sequence[ExplainedSample]) -> dict[str, float] | None:
    """Count the active tokens with a sampling set, and the sets' sizes. Return None without any."""
    sizes = [size for sample in samples for size in sample.kept_set_sizes]
    if not sizes:
        return None
    return {"num_tokens": len(sizes), "mean_size": sum(sizes) / len(sizes), "largest": max(sizes)}


def _aggregation_report(
    mode: Aggregation, step: ExplainedStep, totals: StepTotals, divisor: float | None
) -> dict[str, Any]:
    """Report one aggregation over the step with the denominators from `totals`. Lists have the
    samples' order.
    """
    samples, sample_mean = step.samples, AGGREGATIONS["sample_mean"]
    weights = 1.0 / mode.divisors_of(totals, samples, divisor)
    outer_count, total = mode.outer_count(totals), mode.expected_sums(totals, divisor)[0]
    # A sample's number of tokens, or the sum of their loss weights.
    sizes = [s.num_active_tokens if s.loss_weight is None else s.loss_weight for s in samples]
    shares: list[float] = (weights * weights.new_tensor(sizes) / (total or 1)).tolist()
    group_shares: defaultdict[int, float] = defaultdict(float)
    for sample, share in zip(samples, shares, strict=True):
        if sample.group_index is not None:
            group_shares[sample.group_index] += share
    reference = sample_mean.expected_sums(totals)[0] / sample_mean.outer_count(totals)
    return {
        "formula": mode.formula,
        "divisor": divisor,
        "outer_count": outer_count,
        # Per sample and active token with loss weight 1: weight in the inner sum, gradient factor.
        "token_weight": weights.tolist(),
        "token_coefficient": (weights / outer_count).tolist(),
        "sample_share": shares,
        "quantile_shares": _quantile_shares([s.num_active_tokens for s in samples], shares),
        "group_shares": group_shares,
        # The loss if every token's loss is 1.
        "total_weight": total / outer_count,
        "learning_rate_ratio": total / outer_count / reference if reference else None,
    }


def _quantile_shares(lengths: Sequence[int], shares: Sequence[float]) -> list[dict[str, float]]:
    """Split the samples into four parts of equal number, shortest first, with each part's share."""
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


def _warnings_of_lengths(
    step: ExplainedStep, options: ExplainOptions, ratio: float | None
) -> Iterator[str]:
    """Yield warnings about likely mistakes in lengths and groups, with reason and fix.

    `ratio` is the learning rate ratio of `constant`.
    """
    totals, divisor = step.totals, options.config.loss_aggregation_divisor
    if divisor is not None and ratio is not None and not 1 / FAR <= ratio <= FAR:
        mean = totals.num_active_tokens / totals.num_rollouts
        yield (
            f"--loss-aggregation-divisor {divisor:g} is far from the mean length, {mean:.4g} "
            f"active tokens per rollout: the gradient is about {ratio:.3g} times sample_mean's. "
            "SGD and --clip-grad see that factor, Adam does not. Choose a divisor near the longest "
            "response, or scale the learning rate and --clip-grad."
        )
    for group, (inside, whole) in step.cut_groups.items():
        yield (
            f"The step has {inside} of the {whole} rollouts in prompt group {group}. prompt_mean "
            "rejects it, because the prompt would count in two steps, and group-relative "
            "advantages need the whole group. Make --docs-per-step a multiple of the group size or "
            "add --keep-prompt-groups."
        )
    groups = rollouts_of_groups(step.samples)
    sizes = {n for group, n in groups.items() if group not in step.cut_groups}
    if len(sizes) > 1:
        yield (
            f"Prompt groups have {min(sizes)} to {max(sizes)} rollouts. prompt_mean gives all "
            "prompts the same weight, so a rollout in a small group counts more. sample_mean gives "
            "all rollouts the same weight, so a large group counts more. Choose one of them."
        )
    rollout_tokens = totals.rollout_denominators(totals.counts).numpy()
    if count := int(((rollout_tokens == 0) & totals.counts.is_first_of_rollout).sum()):
        yield (
            f"{count} of {totals.num_rollouts} rollouts have no active token. They do not change "
            "the loss but count in N (sample_mean, constant), so that filtering keeps the scale."
        )


def _warnings_of_flags(step: ExplainedStep, options: ExplainOptions) -> Iterator[str]:
    """Yield warnings about missing fields and differences between ranks."""
    flags = required_inputs(options.config)
    missing = Counter(field for sample in step.samples for field in sample.missing_fields)
    for field, count in missing.items():
        yield (
            f"{count} of {len(step.samples)} samples have no {field}, required by "
            f"{' and '.join(flags[field])}. The weights do not depend on it. A training script "
            "that does not compute it stops at the row, or skips it with --on-bad-row skip."
        )
    planning, data_size = options.planning, options.data_parallel_size
    wanted = planning.docs_per_step
    if wanted is None or planning.docs_per_step_mode != "at_least" or data_size == 1:
        return
    # The step keeps all samples of its windows, and the number of ranks decides the windows.
    keeps_groups = planning.keep_prompt_groups or options.config.loss_aggregation == "prompt_mean"
    has_rollouts = any(sample.rollout_id is not None for sample in step.samples)
    if wanted % data_size or keeps_groups or has_rollouts or step.num_skipped:
        yield (
            "The step is computed for one data-parallel rank. With --docs-per-step-mode at_least, "
            f"{data_size} ranks that pull rows at once may keep different rows beyond "
            "--docs-per-step. Exact steps are equal at every size."
        )
