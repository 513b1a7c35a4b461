"""One rank of a job of any size, with a driver that simulates the other ranks in its
collectives.
"""

import pickle
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

MEAN, LONGEST, SIGMA = 16_384, 262_144, 1.0


def heavy_tailed(num_samples: int, seed: int = 0) -> NDArray[np.int64]:
    """Return lengths [samples]: log-normal with mean 16k, truncated at 256k."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, num_samples)
    return np.clip(drawn, 16, LONGEST).astype(np.int64)


def measured(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the call's result, its processor seconds, and the peak MiB that it added."""
    before, start = peak_mebibytes(), time.process_time()
    result = call()
    return result, time.process_time() - start, peak_mebibytes() - before


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Wire:
    """A count of a rank's received bytes and collectives. A gather of objects is two, for sizes and
    padded bytes.
    """

    def __init__(self) -> None:
        self.bytes = self.collectives = 0


@contextmanager
def played(answers: Sequence[Any]) -> Iterator[Wire]:
    """Make this process rank 0 of `len(answers)` ranks that send these objects."""
    wire, pickled = Wire(), [pickle.dumps(answer) for answer in answers]

    def gather_objects(gathered: list[Any], mine: Any, group: Any = None) -> None:
        parts = [pickle.dumps(mine), *pickled[1:]]
        wire.bytes += len(parts) * (8 + max(map(len, parts)))
        wire.collectives += 2
        gathered[:] = map(pickle.loads, parts)

    with ExitStack() as stack:
        for name, function in {
            "get_rank": lambda group=None: 0,
            "get_world_size": lambda group=None: len(answers),
            "get_backend_config": lambda group=None: "cpu:gloo",
            "all_gather_object": gather_objects,
        }.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        yield wire


def table(title: str, heads: str, rows: Iterator[Sequence[Any]]) -> None:
    """Print a Markdown table row by row."""
    columns = heads.split(", ")
    print(f"\n**{title}**\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(
            "| " + " | ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row) + " |",
            flush=True,
        )
