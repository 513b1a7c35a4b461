"""A source of the samples that an iterator yields."""

import itertools
from collections.abc import Iterable
from typing import Generic

from megatron_pg.step.totals import AnySample


class IteratorSource(Generic[AnySample]):
    """Samples of an iterator, None for a slot without one: every rank iterates over its own
    share.
    """

    is_shared = False

    def __init__(self, samples: Iterable[AnySample | None]) -> None:
        self._samples = iter(samples)
        self._position = 0

    def seek(self, num_slots: int) -> None:
        """Skip ahead; the iterator must give the same samples as in the run that stopped.

        Raises:
            ValueError: the samples have been passed.
        """
        if num_slots < self._position:
            raise ValueError(
                f"position {num_slots} has been passed (now at {self._position}): build the source "
                "anew to go back"
            )
        self.pull(num_slots - self._position)

    def pull(self, count: int) -> list[AnySample | None]:
        """Pull the next samples, fewer than `count` at the end."""
        pulled: list[AnySample | None] = list(itertools.islice(self._samples, count))
        self._position += len(pulled)
        return pulled
