"""The weight of every token of a micro-batch, and the counts of its step.

Both are known before the model has run, from masks and totals alone. On the host they are a few numbers and one weight a
sample; these move to the device in one copy and are spread over the sample's tokens there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.identity import coefficient_of_rank, coefficients_of
from megatron_pg.step.totals import StepTotals


@dataclass(frozen=True, eq=False)
class Counts:
    """Numbers of a step that the loss and its report divide by, 0-d float64 each."""

    outer_count: Tensor
    """Count that the sum of the policy loss is divided by."""
    regularizer_count: Tensor
    """Count that the sums of KL and entropy are divided by."""
    gradient_divisor: Tensor
    """Count that the differentiated policy loss is divided by under `grad_divisor`."""
    share: Tensor
    """Part of the step's report that this micro-batch carries on this rank."""
    checksum_scale: Tensor
    """Factor of the sum of the weights that makes it 1 over the step."""
    samples_scale: Tensor
    """The same for weights times the identities of tokens."""
    ranks_scale: Tensor
    """The same for weights times the identities of tokens and of the data-parallel rank."""
    checksum_offset: Tensor
    """Summand of the three sums: `share` in a step without an active token, else 0."""
    nothing: Tensor
    """0, the pair of a metric whose fields the samples lack."""


@dataclass(frozen=True, eq=False)
class Weights(Counts):
    """The weight of each token, [window] float64 each, 0 at masked positions, and the counts of the step."""

    loss: Tensor
    """Weight in the policy loss, loss weights included. With a reducer of the user's own, 1 for an active token."""
    identified: Tensor
    """The same weight times the number by which the sample is told from others."""
    regularizer: Tensor
    """Weight in KL and entropy, loss weights included."""
    document: Tensor
    """Weight in a metric's mean over documents."""
    sequence: Tensor
    """Weight in a metric's sum over sequences."""

    @classmethod
    def spread(
        cls,
        counts: Tensor,
        sample_weights: Tensor,
        *,
        loss_mask: Tensor,
        sample_ids: Tensor,
        loss_weights: Tensor | None,
    ) -> Weights:
        """Give every token of the window the weights of its sample.

        Args:
            counts: [counts] float64, in the order of `Counts`.
            sample_weights: [5, samples] float64, in the order of `SAMPLE_WEIGHTS`.
            loss_mask, sample_ids, loss_weights: [window], as `Tokens` has them.
        """
        spread = torch.where(loss_mask, sample_weights[:, sample_ids], 0.0)
        weights = dict(zip(SAMPLE_WEIGHTS, spread.unbind(), strict=True))
        if loss_weights is not None:
            for name in ("loss", "identified", "regularizer"):
                weights[name] = weights[name] * loss_weights
        return cls(**dict(zip(COUNTS, counts.unbind(), strict=True)), **weights)


COUNTS = tuple(field.name for field in dataclasses.fields(Counts))
SAMPLE_WEIGHTS = tuple(each.name for each in dataclasses.fields(Weights) if each.name not in COUNTS)


def host_weights(
    config: PolicyLossConfig, batch: PackedBatch, totals: StepTotals, share: float
) -> tuple[Tensor, Tensor]:
    """Compute the counts and the weight of each sample's tokens on the host, and move them to the batch's device.

    Returns:
        Counts [counts] and weights [5, samples] float64, as `Weights.spread` takes them. There are at least two columns, of
        no sample where there are fewer: the compiler makes another program for a size of 1.

    Raises:
        ValueError: the totals do not know a sample that the aggregation asks for.
    """
    samples, counted = batch.samples, totals.counted_in(config.loss_weight_denominator)
    sample_mean = AGGREGATIONS["sample_mean"]
    mode = counting = AGGREGATIONS[config.loss_aggregation]
    divisor = config.loss_aggregation_divisor
    if AGGREGATIONS.is_replaced(config):
        # By the field's convention the sum of a custom reducer is over rollouts, or over tokens in per-token mode.
        mode, divisor = AGGREGATIONS["token_mean"], None
        counting = mode if config.calculate_per_token_loss else sample_mean
    outer_count = counting.outer_count(counted)
    expected = mode.expected_sums(counted, divisor)
    checksum_scale, samples_scale, ranks_scale = (1.0 / (total or 1.0) for total in expected)
    loss_divisors = identified = mode.divisors_of(counted, samples, divisor)
    if counted.knows_identities:
        identified = loss_divisors / coefficients_of(samples, counted.hashed_fields)
        ranks_scale *= coefficient_of_rank(counted.data_parallel_rank)
    counts = {
        "outer_count": outer_count,
        "regularizer_count": sample_mean.outer_count(counted),
        "gradient_divisor": config.grad_divisor or outer_count,
        "share": share,
        "checksum_scale": checksum_scale,
        "samples_scale": samples_scale,
        "ranks_scale": ranks_scale,
        # A step without an active token has nothing to count and is right.
        "checksum_offset": 0.0 if expected[0] else share,
        "nothing": 0.0,
    }
    document = regularizer = sample_mean.divisors_of(totals, samples)
    if counted is not totals:
        regularizer = sample_mean.divisors_of(counted, samples)
    divisors = {
        "loss": loss_divisors,
        "identified": identified,
        "regularizer": regularizer,
        "document": document,
        "sequence": torch.tensor([max(sample.num_active_tokens, 1) for sample in samples]),
    }
    table = torch.zeros(len(SAMPLE_WEIGHTS), max(len(samples), 2), dtype=torch.float64)
    for row, name in enumerate(SAMPLE_WEIGHTS):
        table[row, : len(samples)] = 1.0 / divisors[name]
    head = torch.tensor([counts[name] for name in COUNTS], dtype=torch.float64)
    numbers = to_device(torch.cat([head, table.flatten()]), batch.loss_mask.device)
    return numbers[: len(COUNTS)], numbers[len(COUNTS) :].view_as(table)


def position_coefficients(
    config: PolicyLossConfig, batch: PackedBatch, totals: StepTotals
) -> Tensor:
    """Return the numbers [window] float64 of the tokens' positions in the checksums; 1 where the totals know no identities."""
    counted = totals.counted_in(config.loss_weight_denominator)
    return batch.coefficients if counted.knows_identities else torch.ones_like(batch.coefficients)
