"""Inputs for score centering by the sampler's most likely tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.head import Centering
from megatron_pg.step.batch import PackedBatch


@dataclass(frozen=True)
class SamplerHead:
    """Weights of a centered loss, with the sampler's most likely tokens from the samples.

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
        """Return the config's centering, or None without score centering."""
        if not config.score_centering:
            return None
        weights: Any = {"truncate": "clip", "mask": "mask"}[config.tis_mode]
        return cls(weights if config.use_tis else "none", config.tis_clip_low, config.tis_clip)

    def on_rows(
        self, batch: PackedBatch, place: Callable[[Any], Tensor], *_: object
    ) -> Centering | None:
        """Collect the sampler's tokens on rows, which `place` makes from [window, ...]. Return None
        without samples.
        """
        if batch.sampler_top_k is None:
            return None
        ids, log_probs = batch.sampler_top_k
        # `place` fills other rows with 0, which must become -1.
        return Centering(
            place(ids + 1).long() - 1, place(log_probs), self.weights, self.low, self.high
        )
