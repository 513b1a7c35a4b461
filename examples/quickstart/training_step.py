"""What a run trains on, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_pg import Sample

from .model import Policy


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """The samples of one optimizer step.

    Attributes:
        samples: this data-parallel rank's.
        metrics: what is known of them before the step, over all ranks; None for what is not.
        may_stop: whether a checkpoint can be written after it.
    """

    samples: Sequence[Sample]
    metrics: Mapping[str, float | None]
    may_stop: bool = True


class SampleStream(Protocol):
    """Generated answers or rollout files: what a run asks of them. Every rank calls everything alike."""

    title: str
    """Of the progress bar."""
    vocabulary_size: int
    steps_per_round: int
    """Steps from one place where a checkpoint can be written to the next."""

    def attach(self, policy: Policy) -> None:
        """Use this policy."""

    def steps(self, first_step: int) -> Iterator[TrainingStep]:
        """The steps that remain, `first_step` of them done."""

    @property
    def reference(self) -> Any | None:
        """The reference model, for the checkpoint."""

    def rank_state(self) -> dict[str, Any]:
        """For the checkpoint: this rank's own."""

    def restore(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Go on from a checkpoint.

        Args:
            ranks: `rank_state` of every rank of the run that wrote it.
        """
