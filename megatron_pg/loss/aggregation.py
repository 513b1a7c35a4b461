"""The four aggregations: `1 / outer_count * sum over tokens of mask / divisor * loss`, with a
divisor per sample.

All counts cover the whole step, over every data-parallel rank and micro-batch, and are known before
the step, so that the objective and its gradient do not depend on how the step is split. The host
computes a few numbers and one weight per sample, moves them to the device in one copy, and there
every token gets its sample's weight.
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
    """Aggregation mode: the divisor of a sample's tokens, and the step's normalizer."""

    setting: ClassVar[str] = "loss_aggregation"

    denominator: Callable[[StepTotals, Sequence[CountedSample]], Tensor] | None = None
    """Function (totals, samples) -> [num_samples] float64 divisors D or G, where 0 means 1. None if
    all samples have the same divisor: 1 or `--loss-aggregation-divisor`."""
    outer_count: Callable[[StepTotals], float]  # the normalizer of the inner sum, above 0
    under_per_token_flag: str | None = None
    """The mode with `--calculate-per-token-loss`, or None if the flag is an error."""
    defaults_to_own_tokens: bool = False
    """Whether a sample's active tokens are its default denominator."""

    def denominators(self, totals: StepTotals, samples: Sequence[CountedSample]) -> Tensor | None:
        return None if self.denominator is None else self.denominator(totals, samples)

    def divisors(self, denominators: Tensor | None, divisor: float | None) -> Tensor | float:
        """Return the divisor of each sample's tokens, or one for all samples."""
        if denominators is not None:
            return denominators.masked_fill(denominators == 0, 1.0)
        return 1.0 if divisor is None else float(divisor)

    def divisors_of(
        self, totals: StepTotals, samples: Sequence[CountedSample], divisor: float | None = None
    ) -> Tensor:
        """Return the divisor of each sample's tokens under the step totals, [num_samples]
        float64.
        """
        divisors = self.divisors(self.denominators(totals, samples), divisor)
        divisors = torch.as_tensor(divisors, dtype=torch.float64, device="cpu")
        return divisors.expand(len(samples))

    def expected_sums(self, totals: StepTotals, divisor: float | None = None) -> list[float]:
        """Compute the sums of all token weights of the step. See `StepTotals.expected_sums`."""
        divisors_of = functools.partial(self.divisors_of, totals, divisor=divisor)
        return totals.expected_sums(divisors_of, (self.name, divisor))


AGGREGATIONS: dict[str, Aggregation] = TABLES["loss_aggregation"]


def _num_prompt_groups(totals: StepTotals) -> int:
    if totals.num_prompt_groups is None:
        has_group = totals.counts.has("group_index")
        # Totals constructed by hand may have no counts.
        lacking = (
            totals.counts.place(int(np.argmin(has_group))) if len(has_group) else "some sample"
        )
        raise ValueError(
            f"--loss-aggregation prompt_mean: {lacking} has no group_index. Set it for every "
            "sample, equal for all samples with the same prompt."
        )
    if totals.odd_group:
        raise ValueError(
            f"--loss-aggregation prompt_mean: {totals.odd_group}. The prompt mean has no "
            "denominator for a group that the end of a step splits. Add --keep-prompt-groups. If "
            "group sizes differ by design, as with dynamic sampling or agentic rollouts, add "
            "--allow-different-group-sizes (plan_step, step_totals: "
            "allow_different_group_sizes=True)."
        )
    return max(totals.num_prompt_groups, 1)


add_rows(
    AGGREGATIONS,
    Aggregation(
        name="sample_mean",
        formula="1/N sum_i (sum_t m x / max(D_i, 1))",
        about="D_i active tokens in rollout i, N rollouts (GRPO, arXiv:2402.03300 eq. 3)",
        denominator=StepTotals.rollout_denominators,
        outer_count=lambda totals: max(totals.num_rollouts, 1),
        under_per_token_flag="token_mean",
        defaults_to_own_tokens=True,
    ),
    Aggregation(
        name="prompt_mean",
        formula="1/P sum_g (sum_{i in g, t} m x / max(G_g, 1))",
        about="G_g active tokens in prompt group g, P groups (ScaleRL, arXiv:2510.13786, DAPO's "
        "paper, arXiv:2503.14476 eq. 8)",
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
        about="divisor L, N rollouts (Dr.GRPO, arXiv:2503.20783 eq. 2, with dr_grpo's advantages)",
        options=("loss_aggregation_divisor",),
        needs=("loss_aggregation_divisor",),
        outer_count=lambda totals: max(totals.num_rollouts, 1),
    ),
)


def checked_aggregation(name: str, divisor: float | None, qkv_format: Any = "thd") -> Aggregation:
    """Return the row of this name. Raise an error for an invalid name, divisor or layout."""
    PolicyLossConfig(loss_aggregation=name, loss_aggregation_divisor=divisor, qkv_format=qkv_format)
    return AGGREGATIONS[name]


@dataclass(frozen=True)
class Normalization:
    """Choice of the counts that divide the sums of a step."""

    mode: Aggregation  # divides a sample's tokens
    counting: Aggregation  # divides a step's sum
    divisor: float | None  # for `constant`
    unit: str  # `--loss-weight-denominator`
    accepted: bool  # counts only accepted tokens
    gradient_divisor: float | None
    kl_coefficient: float
    needs_single_samples: bool
    """True if a rollout of several samples would be divided by their accepted tokens, which are
    unknown before the step."""

    @classmethod
    def of(cls, config: PolicyLossConfig) -> Self:
        mode = counting = AGGREGATIONS[config.loss_aggregation]
        divisor = config.loss_aggregation_divisor
        if is_replaced("loss_aggregation", config):
            # By convention a custom reducer sums over rollouts, or over tokens in per-token mode.
            mode, divisor = AGGREGATIONS["token_mean"], None
            counting = mode if config.calculate_per_token_loss else AGGREGATIONS["sample_mean"]
        accepted = counts_accepted(config)
        is_unknown = not accepted and config.rejection_denominator == "accepted"
        return cls(
            *(mode, counting, divisor, config.loss_weight_denominator, accepted),
            *(config.grad_divisor, config.kl_loss_coef, is_unknown and mode.name == "sample_mean"),
        )

    def require(self, totals: StepTotals) -> None:
        """Raise an error, on every rank and pipeline stage, for totals that cannot divide the
        policy loss.
        """
        self.counting.outer_count(totals)
        totals.counted_in(self.unit, accepted=self.accepted)
        if self.needs_single_samples and totals.num_rollouts != (size := len(totals.counts)):
            raise ValueError(
                f"--rejection-denominator accepted: the step has {size} samples of "
                f"{totals.num_rollouts} rollouts. --loss-aggregation sample_mean divides a rollout "
                "by the accepted tokens of all its samples, which are known only after the last "
                "micro-batch: use --rejection-denominator original"
            )


@dataclass(frozen=True, eq=False)
class StepNumbers:
    """Step numbers for one micro-batch on this rank, 0-d float64 each."""

    outer_count: Tensor  # the normalizer of the policy loss
    unrejected_count: Tensor  # the normalizer before rejections
    regularizer_count: Tensor  # the normalizer of KL and entropy
    gradient_divisor: Tensor  # divides the differentiated policy loss under `grad_divisor`
    kl_coefficient: Tensor  # beta of the KL term, which may change between steps
    share: Tensor  # this micro-batch's share of the step's report on this rank
    checksum_scale: Tensor  # makes the sum of the weights 1 over the step
    numbers_scale: Tensor  # makes the sum of weights times sample coefficients 1 over the step
    checksum_offset: Tensor  # added to both sums: `share` in a step without active tokens, or 0
    nothing: Tensor  # 0, both numbers of a metric if the samples lack its field


@dataclass(frozen=True, eq=False)
class TokenWeights:
    """Token weights in sums over the step, [window] float64 each, 0 at masked positions."""

    loss: Tensor  # including loss weights, or 1 per active token with a custom reducer
    unrejected: Tensor  # `loss` before rejections, for terms that corrections do not change
    numbered: Tensor  # `loss` times the sample's checksum coefficient
    regularizer: Tensor  # for KL and entropy, including loss weights
    rollout: Tensor  # for a metric's mean over rollouts
    sequence: Tensor  # for a metric's sum over sequences


STEP_NUMBERS, SAMPLE_WEIGHTS = (
    tuple(field.name for field in dataclasses.fields(group))
    for group in (StepNumbers, TokenWeights)
)


@dataclass(frozen=True, eq=False)
class Weights(StepNumbers, TokenWeights):
    """Weights and numbers of a micro-batch, from the two tables of `host_weights`."""

    @classmethod
    def spread(
        cls,
        step_numbers: Tensor,
        sample_weights: Tensor,
        loss_mask: Tensor,
        sample_ids: Tensor,
        loss_weights: Tensor | None,
    ) -> Self:
        """Give every token in the window its sample's weights.

        The first two arguments come from `host_weights`, the rest, [window], from `Tokens`.
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

    The second has at least two columns, because the compiler specializes a size of 1.
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
        # The checksum of a step without active tokens is 1.
        "checksum_offset": 0.0 if expected[0] else share,
        "nothing": 0.0,
    }
    divisors = {
        "loss": loss_divisors,
        "unrejected": mode.divisors_of(unrejected, samples, divisor),
        # Infinite, for a weight of 0, if the sample is from a different step.
        "numbered": loss_divisors / torch.from_numpy(totals.counts.coefficients_of(samples)),
        "regularizer": sample_mean.divisors_of(unrejected, samples),
        "rollout": sample_mean.divisors_of(totals, samples),
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
