"""A source of the samples that an iterator yields."""

import itertools
from collections.abc import Iterable
from typing import Generic

from megatron_pg.step.totals import AnySample


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

        A position that has been passed, or that lies beyond the end, raises a ValueError.
        """
        if position < self._position:
            raise ValueError(
                f"position {position} has been passed (now at {self._position}): build the source anew to go back"
            )
        for _ in itertools.islice(self._samples, position - self._position):
            self._position += 1
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
