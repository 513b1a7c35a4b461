"""Source of samples from an iterator."""

import itertools
from collections.abc import Iterable
from typing import Generic

from megatron_pg.step.totals import AnySample


class IteratorSource(Generic[AnySample]):
    """Samples from an iterator, or None for a slot without one. Every rank has its own share."""

    is_shared = False

    def __init__(self, samples: Iterable[AnySample | None]) -> None:
        self._samples = iter(samples)
        self._position = 0

    def seek(self, num_slots: int) -> None:
        """Skip to a slot. The iterator must yield the same samples as in the stopped run.

        Raises:
            ValueError: the iterator is already beyond the slot.
        """
        if num_slots < self._position:
            raise ValueError(
                f"position {num_slots} has been passed (now at {self._position}). Build a new "
                "source to go back."
            )
        self.pull(num_slots - self._position)

    def pull(self, count: int) -> list[AnySample | None]:
        """Pull the next samples, fewer than `count` at the end."""
        pulled: list[AnySample | None] = list(itertools.islice(self._samples, count))
        self._position += len(pulled)
        return pulled
