"""Table: the two row kernels alone over their tuning constants, with the ratio to their floors.

python benchmarks/tune_row_kernels.py [--tokens 8192] [--columns 151936]
"""

import argparse
import itertools

import torch

from benchmarks.inputs import peaked_logits
from benchmarks.timing import Contender, copy_rate, measure
from megatron_pg.head import VocabularyShard, rows_triton
from megatron_pg.head.vocabulary_shard import LogitRows


def best(contenders: list[Contender], floor: float, title: str) -> None:
    timings = sorted(measure(contenders, rounds=7), key=lambda timing: timing.median)
    shown = [f"{t.name} {t.median:.3f} ({t.median / floor:.3f})" for t in timings]
    print(f"{title}, floor {floor:.3f} ms:\n  " + "\n  ".join(shown[:8]) + f"\n  ... {shown[-1]}")


def run(tokens: int, columns: int, dtype: torch.dtype, rate: float) -> None:
    logits = peaked_logits(tokens, columns).to(dtype)
    targets = torch.randint(0, columns, (tokens,), device="cuda")
    shard = VocabularyShard.build(columns, None, None)
    rows = LogitRows(logits, targets, shard, torch.ones((), device="cuda"))
    statistics = rows_triton.row_statistics(rows)
    gradients = torch.randn((2, tokens), device="cuda").unbind()

    def read(vectors: int, warps: int) -> object:
        rows_triton._VECTORS, rows_triton._STATISTICS_WARPS = vectors, warps
        return rows_triton.row_statistics(rows)

    def write(tile: int, warps: int, tiles: int) -> None:
        rows_triton._GRADIENT_TILES = {logits.element_size(): (tile, tiles)}
        rows_triton._GRADIENT_WARPS = warps
        rows_triton.write_gradient(rows, statistics, gradients, logits)

    size = logits.element_size()
    title = f"T = {tokens}, V = {columns}, {dtype}"
    readers = [
        Contender(f"vectors {v} warps {w}", lambda v=v, w=w: read(v, w))
        for v, w in itertools.product((64, 128, 256, 512, 1024), (1, 2, 4, 8, 16))
        if 1 <= v // (32 * w) <= 8
    ]
    best(readers, size * tokens * columns / rate * 1e3, f"{title}: statistics")
    writers = [
        Contender(f"tile {t} warps {w} tiles {n}", lambda t=t, w=w, n=n: write(t, w, n))
        for t, w, n in itertools.product((1024, 2048, 4096), (2, 4, 8, 16), (1, 2, 4, 8, 1000))
        if 8 <= t // (32 * w) <= 16
    ]
    best(writers, 2 * size * tokens * columns / rate * 1e3, f"{title}: gradient")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--columns", type=int, nargs="+", default=[18992, 151936])
    options = parser.parse_args()
    rate = copy_rate()
    print(f"copy {rate / 1e12:.2f} TB/s")
    for tokens, columns in itertools.product(options.tokens, options.columns):
        for dtype in (torch.bfloat16, torch.float32):
            run(tokens, columns, dtype, rate)


if __name__ == "__main__":
    main()
