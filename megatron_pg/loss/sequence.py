"""Sums over whole sequences whose tokens are split over context-parallel ranks.

Table rows name the sums that they read (`Row.sequence_sums`). One all-reduce over the
context-parallel group adds all sums of a micro-batch, in float64, so that they do not depend on the
split. They have no gradient, and cover the tokens that are active before any rejection. A unit is a
sequence, or a turn with `--sequence-unit turn`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.tables import TABLES, rows_on
from megatron_pg.loss.tokens import Tokens, clip_range_of_logs, clipped_by_sign
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.sample import Sample

ACTIVE = "active_tokens"  # the sum of the loss mask


@dataclass(frozen=True, eq=False)
class SequenceSums:
    """Sums over the units of one micro-batch, over every context-parallel rank."""

    unit_ids: Tensor  # per token in this rank's window, [window] int64
    sums: Mapping[str, Tensor]  # by name, [units] float64, empty if no row reads any

    @classmethod
    def of_table(cls, names: Sequence[str], unit_ids: Tensor, table: Tensor | None) -> Self:
        """Make sums from a table [names, units], in the order of the names.

        The table is None if no row reads a sum.
        """
        rows = () if table is None else table.unbind()
        return cls(unit_ids, dict(zip(names, rows, strict=True)))

    def total(self, name: str) -> Tensor:
        """Return the sum over each token's unit, [window] float64.

        Raises:
            ValueError: no active row names this sum.
        """
        if name not in self.sums:
            raise ValueError(
                f"the sum {name!r} over sequences was not computed. Add it to sequence_sums of the "
                "row that reads it."
            )
        return self.sums[name][self.unit_ids]

    def mean(self, name: str) -> Tensor:
        """Return the mean over active tokens in each token's unit, [window] float64."""
        return self.total(name) / self.total(ACTIVE).clamp(min=1)


def sequence_sum_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """List the sums over sequences that active rows read, with `ACTIVE` first. Empty without
    any.
    """
    rows = [row for table in TABLES.values() for row in rows_on(table, config)]
    names = sorted({name for row in rows for name in row.sequence_sums})
    return (ACTIVE, *names) if names else ()


def sequence_units(config: PolicyLossConfig, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return the unit of each response token in the concatenated samples, and the sample of each
    unit, int64 on the host.
    """
    lengths = torch.tensor([s.response_length for s in samples], dtype=torch.int64, device="cpu")
    numbers = torch.arange(len(samples), device="cpu")
    samples_of_tokens = numbers.repeat_interleave(lengths)
    if config.sequence_unit == "sequence":
        return samples_of_tokens, numbers
    turns = [sample.turn_ids for sample in samples if sample.turn_ids is not None]
    is_first = torch.ones_like(samples_of_tokens, dtype=torch.bool)
    turn_ids = torch.cat([samples_of_tokens[:0], *turns])
    is_first[1:] = (samples_of_tokens.diff() != 0) | (turn_ids.diff() != 0)
    return is_first.cumsum(0) - 1, samples_of_tokens[is_first]


def units_of_window(config: PolicyLossConfig, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the unit of each token in this rank's window, and the sample of each unit.

    [window] and [at least two units], int64 on the batch's device.
    """
    units, samples = sequence_units(config, batch.samples)
    units = units[batch.window.response_indices]
    samples = pad(samples, (0, max(2 - len(samples), 0)))
    numbers = to_device(torch.cat([units, samples]), batch.loss_mask.device)
    return numbers[: len(units)], numbers[len(units) :]


@torch.no_grad()
def sums_of_rank(
    config: PolicyLossConfig, names: Sequence[str], tokens: Tokens, num_units: int
) -> Tensor:
    """Sum this rank's window by unit, [names, num_units] float64, for `sequence_sum_names`."""
    rows = [SUMMANDS[name](config, tokens) for name in names]
    table = tokens.log_probs.new_zeros(len(names), num_units, dtype=torch.float64)
    return table.index_add_(1, tokens.unit_ids, torch.stack(rows)) if rows else table


def _log_ratio(config: PolicyLossConfig, tokens: Tokens) -> Tensor:
    return tokens.log_probs.detach().double() - tokens.anchor(config)


def _clipped_log_ratio(config: PolicyLossConfig, tokens: Tokens) -> Tensor:
    bounds = clip_range_of_logs(config)
    return clipped_by_sign(_log_ratio(config, tokens), bounds, tokens.advantages)[0]


SUMMANDS: dict[str, Callable[[PolicyLossConfig, Tokens], Tensor]] = {
    ACTIVE: lambda config, tokens: tokens.loss_mask.double(),
    "policy": _log_ratio,
    "clipped_policy": _clipped_log_ratio,
    "mismatch": lambda config, tokens: tokens.mismatch(),
}
"""Summands [window] float64, 0 at masked positions, of the sums over sequences."""
