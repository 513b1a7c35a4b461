"""The rows of a micro-batch that are centered by the sampler's likeliest tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.head import Centering
from megatron_pg.step.batch import PackedBatch


@dataclass(frozen=True)
class SamplerHead:
    """The weights of a centered loss, and the fields of the samples that hold the sampler's head.

    See `megatron_pg.head.centering`.
    """

    weights: Literal["none", "clip", "mask"]
    low: float
    high: float
    output: ClassVar[str] = "centering"
    shape: ClassVar[tuple[int, ...]] = Centering.shape
    flags: ClassVar[str] = "--score-centering"

    @classmethod
    def of(cls, config: PolicyLossConfig) -> Self | None:
        """Return None for a loss that is not centered."""
        if not config.score_centering:
            return None
        weights: Any = {"truncate": "clip", "mask": "mask"}[config.tis_mode]
        return cls(weights if config.use_tis else "none", config.tis_clip_low, config.tis_clip)

    def on_rows(
        self, batch: PackedBatch, place: Callable[[Any], Tensor], *_: object
    ) -> Centering | None:
        """Collect the sampler's head on the rows that `place` makes of [window, ...]; None where
        there is no sample.
        """
        if batch.sampler_top_k is None:
            return None
        ids, log_probs = batch.sampler_top_k
        # Rows that score no response token are 0 after `place`, and -1 is no id.
        return Centering(
            place(ids + 1).long() - 1, place(log_probs), self.weights, self.low, self.high
        )
