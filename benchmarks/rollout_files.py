"""Peak memory and speed of streaming rollout files by file size, on one core without an
accelerator.

    python -m benchmarks.rollout_files [--samples 1000000] [--docs-per-step 512] [--ranks 8]

Files of two sizes, the larger ten times the smaller, are written and streamed step by step, each in
a separate process. Memory must not grow with the file.
"""

import argparse
import json
import multiprocessing
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

RESPONSE_LENGTH = 16
ROWS_PER_BATCH = 10_000
GROUP_SIZE = 8


def batch_of_rows(num_rows: int) -> list[dict[str, Any]]:
    """Make rows without a group. A file repeats them with different groups."""
    rng = random.Random(0)
    return [
        {
            "prompt_ids": [rng.randrange(50_000) for _ in range(8)],
            "response_ids": [rng.randrange(50_000) for _ in range(RESPONSE_LENGTH)],
            "loss_mask": [1] * RESPONSE_LENGTH,
            "reward": float(rng.random() < 0.5),
            "log_probs": [-rng.random() for _ in range(RESPONSE_LENGTH)],
        }
        for _ in range(num_rows)
    ]


def write_json_lines(path: Path, num_samples: int) -> None:
    rows = batch_of_rows(min(num_samples, ROWS_PER_BATCH))
    lines = [json.dumps(row)[:-1] for row in rows]
    with path.open("w") as file:
        for row in range(num_samples):
            group = row // GROUP_SIZE
            file.write(f'{lines[row % ROWS_PER_BATCH]}, "group_index": {group}}}\n')


def write_parquet(path: Path, num_samples: int) -> None:
    """Write one row group, like most writers at this size."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = pa.Table.from_pylist(batch_of_rows(min(num_samples, ROWS_PER_BATCH)))
    num_batches = -(-num_samples // ROWS_PER_BATCH)
    table = pa.concat_tables([rows] * num_batches).slice(0, num_samples)
    groups = pa.array((row // GROUP_SIZE for row in range(num_samples)), pa.int64())
    pa.parquet.write_table(
        table.append_column("group_index", groups),
        path,
        row_group_size=num_samples,
        write_page_checksum=True,
    )


def write(path: Path, num_samples: int) -> None:
    writer = write_json_lines if path.suffix == ".jsonl" else write_parquet
    writer(path, num_samples)


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def stream(path: Path, docs_per_step: int, num_ranks: int) -> dict[str, float]:
    """Collect rank 0's samples of every step. The peak excludes the imports' memory."""
    import torch

    from megatron_pg.rollout_files import RolloutFiles, StepCollector

    torch.set_num_threads(1)
    before, start = peak_mebibytes(), time.process_time()
    source = RolloutFiles([path], data_parallel_rank=0, data_parallel_size=num_ranks)
    # One rank's work on its share, without agreement between ranks.
    collector = StepCollector(source, docs_per_step=docs_per_step // num_ranks, mode="exact")
    num_samples = most = 0
    while (step := collector.collect()) is not None:
        num_samples += len(step.samples)
        most = max(most, len(step.samples) + len(collector.carried))
    return {
        "samples": num_samples,
        "most_held": most,
        "mebibytes": peak_mebibytes() - before,
        "seconds": time.process_time() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--docs-per-step", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print(f"rank 0 of {args.ranks}, {args.docs_per_step} rollouts per step over all ranks")
    print("| file | rows | MiB | samples of the rank | most held | peak MiB added | rows/s |")
    print("|---|---|---|---|---|---|---|")
    for suffix in (".jsonl", ".parquet"):
        for num_samples in (args.samples // 10, args.samples):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"rollouts{suffix}"
                # A separate process, because the writer's memory must not count for the reader.
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
