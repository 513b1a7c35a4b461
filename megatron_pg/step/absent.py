"""The names of the ranks that others wait for in an exchange: errors of torch name a socket, or nothing."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

POLL_SECONDS, WAIT_SECONDS = 2.0, 8.0
"""The interval at which a waiting rank looks into the job's store, and the wait after which the first writes there that it waits.
The others then write too."""
_num_exchanges: Counter[str] = Counter()
"""The exchanges so far of each group, by its name. All ranks of a group count the same."""


class AbsentRankError(RuntimeError):
    """An exchange failed: the message names the ranks that never came to it, or that ended in it."""


@contextlib.contextmanager
def naming_absent_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Name the ranks that an exchange in the body waits for. Every rank of the group must enter it; None is the default group.

    Two polls after `WAIT_SECONDS` one of the waiting ranks logs a warning with the absent ones, and again after twice as long. An
    exchange below `POLL_SECONDS` does not touch the job's store. The wait ends at the timeout of the process group, or where
    the backend finds the connection of a rank closed. NCCL ends the process there, so that the warning is all.

    Raises:
        AbsentRankError: the collective raised a RuntimeError of torch's, its cause.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        yield
        return
    group = group or distributed_c10d._get_default_group()
    try:
        name = group.group_name
    except RuntimeError:  # a wrapper of a trainer's own, as slime's: nobody is named
        yield
        return
    _num_exchanges[name] += 1
    exchange = _Exchange(group, _num_exchanges[name])
    watch = threading.Timer(POLL_SECONDS, exchange.watch)
    watch.daemon = True
    watch.start()
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise  # a class of its own is no failure of a connection, for which torch has these two
        raise AbsentRankError(f"{exchange.blame()} ({error})") from error
    finally:
        exchange.has_ended.set()
        watch.cancel()


class _Exchange:
    """One exchange of a group, as this rank writes to the store of the job and reads there."""

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        self.has_ended = threading.Event()
        self._group, self._number, self._began = group, number, time.monotonic()
        self._store = distributed_c10d._get_default_store()
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def _key(self, *names: object) -> str:
        return "/".join(map(str, ("megatron_pg", self._group.group_name, *names)))

    def watch(self) -> None:
        """Sign a failure of another rank, and write that this rank waits. The first to write logs the absent ranks."""
        next_report, is_first = WAIT_SECONDS, False
        with contextlib.suppress(RuntimeError):  # the store ends with the process that holds it
            while not self.has_ended.wait(POLL_SECONDS):
                if self._store.check([self._key("failed")]):
                    self._store.set(self._key("left", self._rank), "")
                    break
                waited = time.monotonic() - self._began
                is_new = next_report == WAIT_SECONDS
                is_asked = is_new and self._store.check([self._key("first", self._number)])
                if waited < next_report and not is_asked:
                    continue
                if is_new:
                    self._store.set(self._key("waits", self._rank), str(self._number))
                    is_first = self._store.add(self._key("first", self._number), 1) == 1
                    next_report += 2 * POLL_SECONDS  # for others to write
                elif is_first:
                    names = self._names(self._without(self._waits))
                    logger.warning(
                        f"waiting for {names} to come to an exchange, for {waited:.0f} s"
                    )
                    next_report = 2 * waited
                else:
                    next_report = math.inf
            if is_first:
                self._store.delete_key(self._key("first", self._number))

    def blame(self) -> str:
        """Agree with the other ranks, each of which has failed or waits, on those that did neither."""
        try:
            self._store.set(self._key("left", self._rank), "")
            if self._store.add(self._key("failed"), 1) == 1:
                # A rank that has just come looks after this time.
                began = time.monotonic()
                while absent := self._without(self._left):
                    # One rank alone may be about to sign as well.
                    patience = WAIT_SECONDS + 2 * POLL_SECONDS if absent[1:] else 0.0
                    if time.monotonic() - began > patience + 2 * POLL_SECONDS:
                        break
                    time.sleep(POLL_SECONDS / 10)
                self._store.set(self._key("absent"), " ".join(map(str, absent)))
            self._store.wait([self._key("absent")])
            absent = list(map(int, self._store.get(self._key("absent")).split()))
        except RuntimeError as error:
            return f"an exchange failed, and so did the job's store, which rank 0 or the launcher holds: {error}"
        if not absent:
            return "an exchange failed, and no rank of its group is absent"
        return f"{self._names(absent)} did not come to an exchange, or ended in it: see the log of that process"

    def _without(self, has_come: Callable[[int], bool]) -> list[int]:
        return [rank for rank in range(self._size) if not has_come(rank)]

    def _waits(self, rank: int) -> bool:
        key = self._key("waits", rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._number

    def _left(self, rank: int) -> bool:
        return self._store.check([self._key("left", rank)])

    def _names(self, ranks: list[int]) -> str:
        """Name up to eight ranks of the group, and count the others."""
        first = ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more" * (len(ranks) > 8)
        of_job = ", ".join(str(dist.get_global_rank(self._group, rank)) for rank in ranks[:8])
        return f"rank {first} of the {self._size} of group {self._group.group_name} (rank {of_job} of the job)"
