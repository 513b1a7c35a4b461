"""The four aggregations: `1 / outer_count * sum over tokens of mask / divisor * loss`, with a
divisor for each sample.

All counts are of the whole step, over every data-parallel rank and micro-batch, and known before
the step begins. That is why the objective and its gradient do not depend on how the step is cut. On
the host the weights are a few numbers and one weight a sample; these move to the device in one copy
and are spread over the sample's tokens there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.tables import TABLES, Row, add_rows, is_replaced
from megatron_pg.loss.corrections import counts_accepted, require_accepted
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.counts import CountedSample
from megatron_pg.step.totals import StepTotals
from megatron_pg.step.values import host_float64


@dataclass(frozen=True, kw_only=True)
class Aggregation(Row):
    """One mode: the divisor of a sample's tokens, and the count of the step that the sum is divided
    by.
    """

    setting: ClassVar[str] = "loss_aggregation"

    denominator: Callable[[StepTotals, Sequence[CountedSample]], Tensor] | None = None
    """The function (totals, samples) -> [num_samples] float64 divisors, of D or G, 0 standing for
    1; None where all samples have the same: 1, or `--loss-aggregation-divisor`."""
    outer_count: Callable[[StepTotals], float]  # divides the inner sum, above 0
    under_per_token_flag: str | None = None
    """Mode that the flag `--calculate-per-token-loss` turns it into; None where the flag is
    refused."""
    defaults_to_own_tokens: bool = False
    """True if a sample's own active tokens are its denominator where none is given."""

    def denominators(self, totals: StepTotals, samples: Sequence[CountedSample]) -> Tensor | None:
        return None if self.denominator is None else self.denominator(totals, samples)

    def divisors(self, denominators: Tensor | None, divisor: float | None) -> Tensor | float:
        """Return the divisor of each sample's tokens, or one for all."""
        if denominators is not None:
            return denominators.masked_fill(denominators == 0, 1.0)
        return 1.0 if divisor is None else float(divisor)

    def divisors_of(
        self, totals: StepTotals, samples: Sequence[CountedSample], divisor: float | None = None
    ) -> Tensor:
        """Return the divisor of each sample's tokens under the totals of its step, [num_samples]
        float64.
        """
        divisors = self.divisors(self.denominators(totals, samples), divisor)
        divisors = torch.as_tensor(divisors, dtype=torch.float64, device="cpu")
        return divisors.expand(len(samples))

    def expected_sums(self, totals: StepTotals, divisor: float | None = None) -> list[float]:
        """Compute what the weights of all the step's tokens add up to; see
        `StepTotals.expected_sums`.
        """
        divisors_of = functools.partial(self.divisors_of, totals, divisor=divisor)
        return totals.expected_sums(divisors_of, (self.name, divisor))


AGGREGATIONS: dict[str, Aggregation] = TABLES["loss_aggregation"]


def _num_prompt_groups(totals: StepTotals) -> int:
    if totals.num_prompt_groups is None:
        has_group = totals.counts.has("group_index")
        # Totals that were made by hand may have no counts.
        lacking = (
            totals.counts.place(int(np.argmin(has_group))) if len(has_group) else "some sample"
        )
        raise ValueError(
            f"--loss-aggregation prompt_mean: {lacking} has no group_index; "
            "give one to every sample (all samples of a prompt share it)"
        )
    if totals.odd_group:
        raise ValueError(
            f"--loss-aggregation prompt_mean: {totals.odd_group}. The end of a step may have cut "
            f"it, and the prompt mean has no "
            "denominator for a part of a group: end the step between groups "
            "(--keep-prompt-groups); where groups do differ in "
            "size, as with dynamic sampling or agentic rollouts, say so with "
            "--allow-different-group-sizes "
            "(plan_step, step_totals: allow_different_group_sizes=True)"
        )
    return max(totals.num_prompt_groups, 1)


add_rows(
    AGGREGATIONS,
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
        about="G_g the active tokens of prompt group g, P groups (ScaleRL, arXiv:2510.13786; "
        "DAPO's paper, arXiv:2503.14476 "
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
        about="L the divisor, N rollouts (Dr.GRPO, arXiv:2503.20783 eq. 2, with dr_grpo's "
        "advantages)",
        options=("loss_aggregation_divisor",),
        needs=("loss_aggregation_divisor",),
        outer_count=lambda totals: max(totals.num_rollouts, 1),
    ),
)


def checked_aggregation(name: str, divisor: float | None, qkv_format: Any = "thd") -> Aggregation:
    """Return the row of that name, or refuse name, divisor and layout as `PolicyLossConfig`
    does.
    """
    PolicyLossConfig(loss_aggregation=name, loss_aggregation_divisor=divisor, qkv_format=qkv_format)
    return AGGREGATIONS[name]


@dataclass(frozen=True)
class Normalization:
    """The counts that divide the sums of a step, as settings choose them."""

    mode: Aggregation  # divides the tokens of a sample
    counting: Aggregation  # divides the sum of a step
    divisor: float | None  # of `constant`
    unit: str  # `--loss-weight-denominator`
    accepted: bool  # counts what rejections leave
    gradient_divisor: float | None
    kl_coefficient: float
    needs_single_samples: bool
    """True if a rollout of several samples would be divided by what is accepted of all of them,
    which is not known before the step."""

    @classmethod
    def of(cls, config: PolicyLossConfig) -> Self:
        mode = counting = AGGREGATIONS[config.loss_aggregation]
        divisor = config.loss_aggregation_divisor
        if is_replaced("loss_aggregation", config):
            # By the field's convention the sum of a custom reducer is over rollouts, or over tokens
            # in per-token mode.
            mode, divisor = AGGREGATIONS["token_mean"], None
            counting = mode if config.calculate_per_token_loss else AGGREGATIONS["sample_mean"]
        accepted = counts_accepted(config)
        is_unknown = not accepted and config.rejection_denominator == "accepted"
        return cls(
            *(mode, counting, divisor, config.loss_weight_denominator, accepted),
            *(config.grad_divisor, config.kl_loss_coef, is_unknown and mode.name == "sample_mean"),
        )

    def require(self, totals: StepTotals) -> None:
        """Refuse totals that cannot divide the policy loss, on every rank and pipeline stage."""
        self.counting.outer_count(totals)
        totals.counted_in(self.unit, accepted=self.accepted)
        if self.needs_single_samples and totals.num_rollouts != (size := len(totals.counts)):
            raise ValueError(
                f"--rejection-denominator accepted: the step's {size} samples are of "
                f"{totals.num_rollouts} rollouts, and under --loss-aggregation sample_mean a "
                "rollout is divided by what is accepted of all its samples, which is known only "
                "after the last micro-batch: use --rejection-denominator original"
            )


@dataclass(frozen=True, eq=False)
class StepNumbers:
    """Numbers of the step for one micro-batch on this rank, 0-d float64 each."""

    outer_count: Tensor  # divides the sum of the policy loss
    unrejected_count: Tensor  # the same before rejections
    regularizer_count: Tensor  # divides the sums of KL and entropy
    gradient_divisor: Tensor  # divides the differentiated policy loss under `grad_divisor`
    kl_coefficient: Tensor  # beta of the KL term, a number that steps may change
    share: Tensor  # part of the step's report that this micro-batch carries on this rank
    checksum_scale: Tensor  # makes the sum of the weights 1 over the step
    numbers_scale: Tensor  # the same for weights times the coefficients of samples
    checksum_offset: Tensor  # added to both sums: `share` in a step without active tokens, or 0
    nothing: Tensor  # 0, both numbers of a metric whose field the samples lack


@dataclass(frozen=True, eq=False)
class TokenWeights:
    """Weights of tokens in sums over the step, [window] float64 each, 0 at masked positions."""

    loss: Tensor  # with loss weights; with a reducer of the user's own, 1 for an active token
    unrejected: Tensor  # the same before rejections: the weight of terms that no correction changes
    numbered: Tensor  # `loss` times the coefficient of the sample's number
    regularizer: Tensor  # of KL and entropy, with loss weights
    document: Tensor  # in a metric's mean over documents
    sequence: Tensor  # in a metric's sum over sequences


STEP_NUMBERS, SAMPLE_WEIGHTS = (
    tuple(field.name for field in dataclasses.fields(group))
    for group in (StepNumbers, TokenWeights)
)


@dataclass(frozen=True, eq=False)
class Weights(StepNumbers, TokenWeights):
    """Weights and numbers of a micro-batch, rows of the two tables that `host_weights` makes."""

    @classmethod
    def spread(
        cls,
        step_numbers: Tensor,
        sample_weights: Tensor,
        loss_mask: Tensor,
        sample_ids: Tensor,
        loss_weights: Tensor | None,
    ) -> Self:
        """Give every token of the window the weights of its sample.

        The first two are of `host_weights`, the others [window] as `Tokens` has them.
        """
        spread = torch.where(loss_mask, sample_weights[:, sample_ids], 0.0)
        weights = dict(zip(SAMPLE_WEIGHTS, spread.unbind(), strict=True))
        if loss_weights is not None:
            for name in ("loss", "unrejected", "numbered", "regularizer"):
                weights[name] = weights[name] * loss_weights
        return cls(**dict(zip(STEP_NUMBERS, step_numbers.unbind(), strict=True)), **weights)


def host_weights(
    normalization: Normalization, batch: PackedBatch, totals: StepTotals, share: float
) -> tuple[Tensor, Tensor]:
    """Compute `STEP_NUMBERS` and `SAMPLE_WEIGHTS` [names, samples], float64, in one copy.

    There are at least two columns, of no sample where there are fewer: the compiler makes another
    program for a size of 1.
    """
    samples, unit = batch.samples, normalization.unit
    unrejected = totals.counted_in(unit)
    counted = totals.counted_in(unit, accepted=normalization.accepted)
    if normalization.accepted:
        require_accepted(unit, samples)
    sample_mean = AGGREGATIONS["sample_mean"]
    mode, counting, divisor = normalization.mode, normalization.counting, normalization.divisor
    outer_count = counting.outer_count(counted)
    expected = mode.expected_sums(counted, divisor)
    checksum_scale, numbers_scale = (1.0 / (total or 1.0) for total in expected)
    loss_divisors = mode.divisors_of(counted, samples, divisor)
    step_numbers = {
        "outer_count": outer_count,
        "unrejected_count": counting.outer_count(unrejected),
        "regularizer_count": sample_mean.outer_count(unrejected),
        "gradient_divisor": normalization.gradient_divisor or outer_count,
        "kl_coefficient": normalization.kl_coefficient,
        "share": share,
        "checksum_scale": checksum_scale,
        "numbers_scale": numbers_scale,
        # A step without an active token has nothing to count and is right.
        "checksum_offset": 0.0 if expected[0] else share,
        "nothing": 0.0,
    }
    divisors = {
        "loss": loss_divisors,
        "unrejected": mode.divisors_of(unrejected, samples, divisor),
        # Infinite, a weight of 0, for a sample of another step.
        "numbered": loss_divisors / torch.from_numpy(totals.counts.coefficients_of(samples)),
        "regularizer": sample_mean.divisors_of(unrejected, samples),
        "document": sample_mean.divisors_of(totals, samples),
        "sequence": host_float64([max(sample.num_active_tokens, 1) for sample in samples]),
    }
    size = len(SAMPLE_WEIGHTS), max(len(samples), 2)
    table = torch.zeros(size, dtype=torch.float64, device="cpu")
    for row, name in enumerate(SAMPLE_WEIGHTS):
        table[row, : len(samples)] = 1.0 / divisors[name]
    numbers = host_float64([step_numbers[name] for name in STEP_NUMBERS])
    moved = to_device(torch.cat([numbers, table.flatten()]), batch.loss_mask.device)
    first, second = moved.split([numbers.numel(), table.numel()])  # type: ignore[no-untyped-call]
    return first, second.view_as(table)
