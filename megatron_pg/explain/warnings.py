"""What a person should be told about a step before they train on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.policy_loss import required_inputs
from megatron_pg.explain.options import ExplainOptions
from megatron_pg.explain.report import AggregationReport, constant_divisor
from megatron_pg.explain.step import ExplainedStep

FAR = 4.0
"""A divisor is far from the lengths where the loss becomes this many times sample_mean's, or one in so many."""


def warnings_of(
    step: ExplainedStep, reports: Mapping[str, AggregationReport], options: ExplainOptions
) -> list[str]:
    """One line for each thing that is likely not meant: what, why, and what to do."""
    return [
        *_divisor(step, reports, options.config),
        *_groups(step),
        *_without_tokens(step),
        *_missing_fields(step, options.config),
        *_other_ranks(step, options),
    ]


def _divisor(
    step: ExplainedStep, reports: Mapping[str, AggregationReport], config: PolicyLossConfig
) -> Iterator[str]:
    ratio = reports["constant"].learning_rate_ratio
    if config.loss_aggregation_divisor is None or ratio is None:
        return
    divisor = constant_divisor(step, config)
    mean = step.totals.num_active_tokens / max(step.totals.num_rollouts, 1)
    if ratio > FAR or ratio < 1 / FAR:
        yield (
            f"--loss-aggregation-divisor {divisor:g} is far from the lengths seen: a rollout has {mean:.4g} active "
            f"tokens on average, so the gradient is about {ratio:.3g} times that of sample_mean. SGD and --clip-grad "
            "see that factor, Adam does not: choose a divisor near the longest response, or scale them."
        )


def _groups(step: ExplainedStep) -> Iterator[str]:
    for group, (inside, whole) in step.cut_groups.items():
        yield (
            f"The step ends inside prompt group {group}: {inside} of its {whole} samples are in it. prompt_mean then "
            "gives the prompt a full weight in two steps, and is refused; group-relative advantages need the whole "
            "group. Make --docs-per-step a multiple of the group size, or give --keep-prompt-groups."
        )
    sizes = step.group_sizes
    uncut = [size for group, size in sizes.items() if group not in step.cut_groups]
    if uncut and min(uncut) != max(uncut):
        yield (
            f"Prompt groups have {min(uncut)} to {max(uncut)} samples. prompt_mean gives each prompt the same weight, "
            "so a sample of a small group counts for more; sample_mean gives each sample the same, so a prompt with "
            "more samples counts for more. Choose which of the two is meant."
        )


def _without_tokens(step: ExplainedStep) -> Iterator[str]:
    count = sum(1 for sample in step.samples if sample.num_active_tokens == 0)
    if count:
        yield (
            f"{count} of {len(step.samples)} samples have no active token. They add nothing to the loss and still "
            "count in N (sample_mean, constant), so that filtering does not change the scale."
        )


def _missing_fields(step: ExplainedStep, config: PolicyLossConfig) -> Iterator[str]:
    flags = required_inputs(config)
    for field, count in step.missing_fields.items():
        yield (
            f"{count} of {len(step.samples)} samples have no {field}, needed by {' and '.join(flags[field])}. They are "
            "counted here. Training that takes it from the files stops at such a row, or leaves it out with "
            "--on-bad-row skip."
        )


def _other_ranks(step: ExplainedStep, options: ExplainOptions) -> Iterator[str]:
    """A step of `at_least` keeps all that its windows brought, and how much that is depends on who pulls them."""
    planning, data_size = options.planning, options.parallelism.data_size
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
