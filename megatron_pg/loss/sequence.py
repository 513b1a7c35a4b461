"""Sums over whole sequences whose tokens are spread over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig, anchor_of
from megatron_pg.config.rows import TABLES, read_off_rows
from megatron_pg.loss.clip import clip_range_of_logs, clipped_by_sign
from megatron_pg.loss.masking import given_log_probs, masked
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import Sample


@dataclass(frozen=True, eq=False)
class SequenceReduction:
    """Per-sample sums and means of the token windows of one context-parallel group.

    Every method that sums is one all-reduce over the group, which all of its ranks must join in the
    same order, those whose window is empty included. Nothing here has a gradient. Sums are float64,
    so that they do not depend on how the tokens are spread.
    """

    window_segment_ids: Tensor
    """[window] int64, the sample of each token of this rank's window."""
    num_samples: int
    """Samples of the micro-batch, the same on every rank of the group."""
    context_parallel_group: dist.ProcessGroup | None = None
    """None for context parallelism of size 1."""

    @torch.no_grad()
    def sums(self, rows: Tensor) -> Tensor:
        """The sums [rows, window] -> [rows, samples] float64, all rows in one all-reduce."""
        return self.over_group(self.of_rank(rows))

    def of_rank(self, rows: Tensor) -> Tensor:
        """The sums [rows, window] -> [rows, samples] float64 over this rank's window alone."""
        totals = rows.new_zeros(rows.shape[0], self.num_samples, dtype=torch.float64)
        return totals.index_add_(1, self.window_segment_ids, rows.double())

    def over_group(self, totals: Tensor) -> Tensor:
        """The sums of every rank's, in place: the all-reduce."""
        group = self.context_parallel_group
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(totals, group=group)
        return totals

    def sum(self, values: Tensor, loss_mask: Tensor) -> Tensor:
        """The sum, [window] -> [samples] float64, over active tokens; 0 for a sample that has none."""
        return self.sums(masked(values, loss_mask)[None])[0]

    def mean(self, values: Tensor, loss_mask: Tensor) -> Tensor:
        """The mean, [window] -> [samples] float64, over active tokens; 0 for a sample that has none."""
        sums = self.sums(torch.stack([masked(values, loss_mask).double(), loss_mask.double()]))
        return sums[0] / sums[1].clamp(min=1)

    def to_tokens(self, per_sample: Tensor) -> Tensor:
        """Values [samples] -> [window]: every token gets its sample's value."""
        return per_sample[self.window_segment_ids]


@dataclass(frozen=True, eq=False)
class SequenceLogRatios:
    """Log-ratios of whole sequences, over the tokens active before any rejection. No gradient."""

    reduction: SequenceReduction
    active_tokens: Tensor
    """The active tokens of each sample, [samples] float64."""
    sums: Mapping[str, Tensor]
    """The sums, [samples] float64 each, those of `Row.sequence_sums` that a row asks for."""

    @classmethod
    def of(
        cls, config: PolicyLossConfig, reduction: SequenceReduction, sums: Tensor
    ) -> SequenceLogRatios:
        """The log-ratios of sums [1 + names, samples] float64, as `summands_of_sequences` lays them out."""
        active, *made = sums
        return cls(reduction, active, dict(zip(sums_over_sequences(config), made, strict=True)))

    def sum_of_tokens(self, name: str) -> Tensor:
        """The sum [window] float64 over the token's sample.

        Raises:
            ValueError: no row that is on asks for it.
        """
        if name not in self.sums:
            raise ValueError(
                f"the sum over sequences of {name!r} was not made: a row that reads it names it in sums_over_sequences()"
            )
        return self.reduction.to_tokens(self.sums[name])

    def mean_of_tokens(self, name: str) -> Tensor:
        """The mean [window] float64 over the active tokens of the token's sample; errors as of `sum_of_tokens`."""
        active_tokens = self.reduction.to_tokens(self.active_tokens)
        return self.sum_of_tokens(name) / active_tokens.clamp(min=1)


@read_off_rows
def sums_over_sequences(config: PolicyLossConfig) -> tuple[str, ...]:
    """What the rows that are on need of whole sequences, by name; the config alone decides."""
    rows_on = [row for table in TABLES.values() for row in table.rows_on(config)]
    return tuple(sorted({name for row in rows_on for name in row.sums_over_sequences()}))


def sequence_log_ratios(
    config: PolicyLossConfig,
    batch: PackedBatch,
    log_probs: Tensor,
    *,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> SequenceLogRatios | None:
    """What the rows that are on need of whole sequences, in one all-reduce.

    Whether there is an all-reduce depends on the config alone: either every rank of the
    context-parallel group joins it or none does.

    Args:
        config: the settings of the loss.
        batch: this rank's part of the micro-batch.
        log_probs: [window] of the policy in training.
        context_parallel_group: None for context parallelism of size 1.

    Returns:
        None where no setting works on whole sequences.

    Raises:
        ValueError: the batch lacks log-probs that a setting needs.
    """
    if not sums_over_sequences(config):
        return None
    ids, num_samples = batch.window_segment_ids, batch.window.num_samples
    reduction = SequenceReduction(ids, num_samples, context_parallel_group)
    sums = reduction.sums(summands_of_sequences(config, batch, log_probs))
    return SequenceLogRatios.of(config, reduction, sums)


def summands_of_sequences(
    config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor
) -> Tensor:
    """What is added up over sequences, [1 + names, window] float64: the active tokens, then `sums_over_sequences`."""
    summands: dict[str, Callable[[PolicyLossConfig, PackedBatch, Tensor], Tensor]] = {
        "policy": _log_ratio,
        "clipped_policy": _clipped_log_ratio,
        "mismatch": lambda config, batch, log_probs: rollout_mismatch(batch),
    }
    rows = [summands[name](config, batch, log_probs) for name in sums_over_sequences(config)]
    return torch.stack([batch.loss_mask.double(), *rows])


def _log_ratio(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    """The log-ratio log r, [window] float64, 0 where masked. No gradient."""
    new = masked(log_probs.detach(), batch.loss_mask).double()
    return new - given_log_probs(batch, anchor_of(config), "the sequence ratio")


def _clipped_log_ratio(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    """The same within the logarithms of the clip's bounds, where the advantage makes them active."""
    advantages = masked(batch.advantages, batch.loss_mask)
    bounds = clip_range_of_logs(config)
    return clipped_by_sign(_log_ratio(config, batch, log_probs), bounds, advantages).values


def given_sequence(sequence: SequenceLogRatios | None, needed_by: str) -> SequenceLogRatios:
    """The sums given, or a ValueError that says what needs them."""
    if sequence is None:
        raise ValueError(
            f"{needed_by} needs the tokens of every context-parallel rank: pass "
            "sequence=sequence_log_ratios(config, batch, log_probs, context_parallel_group=...)"
        )
    return sequence


def rollout_mismatch(
    carrier: PackedBatch | Sample, needed_by: str = "a rollout correction"
) -> Tensor:
    """[window] or [response_length] float64 old_log_prob - rollout_log_prob, 0 where masked. No gradient.

    Raises:
        ValueError: one of the two is missing; it says what needs it.
    """
    old_log_probs = given_log_probs(carrier, "old_log_probs", needed_by).double()
    return old_log_probs - given_log_probs(carrier, "rollout_log_probs", needed_by)
