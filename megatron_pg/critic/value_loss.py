"""The value loss of one micro-batch on one rank, and the critic's metrics of a step.

This file has the formula and its metrics. Aggregation, totals, the checksum and a step's sums are the policy loss's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.critic.settings import CriticConfig
from megatron_pg.loss.aggregation import Weights, host_weights, position_coefficients
from megatron_pg.loss.checksum import CHECKSUM
from megatron_pg.loss.metrics import (
    MicroBatchMetrics,
    PairTable,
    add_pairs,
    check_checksum,
    checksums,
    report_nan_tokens,
)
from megatron_pg.loss.policy_loss import quotient
from megatron_pg.loss.reducer import custom_reduction, weighted_sum
from megatron_pg.loss.tokens import masked
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.identity import CRITIC_FIELDS
from megatron_pg.step.totals import StepTotals

MEANS = ("value", "return", "value_clipfrac")
"""Means over documents, as in the policy's metrics."""
SUMS = ("token_sum", "return_sum", "return_squared_sum", "error_sum", "error_squared_sum")
"""Sums over active tokens for the explained variance; a step does not report them."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> Tensor:
    """Compute PPO's clipped loss of each token: `1/2 max((v - R)^2, (v_clip - R)^2)`, `v_clip = v_old + clamp(v - v_old, +-c)`.

    The clip is that of the released code of Schulman et al. (arXiv:1707.06347), whose paper has the plain square.

    Args:
        values: v, the critic's, any shape, with gradient.
        old_values: v_old, from which the advantages were made, of the same shape.
        returns: R, of the same shape.
        value_clip: c, above 0.
    """
    # Between bounds and not by a difference: inside them v_clip is v to the bit.
    clipped = values.clamp(old_values - value_clip, old_values + value_clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


class MicroBatchValueLoss:
    """The value loss of one micro-batch on one rank, as a function of the values of its token window.

    Built on the host before the model has run; summed over ranks and micro-batches it is the value loss of the step.

    Args:
        config: the aggregation, and which metrics there are.
        critic: c of the loss.
        batch: the packed micro-batch, on the values' device.
        totals: the totals of the whole step.
        step_share: as for `policy_loss_function`.

    Raises:
        ValueError: the samples have no `old_values` or `returns`; one is named.
    """

    def __init__(
        self,
        config: PolicyLossConfig,
        critic: CriticConfig,
        batch: PackedBatch,
        totals: StepTotals,
        step_share: float = 1.0,
    ) -> None:
        for field in CRITIC_FIELDS:
            if getattr(batch, field) is None:
                raise ValueError(
                    f"{batch.samples[0].name} has no {field}, which the value loss needs: give Sample({field}=...) to every "
                    "sample of the step (compute_values, then gae)"
                )
        self._old_values, self._returns = (
            masked(getattr(batch, field), batch.loss_mask) for field in CRITIC_FIELDS
        )
        self.config, self.critic, self.batch, self._totals = config, critic, batch, totals
        self._counts, sample_weights = host_weights(config, batch, totals, step_share)
        self._weights = Weights.spread(
            self._counts,
            sample_weights,
            loss_mask=batch.loss_mask,
            sample_ids=batch.window_segment_ids,
            loss_weights=batch.loss_weights,
        )
        self._reduce = weighted_sum
        if config.custom_pg_loss_reducer_function_path is not None:
            self._reduce = custom_reduction(config, batch)

    def __call__(self, values: Tensor) -> tuple[Tensor, MicroBatchMetrics]:
        """Compute the loss and its detached metrics; values [window] float32 or float64, attached to the graph."""
        batch, weights = self.batch, self._weights
        values = masked(values, batch.loss_mask)
        old_values, returns = self._old_values.to(values.dtype), self._returns.to(values.dtype)
        token_loss = value_loss(values, old_values, returns, self.critic.value_clip)
        inner_sum = self._reduce(token_loss, weights.loss, batch.loss_mask)
        loss = quotient(inner_sum, weights.outer_count)
        table = value_metric_table(self.config)
        parts = [
            checksums(weights, position_coefficients(self.config, batch, self._totals)),
            table.sums(self._metric_values(token_loss, values), weights, batch.loss_mask),
            loss.detach().double().reshape(1),
            self._counts,
        ]
        metrics = MicroBatchMetrics.of(table.names, table.pairs(parts))
        metrics.batch, metrics.totals = replace(batch, side_channels={}), self._totals
        metrics.is_nan = token_loss.isnan()
        return loss, metrics

    @torch.no_grad()
    def _metric_values(self, token_loss: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Compute the values of `MEANS` and `SUMS`, [window] float64 each."""
        is_clipped = token_loss > 0.5 * (values - self._returns).square()
        values, returns = values.double(), self._returns.double()
        error = returns - values
        means = (values, returns, is_clipped)
        sums = (torch.ones_like(error), returns, returns.square(), error, error.square())
        return dict(zip((*MEANS, *SUMS), (*means, *sums), strict=True))


@functools.lru_cache(maxsize=64)
def value_metric_table(config: PolicyLossConfig) -> PairTable:
    """Return the (numerator, denominator) metrics of a critic's step."""
    rows = (*((name, "mean") for name in MEANS), *((name, "sum") for name in SUMS))
    return PairTable(("value_loss",), rows if config.pg_metrics != "none" else ())


@dataclass(frozen=True, eq=False)
class ValueReport:
    """This rank's sums of the critic's step, which travel in the all-reduce of the policy's metrics."""

    config: PolicyLossConfig
    micro_batches: Sequence[Mapping[str, Tensor]]
    """The metrics of this rank's micro-batches."""
    sums: Tensor
    """The pairs [names, 2] float64 of this rank; zeros where it does not contribute."""

    @classmethod
    def of(
        cls,
        config: PolicyLossConfig,
        micro_batches: Sequence[Mapping[str, Tensor]],
        *,
        contributes: bool,
        device: torch.device | str,
    ) -> ValueReport:
        """Add up one rank's micro-batches; arguments as for `reduce_metrics`."""
        counted = micro_batches if contributes else ()
        names = value_metric_table(config).names
        return cls(config, counted, add_pairs(names, counted, device))

    def metrics(self, reduced: Tensor) -> dict[str, float]:
        """Compute the critic's metrics by name from the pairs [names, 2] of the whole world, on the host.

        Raises:
            RuntimeError: under `check_aggregation`, the aggregation checksum is not 1.
        """
        names = value_metric_table(self.config).names
        quotients = dict(zip(names, (reduced[:, 0] / reduced[:, 1]).tolist(), strict=True))
        if math.isnan(quotients["value_loss"]):
            report_nan_tokens(self.micro_batches, "the critic's output, old_values and returns")
        report = {name: quotients[name] for name in ("value_loss", *MEANS) if name in quotients}
        report[f"value_{CHECKSUM}"] = check_checksum(self.config, quotients, self.micro_batches)
        if "error_sum" in quotients:
            report["explained_variance"] = _explained_variance([quotients[name] for name in SUMS])
        return report


def _explained_variance(sums: Sequence[float]) -> float:
    """Compute `1 - Var(R - v) / Var(R)` over a step's active tokens from `SUMS`; NaN where all returns are equal."""
    count, returns, returns_squared, errors, errors_squared = sums
    if not count:
        return math.nan
    variance = returns_squared / count - (returns / count) ** 2
    unexplained = errors_squared / count - (errors / count) ** 2
    # Below rounding error the variance is zero.
    return 1 - unexplained / variance if variance > 1e-12 * returns_squared / count else math.nan
