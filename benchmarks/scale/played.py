"""One rank of a job of any size: a driver plays the other ranks' part in its collectives."""

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
    """Lengths [samples]: log-normal of mean 16k, cut at 256k."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, num_samples)
    return np.clip(drawn, 16, LONGEST).astype(np.int64)


def measured(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result, the seconds of this process on a core, and the peak MiB that the call
    added.
    """
    before, start = peak_mebibytes(), time.process_time()
    result = call()
    return result, time.process_time() - start, peak_mebibytes() - before


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Wire:
    """What a rank received, and in how many collectives; a gather of objects is two, of sizes and
    of padded bytes.
    """

    def __init__(self) -> None:
        self.bytes = self.collectives = 0


@contextmanager
def played(answers: Sequence[Any]) -> Iterator[Wire]:
    """Make this process rank 0 of `len(answers)` ranks that give these answers."""
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
    """Print a Markdown table as its rows are measured."""
    columns = heads.split(", ")
    print(f"\n**{title}**\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(
            "| " + " | ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row) + " |",
            flush=True,
        )
