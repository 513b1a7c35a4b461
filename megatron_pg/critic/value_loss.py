"""Value loss of one micro-batch on one rank, and the critic's metrics of a step.

Aggregation, totals, the checksum and a step's sums come from the policy loss.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.critic.settings import CriticConfig
from megatron_pg.loss.aggregation import Weights, host_weights
from megatron_pg.loss.checksum import CHECKSUM, check_checksum
from megatron_pg.loss.metrics import (
    MicroBatchMetrics,
    PairTable,
    SumsReport,
    add_pairs,
    quotients,
    report_nan_tokens,
)
from megatron_pg.loss.policy_loss import quotient
from megatron_pg.loss.reducer import weighted_sum
from megatron_pg.loss.resolved import resolve
from megatron_pg.loss.tokens import masked
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import CRITIC_FIELDS
from megatron_pg.step.totals import StepTotals

MEANS = ("value", "return", "value_clipfrac")
"""Means over rollouts, as in the policy's metrics."""
SUMS = ("token_sum", "return_sum", "return_squared_sum", "error_sum", "error_squared_sum")
"""Sums over active tokens for the explained variance. A step does not report them."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> Tensor:
    """Compute PPO's clipped loss per token: `1/2 max((v - R)^2, (v_clip - R)^2)`, `v_clip = v_old +
    clamp(v - v_old, +-c)`.

    The clip comes from the released code of Schulman et al. (arXiv:1707.06347). The paper has the
    plain square.

    Args:
        values: the critic's values v, of any shape, with gradient.
        old_values: v_old, which the advantages came from, of the same shape.
        returns: R, of the same shape.
        value_clip: c, above 0.
    """
    # Clamp between bounds instead of a difference: inside them v_clip is bitwise equal to v.
    clipped = values.clamp(old_values - value_clip, old_values + value_clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


class MicroBatchValueLoss:
    """Value loss of one micro-batch on one rank, as a function of the values in its token window.

    It is built on the host before the model runs. Its sum over ranks and micro-batches is the
    step's value loss. For arguments see `policy_loss_function`.

    Raises:
        ValueError: samples lack `old_values` or `returns`.
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
                    f"{batch.samples[0].name} has no {field}, which the value loss requires. Pass "
                    f"Sample({field}=...) for every sample of the step (compute_values, then gae)."
                )
        self.config, self.critic, self.batch, self._totals = config, critic, batch, totals
        resolved = resolve(config)
        own_reducer, of_step = resolved.own_reducer, (batch, totals, step_share)
        self._step_numbers, self._sample_weights = host_weights(resolved.normalization, *of_step)
        self._reduce = own_reducer.reduction(batch) if own_reducer else weighted_sum

    def __call__(self, values: Tensor) -> tuple[Tensor, MicroBatchMetrics]:
        """Compute the loss and its detached metrics from values [window], float32 or float64, with
        gradient.
        """
        batch, mask = self.batch, self.batch.loss_mask
        window = (mask, batch.window_segment_ids, batch.loss_weights)
        weights = Weights.spread(self._step_numbers, self._sample_weights, *window)
        values = masked(values, mask)
        old_values, returns = (
            masked(getattr(batch, field), mask).to(values.dtype) for field in CRITIC_FIELDS
        )
        token_loss = value_loss(values, old_values, returns, self.critic.value_clip)
        loss = quotient(self._reduce(token_loss, weights.unrejected), weights.unrejected_count)
        table = value_metric_table(self.config)
        by_name = _metric_values(token_loss.detach(), values.detach(), returns)
        terms = {"value_loss": loss.detach()}
        pairs = table.pairs(table.parts(by_name, terms, weights, mask), self._step_numbers)
        is_nan = token_loss.isnan()
        return loss, MicroBatchMetrics(table, pairs, None, is_nan, batch, self._totals)


def _metric_values(token_loss: Tensor, values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    is_clipped = token_loss > 0.5 * (values - returns).square()
    values, returns = values.double(), returns.double()
    error = returns - values
    return {
        "value": values,
        "return": returns,
        "value_clipfrac": is_clipped,
        "token_sum": torch.ones_like(error),
        "return_sum": returns,
        "return_squared_sum": returns.square(),
        "error_sum": error,
        "error_squared_sum": error.square(),
    }


def value_metric_table(config: PolicyLossConfig) -> PairTable:
    """Return the table of the critic's metrics for a config."""
    rows = (*((name, "mean") for name in MEANS), *((name, "sum") for name in SUMS))
    return PairTable(("value_loss",), rows if config.pg_metrics != "none" else ())


def value_report(
    config: PolicyLossConfig,
    micro_batches: Sequence[Mapping[str, Tensor]],
    device: torch.device | str,
) -> SumsReport:
    """Sum the metrics of this rank's micro-batches, or of none if its peers report the same
    numbers.
    """
    names = value_metric_table(config).names

    def metrics(reduced: Tensor) -> dict[str, float]:
        found = quotients(names, reduced)
        if math.isnan(found["value_loss"]):
            report_nan_tokens(micro_batches, "the critic's output, old_values and returns")
        report = {name: found[name] for name in ("value_loss", *MEANS) if name in found}
        report[f"value_{CHECKSUM}"] = check_checksum(config, found, micro_batches)
        if "error_sum" in found:
            report["explained_variance"] = _explained_variance(**{x: found[x] for x in SUMS})
        return report

    return SumsReport(add_pairs(names, micro_batches, device), metrics)


def _explained_variance(
    token_sum: float,
    return_sum: float,
    return_squared_sum: float,
    error_sum: float,
    error_squared_sum: float,
) -> float:
    """Compute `1 - Var(R - v) / Var(R)` over a step's active tokens, NaN if returns are equal."""
    if not token_sum:
        return math.nan
    variance = return_squared_sum / token_sum - (return_sum / token_sum) ** 2
    unexplained = error_squared_sum / token_sum - (error_sum / token_sum) ** 2
    # A variance below rounding error counts as zero.
    is_positive = variance > 1e-12 * return_squared_sum / token_sum
    return 1 - unexplained / variance if is_positive else math.nan
