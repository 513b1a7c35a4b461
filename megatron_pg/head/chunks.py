"""The number of logit rows in memory at once: as many as a budget allows, in chunks that fill the
products' last waves.

A product works in tiles, one per multiprocessor at a time, and takes as long as its waves. The last
wave may leave multiprocessors idle. The second product (chunk x hidden) has the fewest tiles. The
third reads and writes the float32 sum of the weight's gradient once per chunk.
"""

import functools

import torch

_BUDGET = 5 << 29
"""2.5 GiB of bfloat16 logits."""
_ENOUGH = 8192
"""Longer chunks were not faster, for any number of columns (docs/records/benchmarks.md)."""
_LARGE_DEVICE = 80_000_000_000
"""The smallest device memory in bytes that gets the whole budget."""
_PAIR, _TILE = 256, 256
"""The rows of two tiles, which share an operand, and the columns of a tile."""
_MULTIPROCESSORS = 132
# The numbers of an H200, fitted to chunks of 2048 to 8192 rows (python -m benchmarks.chunks).
_OPERATIONS_A_BYTE = 160
_EXPOSED = 0.6
"""The fraction of the sum's traffic that no product hides."""
_LOST = 0.5
"""The fraction of an idle multiprocessor's time that is lost. The shared power limit lets busy ones
run faster."""


def largest_chunk(columns: int, memory_gib: float | None = None) -> int:
    """Return the largest number of rows of a chunk of logits [rows, columns], which does not depend
    on the device.
    """
    return min(_rows(_budget(memory_gib), columns), _ENOUGH)


def rows_in_budget(
    columns: int, device: torch.device, memory_gib: float | None = None, chunks_at_once: int = 1
) -> int:
    """Return how many rows of bfloat16 logits [rows, columns] the budget holds. `chunks_at_once` is
    2 for a student and a teacher.
    """
    budget = _budget(memory_gib)
    if device.type == "cuda" and memory_gib is None:
        memory = torch.cuda.get_device_properties(device).total_memory
        budget = min(budget, budget * memory // _LARGE_DEVICE)
    return _rows(budget // chunks_at_once, columns)


def chunk_rows(
    tokens: int,
    hidden_size: int,
    columns: int,
    device: torch.device,
    memory_gib: float | None = None,
    chunks_at_once: int = 1,
) -> int:
    """Choose a chunk's number of rows from only sizes and device, so that tensor-parallel ranks
    agree even if their kernels differ.
    """
    multiprocessors = _MULTIPROCESSORS
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    largest = rows_in_budget(columns, device, memory_gib, chunks_at_once)
    return _fullest(tokens, hidden_size, columns, min(largest, _ENOUGH), multiprocessors)


def cost(tokens: int, hidden_size: int, columns: int, rows: int, multiprocessors: int) -> float:
    """Return the cost of the three products in chunks of `rows` rows, in operations at the full
    rate.
    """
    chunks, rest = divmod(tokens, rows)
    sizes = (hidden_size, columns, multiprocessors)
    return chunks * _chunk_cost(rows, *sizes) + (_chunk_cost(rest, *sizes) if rest else 0.0)


def _chunk_cost(rows: int, hidden_size: int, columns: int, multiprocessors: int) -> float:
    total = _EXPOSED * _OPERATIONS_A_BYTE * 8.0 * columns * hidden_size
    for height, width, depth in (
        (rows, columns, hidden_size),
        (rows, hidden_size, columns),
        (columns, hidden_size, rows),
    ):
        tiles = 2 * -(-height // _PAIR) * -(-width // _TILE)
        in_waves = -(-tiles // multiprocessors) * multiprocessors
        paid = tiles + _LOST * (in_waves - tiles)
        total += (
            paid * _PAIR * _TILE * depth
        )  # two operations per element of a tile of _PAIR / 2 rows
    return total


@functools.lru_cache(maxsize=4096)
def _fullest(
    tokens: int, hidden_size: int, columns: int, largest: int, multiprocessors: int
) -> int:
    if tokens <= largest or largest < _PAIR:
        return max(min(tokens, largest), 1)
    top = largest - largest % _PAIR
    step = max(top // 32 // _PAIR, 1) * _PAIR
    equal = -(-tokens // -(-tokens // top))
    candidates = {*range(top, top // 2, -step), min(-(-equal // _PAIR) * _PAIR, top)}
    best: int = min(
        sorted(candidates, reverse=True),
        key=lambda rows: cost(tokens, hidden_size, columns, rows, multiprocessors),
    )
    return best


def _budget(memory_gib: float | None) -> int:
    return _BUDGET if memory_gib is None else int(memory_gib * 2**30)


def _rows(budget: int, columns: int) -> int:
    return max(budget // (2 * max(columns, 1)), 1)
