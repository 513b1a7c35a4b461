"""The value loss of one micro-batch on one rank, and the critic's metrics of a step.

This file has the formula and its metrics. Aggregation, totals, the checksum and a step's sums are the policy loss's.
"""

import functools
import math
from collections.abc import Mapping, Sequence

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
    Arguments are those of `policy_loss_function`. Raises a ValueError for samples without `old_values` or `returns`.
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
        mask = batch.loss_mask
        self._old_values, self._returns = (masked(getattr(batch, x), mask) for x in CRITIC_FIELDS)
        self.config, self.critic, self.batch, self._totals = config, critic, batch, totals
        self._counts, sample_weights = host_weights(config, batch, totals, step_share)
        window = (mask, batch.window_segment_ids, batch.loss_weights)
        self._weights = Weights.spread(self._counts, sample_weights, *window)
        self._reduce = weighted_sum
        if config.custom_pg_loss_reducer_function_path is not None:
            self._reduce = custom_reduction(config, batch)

    def __call__(self, values: Tensor) -> tuple[Tensor, MicroBatchMetrics]:
        """Compute the loss and its detached metrics; values [window] float32 or float64, attached to the graph."""
        batch, weights, mask = self.batch, self._weights, self.batch.loss_mask
        values = masked(values, mask)
        old_values, returns = self._old_values.to(values.dtype), self._returns.to(values.dtype)
        token_loss = value_loss(values, old_values, returns, self.critic.value_clip)
        loss = quotient(self._reduce(token_loss, weights.loss, mask), weights.outer_count)
        table = value_metric_table(self.config)
        parts = [
            checksums(weights, position_coefficients(self.config, batch, self._totals)),
            table.sums(self._metric_values(token_loss, values), weights, mask),
            loss.detach().double().reshape(1),
            self._counts,
        ]
        metrics = MicroBatchMetrics.of(table.names, table.pairs(parts), batch, self._totals)
        metrics.is_nan = token_loss.isnan()
        return loss, metrics

    @torch.no_grad()
    def _metric_values(self, token_loss: Tensor, values: Tensor) -> dict[str, Tensor]:
        is_clipped = token_loss > 0.5 * (values - self._returns).square()
        values, returns = values.double(), self._returns.double()
        error = returns - values
        means = (values, returns, is_clipped)
        sums = (torch.ones_like(error), returns, returns.square(), error, error.square())
        return dict(zip((*MEANS, *SUMS), (*means, *sums), strict=True))


@functools.lru_cache(maxsize=64)
def value_metric_table(config: PolicyLossConfig) -> PairTable:
    rows = (*((name, "mean") for name in MEANS), *((name, "sum") for name in SUMS))
    return PairTable(("value_loss",), rows if config.pg_metrics != "none" else ())


class ValueReport:
    """This rank's sums of the critic's step, which travel in the all-reduce of the policy's metrics.

    `micro_batches` are the metrics of the rank's micro-batches; none where its peers bring the same numbers.
    """

    def __init__(
        self,
        config: PolicyLossConfig,
        micro_batches: Sequence[Mapping[str, Tensor]],
        device: torch.device | str,
    ) -> None:
        self._config, self._micro_batches = config, micro_batches
        self._names = value_metric_table(config).names
        self.sums = add_pairs(self._names, micro_batches, device)
        """The pairs, [names, 2] float64."""

    def metrics(self, reduced: Tensor) -> dict[str, float]:
        """Compute the critic's metrics by name from the pairs [names, 2] of the whole world, on the host.

        Raises:
            RuntimeError: under `check_aggregation`, the aggregation checksum is not 1.
        """
        means = (reduced[:, 0] / reduced[:, 1]).tolist()
        quotients = dict(zip(self._names, means, strict=True))
        if math.isnan(quotients["value_loss"]):
            report_nan_tokens(self._micro_batches, "the critic's output, old_values and returns")
        report = {name: quotients[name] for name in ("value_loss", *MEANS) if name in quotients}
        checksum = check_checksum(self._config, quotients, self._micro_batches)
        report[f"value_{CHECKSUM}"] = checksum
        if "error_sum" in quotients:
            report["explained_variance"] = _explained_variance(*(quotients[x] for x in SUMS))
        return report


def _explained_variance(
    count: float, returns: float, returns_squared: float, errors: float, errors_squared: float
) -> float:
    """Compute `1 - Var(R - v) / Var(R)` over a step's active tokens; NaN where all returns are equal."""
    if not count:
        return math.nan
    variance = returns_squared / count - (returns / count) ** 2
    unexplained = errors_squared / count - (errors / count) ** 2
    # Below rounding error the variance is zero.
    return 1 - unexplained / variance if variance > 1e-12 * returns_squared / count else math.nan
