"""Sources of the samples that an iterator yields."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

import torch.distributed as dist

from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.totals import AnySample

_END = object()

Value = TypeVar("Value")
READER = "model-parallel rank"


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


class LiveSource(IteratorSource[AnySample]):
    """Samples of an iterator that may wait for a rollout engine, and for how long a step waits with it.

    A thread of its own advances the iterator, one sample at a time and none beyond those that were asked for.

    Args:
        samples: this data-parallel rank's samples, read on the first rank of `model_parallel_group` alone. Those of a rollout,
            and of a prompt group where groups are kept whole or must not be cut, come from this data-parallel rank: samples
            of theirs that were late would be refused.
        wait_seconds: the longest wait for the samples that one exchange asks for. Above 0.
        late_samples: `error` refuses the step on all ranks. `next_step` lets the step go on without the samples; a step to
            come takes them. Every total is of what the step holds. The last rollout of a late rank, of which more may come, is
            left to that step whole.
        model_parallel_group: the ranks that train on the same samples, which the first sends to the others: clocks of their
            own would disagree. None is this rank alone.

    Raises:
        ValueError: `wait_seconds` of 0 or less, or an unknown `late_samples`.
    """

    def __init__(
        self,
        samples: Iterable[AnySample | None],
        *,
        wait_seconds: float,
        late_samples: Literal["error", "next_step"] = "error",
        model_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not wait_seconds > 0:
            raise ValueError(f"wait_seconds is {wait_seconds}: expected seconds, above 0")
        if late_samples not in ("error", "next_step"):
            raise ValueError(f"late_samples is {late_samples!r}: expected error or next_step")
        super().__init__(samples)
        self._wait_seconds, self._refuses = wait_seconds, late_samples == "error"
        self._group = model_parallel_group
        self._reads = model_parallel_group is None or dist.get_rank(model_parallel_group) == 0
        self.is_late = False
        """True once a pull of this step has waited in vain: further ones take what is there. A new step sets it to False."""
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._came: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_asked = False
        self._kept: list[AnySample | None] = []
        if self._reads:
            # A daemon: the process can end while the iterator waits.
            threading.Thread(target=self._read, daemon=True).start()

    def seek(self, position: int) -> None:
        """Skip ahead, as `IteratorSource.seek` does."""
        skip = super().seek
        self._of_reader(lambda: skip(position) if self._reads else None)
        self._position = position

    def pull(self, count: int) -> list[AnySample | None]:
        """Pull the next samples, fewer than `count` at the end, or where `is_late` then is True.

        Every rank of `model_parallel_group` must call it.
        """
        pulled, self.is_late = self._of_reader(lambda: self._wait(count))
        self._position += len(pulled)
        return pulled

    def _of_reader(self, compute: Callable[[], Value]) -> Value:
        """Return what the rank that reads computes, on every rank of `model_parallel_group`; its error is raised on all."""
        return compute_and_gather(compute, lambda value: value, self._group, READER)[1][0]

    def _wait(self, count: int) -> tuple[list[AnySample | None], bool]:
        """Return the samples that come in time, and True if some did not; nothing on a rank that does not read."""
        until = time.monotonic() + (0.0 if self.is_late else self._wait_seconds)
        pulled, self._kept = self._kept[:count], self._kept[count:]
        while self._reads and len(pulled) < count:
            if not self._is_asked:
                self._asked.put(None)
                self._is_asked = True
            try:
                came = self._came.get(timeout=max(until - time.monotonic(), 0.01))
            except queue.Empty:
                if not self._refuses:
                    return pulled, True
                # For a caller who tries again.
                num_pulled, self._kept = len(pulled), pulled + self._kept
                raise ValueError(
                    f"{num_pulled} of {count} samples have come in {self._wait_seconds:g} s (wait_seconds): look at this "
                    "rank's rollout engine, wait longer, or let steps go on without them by late_samples='next_step'"
                ) from None
            self._is_asked = False
            if came is _END:
                break
            if isinstance(came, BaseException):
                raise came
            pulled.append(came)
        return pulled, False

    def _read(self) -> None:
        while True:
            self._asked.get()
            try:
                self._came.put(next(self._samples, _END))
            except BaseException as error:  # `_wait` raises it
                self._came.put(error)
