"""Peak memory and speed of streaming rollout files, beside the size of the file. One core, no accelerator.

    python -m benchmarks.rollout_files [--samples 1000000] [--docs-per-step 512] [--ranks 8]
    python -m benchmarks.rollout_files --together [--samples 2000] [--response-length 2048] [--bandwidth 100]

Files of two sizes, the larger ten times the smaller, are written and streamed step by step, each in a process of its
own. Memory that is that of a window does not grow with the file. `--together` runs all ranks over gloo, as they read each by
itself and as a reading group, from a simulated file system that gives all of them together so many MiB/s and keeps nothing in
their memory; 0 for no limit.
"""

import argparse
import io
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

RESPONSE_LENGTH = 16
ROWS_PER_BATCH = 10_000
GROUP_SIZE = 8


def batch_of_rows(response_length: int, num_rows: int) -> list[dict[str, Any]]:
    """Rows without a group; a file repeats them with other groups."""
    rng = random.Random(0)
    return [
        {
            "prompt_ids": [rng.randrange(50_000) for _ in range(8)],
            "response_ids": [rng.randrange(50_000) for _ in range(response_length)],
            "loss_mask": [1] * response_length,
            "reward": float(rng.random() < 0.5),
            "log_probs": [-rng.random() for _ in range(response_length)],
        }
        for _ in range(num_rows)
    ]


def write_json_lines(path: Path, num_samples: int, length: int = RESPONSE_LENGTH) -> None:
    rows = batch_of_rows(length, min(num_samples, ROWS_PER_BATCH))
    lines = [json.dumps(row)[:-1] for row in rows]
    with path.open("w") as file:
        for row in range(num_samples):
            group = row // GROUP_SIZE
            file.write(f'{lines[row % ROWS_PER_BATCH]}, "group_index": {group}}}\n')


def write_parquet(
    path: Path, num_samples: int, row_group_size: int | None = None, length: int = RESPONSE_LENGTH
) -> None:
    """In one row group, which is what most writers make of a file of this size, where nothing else is said."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = pa.Table.from_pylist(batch_of_rows(length, min(num_samples, ROWS_PER_BATCH)))
    num_batches = -(-num_samples // ROWS_PER_BATCH)
    table = pa.concat_tables([rows] * num_batches).slice(0, num_samples)
    groups = pa.array((row // GROUP_SIZE for row in range(num_samples)), pa.int64())
    pa.parquet.write_table(
        table.append_column("group_index", groups),
        path,
        row_group_size=row_group_size or num_samples,
        write_page_checksum=True,
    )


def write(path: Path, num_samples: int) -> None:
    writer = write_json_lines if path.suffix == ".jsonl" else write_parquet
    writer(path, num_samples)


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def stream(path: Path, docs_per_step: int, num_ranks: int) -> dict[str, float]:
    """Collects rank 0's samples of every step; the peak is beyond what the imports alone take."""
    import torch

    from megatron_pg.rollout_files import RolloutFiles, StepCollector

    torch.set_num_threads(1)
    before, start = peak_mebibytes(), time.process_time()
    source = RolloutFiles([path], data_parallel_rank=0, data_parallel_size=num_ranks)
    # What one rank does of its share, without the others to agree with.
    collector = StepCollector(source, docs_per_step=docs_per_step // num_ranks, mode="exact")
    num_samples = most = 0
    while (step := collector.collect()) is not None:
        num_samples += len(step.samples)
        most = max(most, len(step.samples) + len(collector.state().carried))
    return {
        "samples": num_samples,
        "most_held": most,
        "mebibytes": peak_mebibytes() - before,
        "seconds": time.process_time() - start,
    }


class SlowFile(io.FileIO):
    """A file of a file system that all ranks read at `bandwidth` bytes a second together."""

    bandwidth, num_read = 0.0, 0
    free: Any = None  # the time until which the file system is taken

    def read(self, size: int = -1, /) -> bytes:
        return self._came(super().read(size), len)

    def readinto(self, buffer: Any, /) -> int:
        return self._came(super().readinto(buffer), int)

    def _came(self, found: Any, size_of: Callable[[Any], int]) -> Any:
        SlowFile.num_read += size_of(found)
        if self.bandwidth:
            with self.free.get_lock():
                begins = max(self.free.value, time.monotonic())
                self.free.value = ends = begins + size_of(found) / self.bandwidth
            time.sleep(max(ends - time.monotonic(), 0.0))
        return found


def read_on_rank(
    rank: int, size: int, is_shared: bool, store: str, path: Path, count: int, found: Any
) -> None:
    """Pull all of a rank's rows, alone or with the others."""
    import pyarrow.parquet
    import torch
    import torch.distributed as dist

    from megatron_pg.rollout_files import RolloutFiles

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    place: Any = {"data_parallel_rank": rank, "data_parallel_size": size}
    right = pyarrow.parquet.ParquetFile
    with (
        mock.patch.object(Path, "open", lambda path, mode: io.BufferedReader(SlowFile(path))),
        mock.patch.object(
            pyarrow.parquet,
            "ParquetFile",
            lambda path, **keywords: right(SlowFile(path), **keywords),
        ),
    ):
        dist.barrier()
        before, start, began = peak_mebibytes(), time.process_time(), time.monotonic()
        source = RolloutFiles(
            [path], reading_group=dist.group.WORLD if is_shared else None, **place
        )
        num_samples = 0
        while source.position.file < 1:
            num_samples += len(source.pull(count))
        clocks = time.monotonic() - began, time.process_time() - start
    found.put((num_samples, *clocks, SlowFile.num_read / 2**20, peak_mebibytes() - before))
    dist.barrier()
    dist.destroy_process_group()


def read_together(
    path: Path, num_ranks: int, is_shared: bool, count: int, bandwidth: float
) -> list[tuple[float, ...]]:
    """Return samples, seconds of both clocks, MiB read and MiB added of each rank."""
    context = multiprocessing.get_context("fork")
    SlowFile.bandwidth, SlowFile.free = bandwidth * 2**20, context.Value("d", 0.0)
    found, store = context.Queue(), str(path.with_suffix(f".store{is_shared}"))
    arguments = (num_ranks, is_shared, store, path, count, found)
    ranks = [
        context.Process(target=read_on_rank, args=(rank, *arguments)) for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    rows = [found.get() for _ in range(num_ranks)]
    for process in ranks:
        process.join()
    return rows


def main_together(args: argparse.Namespace) -> None:
    import megatron_pg.rollout_files  # noqa: F401  # once, before the ranks are forked

    print(
        f"{args.ranks} ranks, {args.samples} rows of {args.response_length} response tokens, {args.docs_per_step} rows a pull "
        f"over all ranks, {args.bandwidth:g} MiB/s"
    )
    print(
        "| file | MiB | ranks read | s of the slowest rank | its s of a processor, at most | MiB read by all | most MiB added |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind, rows_of_group in (("jsonl", 0), ("parquet", args.samples), ("parquet", 100)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"rollouts.{kind}"
            if kind == "jsonl":
                write_json_lines(path, args.samples, args.response_length)
            else:
                write_parquet(path, args.samples, rows_of_group, args.response_length)
            count, mebibytes = args.docs_per_step // args.ranks, path.stat().st_size / 2**20
            found = {
                way: read_together(path, args.ranks, way, count, args.bandwidth)
                for way in (False, True)
            }
        for is_shared, rows in found.items():
            samples, seconds, of_processor, read, added = zip(*rows, strict=True)
            assert sum(samples) == args.samples
            groups = f", {rows_of_group} rows a row group" * bool(rows_of_group)
            print(
                f"| {kind}{groups} | {mebibytes:.0f} | {'together' if is_shared else 'each all'} | {max(seconds):.2f} "
                f"| {max(of_processor):.2f} | {sum(read):.0f} | {max(added):.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--response-length", type=int, default=RESPONSE_LENGTH)
    parser.add_argument("--bandwidth", type=float, default=0.0)
    parser.add_argument("--docs-per-step", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--together", action="store_true")
    args = parser.parse_args()
    if args.together:
        return main_together(args)
    context = multiprocessing.get_context("spawn")
    print(f"rank 0 of {args.ranks}, {args.docs_per_step} documents a step over all ranks")
    print("| file | rows | MiB | samples of the rank | most held | peak MiB added | rows/s |")
    print("|---|---|---|---|---|---|---|")
    for suffix in (".jsonl", ".parquet"):
        for num_samples in (args.samples // 10, args.samples):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"rollouts{suffix}"
                # In a process of its own: the writer's memory is not the reader's.
                with context.Pool(1) as pool:
                    pool.apply(write, (path, num_samples))
                with context.Pool(1) as pool:
                    found = pool.apply(stream, (path, args.docs_per_step, args.ranks))
                print(
                    f"| {suffix[1:]} | {num_samples} | {path.stat().st_size / 2**20:.0f} "
                    f"| {found['samples']:.0f} | {found['most_held']:.0f} "
                    f"| {found['mebibytes']:.0f} | {num_samples / found['seconds']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
