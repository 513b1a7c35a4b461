"""A rank's share of a rollout file, by the number of ranks that read it: seconds, and bytes read."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rollout_files import write
from benchmarks.scale.played import measured, table
from megatron_pg.rollout_files import RolloutFiles

ROWS = 20_000
Row = Sequence[Any]


def shares() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".jsonl", ".parquet"):
            path = Path(folder, f"rollouts{suffix}")
            write(path, ROWS)
            for size in (1, 8, 64, 1024, 16384):
                source = RolloutFiles([path], data_parallel_rank=0, data_parallel_size=size)
                samples, seconds, _ = measured(lambda: source.pull(-(-ROWS // size)))  # noqa: B023
                yield (
                    suffix,
                    size,
                    len(samples),
                    seconds,
                    seconds * size,
                    path.stat().st_size / 2**20,
                )


def main() -> None:
    table(
        f"A rollout file of {ROWS} rows",
        "kind, ranks, rows of this rank, seconds, seconds of all ranks, MiB read by each",
        shares(),
    )
