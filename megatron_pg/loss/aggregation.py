"""The four aggregations, each a divisor per sample and a count per step, and the totals of a step that they need.

Every aggregation is ``1 / outer_count * sum over tokens of mask / divisor * loss``:

    mode           divisor of sample i's tokens                   outer count
    sample_mean    max(D_i, 1), D_i active tokens of the rollout   N rollouts
    prompt_mean    max(G_g, 1), G_g active tokens of the group     P prompt groups
    token_mean     1                                               max(T, 1) active tokens
    constant       L, given by the user                            N rollouts

All counts are of the whole step, over every data-parallel rank and micro-batch, and known before the step begins.
That is why the objective and its gradient do not depend on how the step is cut.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_pg.step.totals import CountedSample, StepTotals


@dataclass(frozen=True)
class Aggregation:
    """One mode: which divisor the tokens of a sample get, and by which count of the step the sum is divided."""

    name: str
    formula: str
    """The objective, for ``--help`` and error messages."""
    divisors: Callable[[Tensor | None, float | None], Tensor | float]
    """(denominators [num_samples] or None, --loss-aggregation-divisor) -> divisor per sample, or one for all."""
    denominators: Callable[[StepTotals, Sequence[CountedSample]], Tensor | None]
    """[num_samples] float64 D or G from the step's totals; None for the modes that divide by neither."""
    outer_count: Callable[[StepTotals], int]
    """The count that the inner sum is divided by, at least 1."""
    inner_weight: Callable[[StepTotals, float | None], float]
    """What the weights of all the step's tokens add up to, from the totals alone; the aggregation checksum compares
    it with the sum of the weights that were used."""


def _num_prompt_groups(totals: StepTotals) -> int:
    if totals.num_prompt_groups is None:
        raise ValueError(
            "--loss-aggregation prompt_mean: some sample of the step has no group_index; give one to every sample "
            "(all samples of a prompt share it)"
        )
    return max(totals.num_prompt_groups, 1)


def _given(denominators: Tensor | None, divisor: float | None) -> Tensor:
    if denominators is None:
        raise ValueError("denominators: this aggregation needs one per sample, found None")
    return denominators.clamp(min=1)


def _constant(denominators: Tensor | None, divisor: float | None) -> float:
    return checked_divisor(divisor)


def checked_divisor(divisor: float | None) -> float:
    """The Dr.GRPO constant L, or a ValueError: it must be given, finite and positive."""
    if (
        isinstance(divisor, bool)
        or not isinstance(divisor, numbers.Real)
        or not 0 < divisor < float("inf")
    ):
        raise ValueError(
            f"--loss-aggregation-divisor is {divisor!r}: --loss-aggregation constant needs a finite number above 0, "
            "such as the longest response in tokens"
        )
    return float(divisor)


AGGREGATIONS: Mapping[str, Aggregation] = {
    aggregation.name: aggregation
    for aggregation in (
        Aggregation(
            name="sample_mean",
            formula="1/N sum_i (sum_t m x / max(D_i, 1))",
            divisors=_given,
            denominators=StepTotals.rollout_denominators,
            outer_count=lambda totals: max(totals.num_rollouts, 1),
            inner_weight=lambda totals, divisor: totals.num_active_rollouts,
        ),
        Aggregation(
            name="prompt_mean",
            formula="1/P sum_g (sum_{i in g, t} m x / max(G_g, 1))",
            divisors=_given,
            denominators=StepTotals.group_denominators,
            outer_count=_num_prompt_groups,
            inner_weight=lambda totals, divisor: totals.num_active_prompt_groups or 0,
        ),
        Aggregation(
            name="token_mean",
            formula="1/T sum m x",
            divisors=lambda denominators, divisor: 1.0,
            denominators=lambda totals, samples: None,
            outer_count=lambda totals: max(totals.num_active_tokens, 1),
            inner_weight=lambda totals, divisor: totals.num_active_tokens,
        ),
        Aggregation(
            name="constant",
            formula="1/(N L) sum m x",
            divisors=_constant,
            denominators=lambda totals, samples: None,
            outer_count=lambda totals: max(totals.num_rollouts, 1),
            inner_weight=lambda totals, divisor: (
                totals.num_active_tokens / checked_divisor(divisor)
            ),
        ),
    )
}


def get_aggregation(name: str) -> Aggregation:
    """The aggregation of that name, or a ValueError that lists them all."""
    if name not in AGGREGATIONS:
        raise ValueError(
            f"--loss-aggregation is {name!r}: expected one of {', '.join(AGGREGATIONS)}"
        )
    return AGGREGATIONS[name]
