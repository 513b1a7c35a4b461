"""The four aggregations, each a divisor per sample and a count per step.

Every aggregation is `1 / outer_count * sum over tokens of mask / divisor * loss`:

    mode           divisor of sample i's tokens                   outer count
    sample_mean    max(D_i, 1), D_i active tokens of the rollout   N rollouts
    prompt_mean    max(G_g, 1), G_g active tokens of the group     P prompt groups
    token_mean     1                                               max(T, 1) active tokens
    constant       L, given by the user                            N rollouts

All counts are of the whole step, over every data-parallel rank and micro-batch, and known before the step begins.
That is why the objective and its gradient do not depend on how the step is cut.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.rows import Row, Table
from megatron_pg.step.ids import CountedSample
from megatron_pg.step.totals import StepTotals


@dataclass(frozen=True, kw_only=True)
class Aggregation(Row):
    """One mode: which divisor the tokens of a sample get, and by which count of the step the sum is divided."""

    denominator: Callable[[StepTotals, Sequence[CountedSample]], Tensor] | None = None
    """The function (totals, samples) -> [num_samples] float64 D or G; None for the modes that divide by neither."""
    outer_count: Callable[[StepTotals], float]
    """The count that the inner sum is divided by, above 0."""
    under_per_token_flag: str | None = None
    """Mode that the flag `--calculate-per-token-loss` turns it into; None where the flag is refused."""
    defaults_to_own_tokens: bool = False
    """True if a sample's own active tokens are its denominator where none is given."""

    def denominators(self, totals: StepTotals, samples: Sequence[CountedSample]) -> Tensor | None:
        """Return D or G of the step for each sample, [num_samples] float64; None for a mode that divides by neither."""
        return None if self.denominator is None else self.denominator(totals, samples)

    def divisors(self, denominators: Tensor | None, divisor: float | None) -> Tensor | float:
        """Divisor per sample, or one for all."""
        if denominators is not None:
            return denominators.masked_fill(denominators == 0, 1.0)
        return 1.0 if divisor is None else float(divisor)

    def divisors_of(
        self, totals: StepTotals, samples: Sequence[CountedSample], divisor: float | None = None
    ) -> Tensor:
        """Divisor of each sample's tokens under the totals of its step, [num_samples] float64."""
        divisors = self.divisors(self.denominators(totals, samples), divisor)
        return torch.as_tensor(divisors, dtype=torch.float64).expand(len(samples))

    def expected_sums(self, totals: StepTotals, divisor: float | None = None) -> list[float]:
        """Compute what the weights of all the step's tokens add up to; see `StepTotals.expected_sums`."""
        divisors_of = functools.partial(self.divisors_of, totals, divisor=divisor)
        return totals.expected_sums(divisors_of, (self.name, divisor))


AGGREGATIONS: Table[Aggregation] = Table(
    "loss_aggregation",
    replaced_by="custom_pg_loss_reducer_function_path",
    also_known_as={
        "grpo": "sample_mean",
        "dapo": "prompt_mean",
        "scalerl": "prompt_mean",
        "group_mean": "prompt_mean",
        "token-mean": "token_mean",
        **dict.fromkeys(("dr.grpo", "dr_grpo", "drgrpo"), "constant, with dr_grpo's advantages"),
    },
)
"""The rows by the name that `--loss-aggregation` takes."""


def _num_prompt_groups(totals: StepTotals) -> int:
    if totals.num_prompt_groups is None:
        lacking = [
            each.name for each in itertools.chain(*totals.counts) if each.group_index is None
        ]
        raise ValueError(
            f"--loss-aggregation prompt_mean: {lacking[0] if lacking else 'some sample of the step'} has no group_index; "
            "give one to every sample (all samples of a prompt share it)"
        )
    if totals.odd_group:
        raise ValueError(
            f"--loss-aggregation prompt_mean: {totals.odd_group}. The end of a step may have cut it, and the prompt mean has no "
            "denominator for a part of a group: end the step between groups (--keep-prompt-groups); where groups do differ in "
            "size, as with dynamic sampling or agentic rollouts, say so with --allow-different-group-sizes "
            "(plan_step, step_totals: allow_different_group_sizes=True)"
        )
    return max(totals.num_prompt_groups, 1)


AGGREGATIONS.add(
    Aggregation(
        name="sample_mean",
        formula="1/N sum_i (sum_t m x / max(D_i, 1))",
        about="D_i the active tokens of rollout i, N rollouts (GRPO, arXiv:2402.03300 eq. 3)",
        denominator=StepTotals.rollout_denominators,
        outer_count=lambda totals: max(totals.num_rollouts, 1),
        under_per_token_flag="token_mean",
        defaults_to_own_tokens=True,
    ),
    Aggregation(
        name="prompt_mean",
        formula="1/P sum_g (sum_{i in g, t} m x / max(G_g, 1))",
        about="G_g the active tokens of prompt group g, P groups (ScaleRL, arXiv:2510.13786; DAPO's paper, arXiv:2503.14476 "
        "eq. 8)",
        inputs=("group_index",),
        denominator=StepTotals.group_denominators,
        outer_count=_num_prompt_groups,
    ),
    Aggregation(
        name="token_mean",
        formula="1/max(T, 1) sum m x",
        about="T active tokens (most implementations of DAPO)",
        outer_count=lambda totals: totals.num_active_tokens or 1,
        under_per_token_flag="token_mean",
    ),
    Aggregation(
        name="constant",
        formula="1/(N L) sum m x",
        about="L the divisor, N rollouts (Dr.GRPO, arXiv:2503.20783 eq. 2, with dr_grpo's advantages)",
        options=("loss_aggregation_divisor",),
        needs=("loss_aggregation_divisor",),
        outer_count=lambda totals: max(totals.num_rollouts, 1),
    ),
)


def checked_aggregation(name: str, divisor: float | None, qkv_format: Any = "thd") -> Aggregation:
    """Return the row of that name.

    Raises:
        ValueError: there is none, it needs another divisor than is given, or the layout is unknown; as
            `PolicyLossConfig`.
    """
    PolicyLossConfig(loss_aggregation=name, loss_aggregation_divisor=divisor, qkv_format=qkv_format)
    return AGGREGATIONS[name]
