"""The value loss of one micro-batch on one rank, and what a step reports of its critic.

Aggregation, totals, token windows, the checksum and the sums of a step are those of the policy loss: what is here is the
formula and its metrics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_pg.config.critic import CriticConfig
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.checksum import CHECKSUM, checksum_of
from megatron_pg.loss.masking import masked
from megatron_pg.loss.metrics import MicroBatchMetrics, check_checksum, report_nan_tokens
from megatron_pg.loss.pairs import MetricTable
from megatron_pg.loss.weights import MicroBatchWeights
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import CRITIC_FIELDS
from megatron_pg.step.totals import StepTotals

MEANS = ("value", "return", "value_clipfrac")
"""Means over documents, as those of the policy's metrics."""
SUMS = ("token_sum", "return_sum", "return_squared_sum", "error_sum", "error_squared_sum")
"""Sums over active tokens that the explained variance is made of; a step does not report them."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> Tensor:
    """PPO's clipped loss of each token, `1/2 max((v - R)^2, (v_clip - R)^2)`, `v_clip = v_old + clamp(v - v_old, +-c)`.

    The clip is that of the released code of Schulman et al. (arXiv:1707.06347), whose paper has the plain square.

    Args:
        values: the critic's, any shape, with gradient.
        old_values: the same shape, those that the advantages were made of.
        returns: the same shape.
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
        given = []
        for field in CRITIC_FIELDS:
            of_window: Tensor | None = getattr(batch, field)
            if of_window is None:
                raise ValueError(
                    f"{batch.samples[0].name} has no {field}, which the value loss needs: give Sample({field}=...) to every "
                    "sample of the step (compute_values, then gae)"
                )
            given.append(masked(of_window, batch.loss_mask))
        self._old_values, self._returns = given
        self.config, self.critic, self.batch, self._totals = config, critic, batch, totals
        self._weights = MicroBatchWeights.build(config, batch, totals, step_share)

    def __call__(self, values: Tensor) -> tuple[Tensor, MicroBatchMetrics]:
        """The loss and its detached metrics; values [window] float32 or float64, attached to the graph."""
        values = masked(values, self.batch.loss_mask)
        old_values, returns = self._old_values.to(values.dtype), self._returns.to(values.dtype)
        of_tokens = value_loss(values, old_values, returns, self.critic.value_clip)
        loss = self._weights.loss(of_tokens)
        table = value_metric_table(self.config)
        of_metrics = self._of_metrics(of_tokens, values) if table.rows else None
        parts = table.parts(self._weights, {"value_loss": loss}, of_metrics)
        metrics = MicroBatchMetrics.of(table.names, table.pairs(self._weights, parts))
        metrics.batch, metrics.totals = replace(self.batch, side_channels={}), self._totals
        metrics.is_nan = of_tokens.isnan()
        return loss, metrics

    @torch.no_grad()
    def _of_metrics(self, of_tokens: Tensor, values: Tensor) -> Tensor:
        """The values of `MEANS` and `SUMS`, [rows, window] float64."""
        is_clipped = of_tokens > 0.5 * (values - self._returns).square()
        values, returns = values.double(), self._returns.double()
        error = returns - values
        rows = [values, returns, is_clipped.double()]
        rows += [torch.ones_like(error), returns, returns.square(), error, error.square()]
        return torch.stack(rows)


@functools.lru_cache(maxsize=64)
def value_metric_table(config: PolicyLossConfig) -> MetricTable:
    """The (numerator, denominator) metrics of a critic's step."""
    rows = (*((name, "mean") for name in MEANS), *((name, "sum") for name in SUMS))
    rows = rows if config.pg_metrics != "none" else ()
    return MetricTable(("value_loss",), rows)


@dataclass(frozen=True, eq=False)
class ValueReport:
    """What this rank knows of the critic's step, to be added up over the world beside the policy's metrics."""

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
        """The report of one rank; arguments as for `reduce_metrics`."""
        names = value_metric_table(config).names
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
        counted = micro_batches if contributes else ()
        for metrics in counted:
            sums += torch.stack([metrics[name] for name in names])
        return cls(config, counted, sums)

    def metrics(self, reduced: Tensor) -> dict[str, float]:
        """The critic's metrics by name, from the pairs [names, 2] of the whole world, on the host.

        Raises:
            RuntimeError: under `check_aggregation`, the aggregation checksum is not 1.
        """
        names = value_metric_table(self.config).names
        found = dict(zip(names, (reduced[:, 0] / reduced[:, 1]).tolist(), strict=True))
        if found["value_loss"] != found["value_loss"]:
            report_nan_tokens(self.micro_batches, "the critic's output, old_values and returns")
        check_checksum(self.config, found, self.micro_batches)
        report = {name: found[name] for name in ("value_loss", *MEANS) if name in found}
        report[f"value_{CHECKSUM}"], _ = checksum_of(found)
        if "error_sum" in found:
            report["explained_variance"] = _explained_variance(*(found[name] for name in SUMS))
        return report


def _explained_variance(
    count: float, returns: float, returns_squared: float, errors: float, errors_squared: float
) -> float:
    """`1 - Var(R - v) / Var(R)` over the active tokens of a step; NaN where the returns are all equal."""
    if not count:
        return math.nan
    variance = returns_squared / count - (returns / count) ** 2
    unexplained = errors_squared / count - (errors / count) ** 2
    # What rounding leaves of a variance of nothing is no variance.
    return 1 - unexplained / variance if variance > 1e-12 * returns_squared / count else math.nan
