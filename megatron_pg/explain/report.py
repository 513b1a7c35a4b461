"""What every aggregation makes of a step: the weight of a token, who gets how much of it, what Megatron does to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.explain.options import ExplainOptions, Parallelism
from megatron_pg.explain.step import ExplainedStep
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation

NUM_QUANTILES = 4


@dataclass(frozen=True)
class MegatronScale:
    """The factors between the local loss of a micro-batch and the gradient (megatron_pg.megatron.scale_contract)."""

    returned: float
    """What the package multiplies the loss by before it returns it."""
    schedule: float
    """What the schedule multiplies it by."""
    gradients: float
    """What their sum over the data- and context-parallel ranks is multiplied by."""

    @property
    def net(self) -> float:
        """Their product: 1, whatever the parallelism."""
        return self.returned * self.schedule * self.gradients


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

    name: str
    formula: str
    divisor: float | None
    """L of ``constant``."""
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
    """total_weight over that of ``sample_mean``; None where that is 0."""
    scale: MegatronScale


def explain_step(
    step: ExplainedStep, config: PolicyLossConfig, parallelism: Parallelism
) -> tuple[dict[str, AggregationReport], dict[str, str]]:
    """The report of every aggregation, and the reason for each that has none.

    Args:
        step: the samples; ``constant`` takes the longest of them for L where the config gives none.
        config: the validated flags.
        parallelism: the sizes that Megatron scales by.
    """
    reports: dict[str, AggregationReport] = {}
    reasons: dict[str, str] = {}
    reference = _total_weight(AGGREGATIONS["sample_mean"], step, None)
    megatron = megatron_scale(step, config, parallelism)
    for name, mode in AGGREGATIONS.items():
        divisor = constant_divisor(step, config) if name == "constant" else None
        try:
            reports[name] = _report(mode, step, divisor, reference, megatron)
        except ValueError as error:
            reasons[name] = str(error)
    return reports, reasons


def constant_divisor(step: ExplainedStep, config: PolicyLossConfig) -> float:
    """L of the flags; without them the active tokens of the longest sample."""
    longest = max((sample.num_active_tokens for sample in step.samples), default=1)
    return config.loss_aggregation_divisor or float(max(longest, 1))


def megatron_scale(
    step: ExplainedStep, config: PolicyLossConfig, parallelism: Parallelism
) -> MegatronScale:
    """The three factors, for the loss mode that the flags choose."""
    if config.calculate_per_token_loss:
        num_tokens = float(max(step.totals.num_active_tokens, 1))
        return MegatronScale(returned=num_tokens, schedule=1.0, gradients=1.0 / num_tokens)
    data, context = parallelism.data_size, parallelism.context_size
    microbatches = parallelism.num_microbatches
    return MegatronScale(
        returned=float(data * microbatches),
        schedule=context / microbatches,
        gradients=1.0 / (data * context),
    )


def _weights(mode: Aggregation, step: ExplainedStep, divisor: float | None) -> Tensor:
    """[samples] float64: weight of an active token of each sample."""
    divisors = mode.divisors(mode.denominators(step.totals, step.samples), divisor)
    return torch.ones(len(step.samples), dtype=torch.float64) / divisors


def _active_tokens(step: ExplainedStep) -> Tensor:
    return torch.tensor([s.num_active_tokens for s in step.samples], dtype=torch.float64)


def _total_weight(mode: Aggregation, step: ExplainedStep, divisor: float | None) -> float:
    weights = _weights(mode, step, divisor) * _active_tokens(step)
    return float(weights.sum()) / mode.outer_count(step.totals)


def _report(
    mode: Aggregation,
    step: ExplainedStep,
    divisor: float | None,
    reference: float,
    megatron: MegatronScale,
) -> AggregationReport:
    outer_count = mode.outer_count(step.totals)
    weights = _weights(mode, step, divisor)
    of_samples = weights * _active_tokens(step)
    total = float(of_samples.sum())
    shares = of_samples / total if total else torch.zeros_like(of_samples)
    return AggregationReport(
        name=mode.name,
        formula=mode.formula,
        divisor=divisor,
        outer_count=outer_count,
        token_weight=weights.tolist(),
        token_coefficient=(weights / outer_count).tolist(),
        sample_share=shares.tolist(),
        quantile_shares=quantile_shares(step, shares.tolist()),
        group_shares=_group_shares(step, shares.tolist()),
        total_weight=total / outer_count,
        learning_rate_ratio=total / outer_count / reference if reference else None,
        scale=megatron,
    )


def quantile_shares(step: ExplainedStep, shares: Sequence[float]) -> list[QuantileShare]:
    """The samples in four parts of equal number, shortest first, and the share of each."""
    by_length = sorted(range(len(shares)), key=lambda i: step.samples[i].num_active_tokens)
    count = min(NUM_QUANTILES, len(by_length))
    bounds = [len(by_length) * part // count for part in range(count + 1)] if count else [0]
    parts = [by_length[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
    return [
        QuantileShare(
            shortest=step.samples[part[0]].num_active_tokens,
            longest=step.samples[part[-1]].num_active_tokens,
            num_samples=len(part),
            share=sum(shares[index] for index in part),
        )
        for part in parts
    ]


def _group_shares(step: ExplainedStep, shares: Sequence[float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for sample, share in zip(step.samples, shares, strict=True):
        if sample.group_index is not None:
            found[sample.group_index] = found.get(sample.group_index, 0.0) + share
    return found


def as_json(
    step: ExplainedStep,
    reports: Mapping[str, AggregationReport],
    reasons: Mapping[str, str],
    warnings: Sequence[str],
    options: ExplainOptions,
) -> dict[str, object]:
    """The whole report as plain values, every sample in it."""
    totals, parallelism = step.totals, options.parallelism
    return {
        "step": {
            "num_samples": len(step.samples),
            "num_rollouts": totals.num_rollouts,
            "num_prompt_groups": totals.num_prompt_groups,
            "num_active_tokens": totals.num_active_tokens,
            "num_skipped": step.num_skipped,
            "active_tokens": [sample.num_active_tokens for sample in step.samples],
            "group_index": [sample.group_index for sample in step.samples],
            "rollout_id": [sample.rollout_id for sample in step.samples],
        },
        "parallelism": {
            "data_parallel_size": parallelism.data_size,
            "context_parallel_size": parallelism.context_size,
            "num_microbatches": parallelism.num_microbatches,
            "calculate_per_token_loss": options.config.calculate_per_token_loss,
        },
        "loss_aggregation": options.config.loss_aggregation,
        "aggregations": {name: _plain(report) for name, report in reports.items()},
        "unavailable": dict(reasons),
        "warnings": list(warnings),
        "unused_flags": list(options.unused_flags),
    }


def _plain(report: AggregationReport) -> dict[str, object]:
    scale = report.scale
    plain = {name: value for name, value in vars(report).items() if name not in ("name", "scale")}
    return plain | {
        "quantile_shares": [vars(part) for part in report.quantile_shares],
        "group_shares": {str(group): share for group, share in report.group_shares.items()},
        "megatron_scale": {**vars(scale), "net": scale.net},
    }
