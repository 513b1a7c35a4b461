"""Which token made a loss NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.token_window import TokenWindow


@dataclass(frozen=True, eq=False)
class NaNTokens:
    """The active tokens of a micro-batch whose loss is NaN; named only when somebody asks."""

    is_nan: Tensor
    """[window] bool."""
    window: TokenWindow
    sample_names: tuple[str, ...]

    @classmethod
    def of(cls, batch: PackedBatch, pg_loss: Tensor) -> NaNTokens:
        """Args: pg_loss: [window], 0 where masked."""
        names = tuple(sample.name for sample in batch.samples)
        return cls(torch.isnan(pg_loss.detach()), batch.window, names)

    def describe(self) -> str | None:
        """The first such token by sample and position, or None. Waits for the device."""
        indices = self.is_nan.cpu().nonzero().flatten()
        if not indices.numel():
            return None
        token = int(indices[0])
        sample = int(self.window.window_segment_ids[token])
        start = sum(self.window.response_lengths[:sample])
        position = int(self.window.response_indices[token]) - start
        return (
            f"{indices.numel()} active tokens of this rank have a NaN loss, the first is response "
            f"token {position} of sample {sample} ({self.sample_names[sample]}): look at its logits, "
            "old_log_probs and rollout_log_probs"
        )
