"""Sums over whole sequences whose tokens are spread over context-parallel ranks.

A row of a table names the sums that it reads (`Row.sequence_sums`). All sums of a micro-batch are added up over the
context-parallel group in one all-reduce, in float64, so that they do not depend on how the tokens are spread. They have no
gradient, and cover the tokens that are active before any rejection.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.rows import TABLES
from megatron_pg.loss.tokens import Tokens, clip_range_of_logs, clipped_by_sign

ACTIVE = "active_tokens"  # the sum of the loss mask


@dataclass(frozen=True, eq=False)
class SequenceSums:
    """Sums over the sequences of one micro-batch, over every context-parallel rank."""

    sample_ids: Tensor  # of each token of this rank's window, [window] int64
    sums: Mapping[str, Tensor]  # by name, [samples] float64; empty where no row reads any

    @classmethod
    def of_table(cls, config: PolicyLossConfig, sample_ids: Tensor, table: Tensor | None) -> Self:
        """Name the rows of a table [names, samples], in the order of `sequence_sum_names`; None where no row reads a sum."""
        rows = () if table is None else zip(sequence_sum_names(config), table.unbind(), strict=True)
        return cls(sample_ids, dict(rows))

    def total(self, name: str) -> Tensor:
        """Return the sum over each token's sequence, [window] float64, or refuse one that no row that is on asks for."""
        if name not in self.sums:
            raise ValueError(
                f"the sum over sequences of {name!r} was not made: a row that reads it names it in sequence_sums"
            )
        return self.sums[name][self.sample_ids]

    def mean(self, name: str) -> Tensor:
        """Return the mean over the active tokens of each token's sequence, [window] float64."""
        return self.total(name) / self.total(ACTIVE).clamp(min=1)


def sequence_sum_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """List the sums over sequences that the rows read which are on; `ACTIVE` is the first. Empty where none does."""
    rows_on = [row for table in TABLES.values() for row in table.rows_on(config)]
    names = sorted({name for row in rows_on for name in row.sequence_sums})
    return (ACTIVE, *names) if names else ()


@torch.no_grad()
def sums_of_rank(config: PolicyLossConfig, tokens: Tokens, num_samples: int) -> Tensor:
    """Add up this rank's window by sample, [names, num_samples] float64, in the order of `sequence_sum_names`."""
    rows = torch.stack([SUMMANDS[name](config, tokens) for name in sequence_sum_names(config)])
    return rows.new_zeros(len(rows), num_samples).index_add_(1, tokens.sample_ids, rows)


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
"""The values [window] float64, 0 at masked positions, that are added up over sequences."""
