"""Sources of samples: one data-parallel rank's share of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol

from megatron_pg.step.totals import AnySample


def no_sample_in(paths: Sequence[str], num_skipped: int) -> ValueError:
    """Make the error of `--rollout-files` without a good row: a run without a step would look like one that went well."""
    reason = "no rows"
    if num_skipped:
        reason = f"{num_skipped} bad rows skipped; --on-bad-row error names the first"
    return ValueError(f"--rollout-files {' '.join(paths)}: no sample in them ({reason})")


class SampleSource(Protocol[AnySample]):
    """One data-parallel rank's share of a stream of samples, dealt out in slots.

    All ranks are asked for the same number of slots at a time. Slot i of rank r comes, in the order of the whole
    stream, after slot i of rank r - 1 and before slot i + 1 of rank 0.
    """

    @property
    def can_reshard(self) -> bool:
        """True where a position is the same on all ranks and means the same at another data-parallel size."""

    @property
    def position(self) -> Any:
        """The place where the next pull begins; picklable."""

    def seek(self, position: Any) -> None:
        """Continue from a position, of this source or of another with the same stream."""

    def pull(self, count: int) -> list[AnySample | None]:
        """Pull the next `count` slots, fewer only at the end of this rank's share; None is a slot without a sample."""


class IteratorSource(Generic[AnySample]):
    """Samples of an iterator, None for a slot without one: every rank iterates over its own share. Positions count slots."""

    can_reshard = False

    def __init__(self, samples: Iterable[AnySample | None]) -> None:
        self._samples = iter(samples)
        self._position = 0

    @property
    def position(self) -> int:
        """Samples taken so far."""
        return self._position

    def seek(self, position: int) -> None:
        """Skip ahead; the iterator must give the same samples as the source that had the position.

        Raises:
            ValueError: the position has been passed, or the iterator ends before it.
        """
        if position < self._position:
            raise ValueError(
                f"position {position} has been passed (now at {self._position}): build the source anew to go back"
            )
        skipped = sum(1 for _ in itertools.islice(self._samples, position - self._position))
        self._position += skipped
        if self._position < position:
            raise ValueError(
                f"the iterator ends after {self._position} samples, before position {position}: it is not the one "
                "that the position is of"
            )

    def pull(self, count: int) -> list[AnySample | None]:
        """Pull the next samples, fewer than `count` at the end."""
        pulled: list[AnySample | None] = list(itertools.islice(self._samples, count))
        self._position += len(pulled)
        return pulled
