"""The value loss of one micro-batch on one rank, and what a step reports of its critic.

Aggregation, totals, token windows, the checksum and the sums of a step are those of the policy loss: what is here is the
formula and its metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.config.critic import CriticConfig
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.checksum import CHECKSUM, CHECKSUMS, checksum_of, checksums
from megatron_pg.loss.masking import masked
from megatron_pg.loss.metrics import (
    MicroBatchMetrics,
    check_checksum,
    metric_columns,
    report_nan_tokens,
    step_sums,
)
from megatron_pg.loss.reducer import policy_gradient_reduction
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
        self._share = step_share
        counted = totals.counted_in(config.loss_weight_denominator)
        self._reduction = policy_gradient_reduction(config, batch, counted)
        self._columns = metric_columns(config, batch, totals)

    def __call__(self, values: Tensor) -> tuple[Tensor, MicroBatchMetrics]:
        """The loss and its detached metrics; values [window] float32 or float64, attached to the graph."""
        values = masked(values, self.batch.loss_mask)
        old_values, returns = self._old_values.to(values.dtype), self._returns.to(values.dtype)
        of_tokens = value_loss(values, old_values, returns, self.critic.value_clip)
        loss = self._reduction(of_tokens)
        metrics = MicroBatchMetrics(step_sums({"value_loss": loss}, self._share))
        metrics |= checksums(self._reduction, self._share, loss.device)
        if self._columns is not None:
            metrics |= self._metrics(of_tokens, values, self._columns[0])
        metrics.batch, metrics.totals, metrics.is_nan = self.batch, self._totals, of_tokens.isnan()
        return loss, metrics

    @torch.no_grad()
    def _metrics(self, of_tokens: Tensor, values: Tensor, columns: Tensor) -> dict[str, Tensor]:
        """The pairs of `MEANS` and `SUMS`."""
        is_clipped = of_tokens > 0.5 * (values - self._returns).square()
        values, returns = values.double(), self._returns.double()
        error = returns - values
        rows = [values, returns, is_clipped.double()]
        rows += [torch.ones_like(error), returns, returns.square(), error, error.square()]
        sums = torch.stack(rows) @ columns
        documents = columns[:, 0].sum()
        means = {
            name: torch.stack([x, documents]) for name, x in zip(MEANS, sums[:, 0], strict=False)
        }
        return means | step_sums(dict(zip(SUMS, sums[len(MEANS) :, 1], strict=True)), self._share)


def value_metric_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """The (numerator, denominator) metrics of a critic's step, as they are packed."""
    checked = CHECKSUMS if config.custom_pg_loss_reducer_function_path is None else ()
    return ("value_loss", *checked, *((*MEANS, *SUMS) if config.pg_metrics != "none" else ()))


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
        names = value_metric_names(config)
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
        pairs = zip(
            value_metric_names(self.config), (reduced[:, 0] / reduced[:, 1]).tolist(), strict=True
        )
        found = dict(pairs)
        if found["value_loss"] != found["value_loss"]:
            report_nan_tokens(self.micro_batches, "the critic's output, old_values and returns")
        check_checksum(self.config, found, self.micro_batches)
        report = {name: found[name] for name in ("value_loss", *MEANS) if name in found}
        if CHECKSUM in found:
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
