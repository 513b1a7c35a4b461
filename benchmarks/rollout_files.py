"""Peak memory and speed of streaming rollout files, beside the size of the file. One core, no accelerator.

    python -m benchmarks.rollout_files [--samples 1000000] [--docs-per-step 512]

Files of two sizes, the larger ten times the smaller, are written and streamed step by step, each in a process of its
own. Memory that is that of a window does not grow with the file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESPONSE_LENGTH = 16
ROWS_PER_BATCH = 10_000


def batches_of_rows(num_samples: int) -> Iterator[list[dict[str, Any]]]:
    rng = random.Random(0)
    for first in range(0, num_samples, ROWS_PER_BATCH):
        yield [
            {
                "prompt_ids": [rng.randrange(50_000) for _ in range(8)],
                "response_ids": [rng.randrange(50_000) for _ in range(RESPONSE_LENGTH)],
                "loss_mask": [1] * RESPONSE_LENGTH,
                "reward": float(rng.random() < 0.5),
                "log_probs": [-rng.random() for _ in range(RESPONSE_LENGTH)],
                "group_index": row // 8,
            }
            for row in range(first, min(first + ROWS_PER_BATCH, num_samples))
        ]


def write(path: Path, num_samples: int) -> None:
    """JSON Lines, or Parquet in one row group, which is what most writers make of a file of this size."""
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for rows in batches_of_rows(num_samples):
                file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    import pyarrow as pa
    import pyarrow.parquet

    batches = (pa.RecordBatch.from_pylist(rows) for rows in batches_of_rows(num_samples))
    table = pa.Table.from_batches(batches)
    pa.parquet.write_table(table, path, row_group_size=num_samples)


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def stream(path: Path, docs_per_step: int) -> dict[str, float]:
    """Collects every step of the file; the peak is beyond what the imports alone take."""
    import torch

    from megatron_pg.planning import StepCollector
    from megatron_pg.rollout_files import RolloutFiles

    torch.set_num_threads(1)
    before, start = peak_mebibytes(), time.process_time()
    collector = StepCollector(
        RolloutFiles([path]), docs_per_step=docs_per_step, mode="exact", keep_prompt_groups=True
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--docs-per-step", type=int, default=512)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print(
        "| file | samples | file size, MiB | most samples held | peak memory added, MiB | samples/s |"
    )
    print("|---|---|---|---|---|---|")
    for suffix in (".jsonl", ".parquet"):
        for num_samples in (args.samples // 10, args.samples):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"rollouts{suffix}"
                # In a process of its own: the writer's memory is not the reader's.
                with context.Pool(1) as pool:
                    pool.apply(write, (path, num_samples))
                with context.Pool(1) as pool:
                    found = pool.apply(stream, (path, args.docs_per_step))
                print(
                    f"| {suffix[1:]} | {found['samples']:.0f} | {path.stat().st_size / 2**20:.0f} "
                    f"| {found['most_held']:.0f} | {found['mebibytes']:.0f} "
                    f"| {found['samples'] / found['seconds']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
