"""The weights of a micro-batch's tokens: a number a sample on the host, spread over its tokens on the device.

All is known before the model has run, from masks and totals alone, and reaches the device in one copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.masking import masked
from megatron_pg.loss.metric_table import ratio_of
from megatron_pg.loss.reducer import Reducer, WeightedSum, custom_reducer
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.identity import coefficient_of_rank, coefficients_of
from megatron_pg.step.totals import StepTotals

IN_THE_LOSS = ("loss", "sample_mean", "counted", "identified")
"""The rows of weights that a token's loss weight multiplies; those of the metrics count every active token alike."""


SCALARS = (*range(3), "share", *range(4, 19), "nothing")
"""The scalars by name, those that no report reads by number."""


@dataclass(frozen=True, eq=False)
class MicroBatchWeights:
    """The weights of one micro-batch on one rank, in its loss and in what a step reports. Built by `build`."""

    batch: PackedBatch
    """The micro-batch, on its device."""
    rows: tuple[str, ...]
    """What the weights are of: `loss` (unless a custom reducer has its own) and `sample_mean` (KL and entropy, unless they
    follow the loss); for metrics `documents` and `tokens`, the mean over documents and the sum, and `sequences` where the
    ratio is one number a sequence; for the checksum `counted`, each token once, where a custom reducer has the weights of
    the loss, and `identified`, those of `loss` or `counted` times the coefficients of the samples, where the totals know them."""
    scalars: Tensor
    """[20] float64 on the device, of which `SCALARS` names those that are reported: outer count of the loss, that of the
    sample mean, divisor of the gradient, share; factors, divisors and offsets of the sums; 0."""
    per_sample: Tensor
    """[rows, samples] float64 on the device, the weight of each token of a sample; at least two columns, of no sample where
    there are fewer."""
    reducer_of_masks: Callable[[Tensor | None], Reducer] | None = None
    """The user's own, in place of the weights `loss`; see `custom_reducer`."""

    @classmethod
    def build(
        cls, config: PolicyLossConfig, batch: PackedBatch, totals: StepTotals, share: float
    ) -> MicroBatchWeights:
        """The weights under a config; arguments as for `policy_loss_function`.

        Raises:
            ValueError: the totals do not know a sample that the aggregation asks for; what `custom_reducer` raises.
        """
        counted = totals.counted_in(config.loss_weight_denominator)
        mode, sample_mean = AGGREGATIONS[config.loss_aggregation], AGGREGATIONS["sample_mean"]
        divisor, samples = config.loss_aggregation_divisor, batch.samples
        divisors: dict[str, Tensor | float] = {}
        reducer: Callable[[Tensor | None], Reducer] | None = None
        if AGGREGATIONS.is_replaced(config):
            # By the field's convention its inner sum is over rollouts, or tokens in per-token mode.
            reducer, per_token = custom_reducer(config, batch), config.calculate_per_token_loss
            outer_count = max(counted.num_active_tokens if per_token else counted.num_rollouts, 1)
            checked = divisors["counted"] = torch.ones(len(samples), dtype=torch.float64)
        else:
            checked = divisors["loss"] = mode.divisors_of(counted, samples, divisor)
            outer_count = mode.outer_count(counted)
        if counted.by_identity is not None:
            divisors["identified"] = checked / coefficients_of(samples, counted.hashed_fields)
        has_regularizer = config.kl_loss_coef or config.entropy_coef
        if has_regularizer and config.regularizer_aggregation == "sample_mean":
            divisors["sample_mean"] = sample_mean.divisors_of(counted, samples)
        if config.pg_metrics != "none":
            divisors |= {"documents": sample_mean.divisors_of(totals, samples), "tokens": 1.0}
            if ratio_of(config) == "sequence":
                own = [max(sample.num_active_tokens, 1) for sample in samples]
                divisors["sequences"] = torch.tensor(own, dtype=torch.float64)
        gradient_divisor = config.grad_divisor or outer_count
        scalars = [outer_count, sample_mean.outer_count(counted), gradient_divisor, share]
        scalars += [*_adjustments(config, counted, share), 0.0]
        device = batch.loss_mask.device
        width = max(len(samples), 2)
        numbers = torch.zeros(
            len(scalars) + len(divisors) * width,
            dtype=torch.float64,
            pin_memory=device.type == "cuda",
        )
        numbers[: len(scalars)] = torch.tensor(scalars, dtype=torch.float64)
        table = numbers[len(scalars) :].view(len(divisors), width)
        for row, of_samples in zip(table, divisors.values(), strict=True):
            row[: len(samples)] = 1.0 / of_samples
        numbers = to_device(numbers, device)
        per_sample = numbers[len(scalars) :].view(len(divisors), width)
        return cls(batch, tuple(divisors), numbers[: len(scalars)], per_sample, reducer)

    @functools.cached_property
    def of_tokens(self) -> Mapping[str, Tensor]:
        """The weights [window] float64 by row, 0 at masked positions."""
        batch = self.batch
        spread = self.per_sample[:, batch.window_segment_ids]
        found = dict(
            zip(self.rows, torch.where(batch.loss_mask, spread, 0.0).unbind(), strict=True)
        )
        if batch.loss_weights is not None:
            for name in IN_THE_LOSS:
                if name in found:
                    found[name] = found[name] * batch.loss_weights
        return found

    @functools.cached_property
    def _reducer(self) -> Reducer:
        """The reducer of the loss by the samples' own masks."""
        of_masks = self.reducer_of_masks
        return WeightedSum(self.of_tokens["loss"]) if of_masks is None else of_masks(None)

    def inner_sum(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        """The loss's sum over this rank's window, x [window] -> 0-d, before the outer count.

        `masks` [response tokens of all samples] are those of a user's reducer, where corrections changed them.
        """
        if masks is None or self.reducer_of_masks is None:
            return self._reducer(x)
        return self.reducer_of_masks(masks)(x)

    def loss(self, x: Tensor) -> Tensor:
        """This rank's share, 0-d, of the aggregate over the whole step of x [window]."""
        inner_sum = self.inner_sum(x)
        return inner_sum / self.scalars[0].to(inner_sum.dtype)

    def regularizer(self, x: Tensor) -> Tensor:
        """This rank's share, 0-d, of a KL or entropy term x [window] over the whole step."""
        if "sample_mean" not in self.rows:
            return self.loss(masked(x, self.batch.loss_mask))
        inner_sum = WeightedSum(self.of_tokens["sample_mean"])(x)
        return inner_sum / self.scalars[1].to(inner_sum.dtype)

    def sums(self) -> Tensor:
        """The sums of the weights, 1-d float64: `documents` and `tokens`, where there are metrics, and the three checks.

        A check is a sum over what the step's totals say that it adds up to: of the weights `loss` or `counted`, of those times
        the coefficients of samples and positions, and the same times that of the rank.
        """
        of = self.of_tokens
        weights = of["loss"] if "loss" in of else of["counted"]
        identified = of["identified"] * self.batch.coefficients if "identified" in of else weights
        rows = [of[name] for name in ("documents", "tokens") if name in of]
        rows += [weights, identified, identified]
        adjust = self.scalars[4:19].view(3, 5)[:, -len(rows) :]
        sums: Tensor = torch.stack(rows).sum(1) * adjust[0] / adjust[1] + adjust[2]
        return sums


def _adjustments(config: PolicyLossConfig, totals: StepTotals, share: float) -> list[float]:
    """What the five sums are multiplied by, divided by, and what is added to them."""
    # Of a custom reducer the weights are not known: each token counts once, as in the token mean.
    name = "token_mean" if AGGREGATIONS.is_replaced(config) else config.loss_aggregation
    mode, divisor = AGGREGATIONS[name], config.loss_aggregation_divisor or 1.0
    expected, rank = [mode.total_weight(totals, divisor)], 1.0
    if totals.by_identity is None:  # counted of samples without tokens: there is no more to compare
        expected *= 3
    else:
        rank = coefficient_of_rank(totals.data_parallel_rank)
        expected += [mode.inner_weight(counts, divisor) for counts in totals.by_identity]
    # A step without an active token has nothing to count and is right.
    offsets = [0.0 if each else share for each in expected]
    factors, divisors = [1.0, 1.0, 1.0, 1.0, rank], [1.0, 1.0, *(each or 1.0 for each in expected)]
    return [*factors, *divisors, 0.0, 0.0, *offsets]
