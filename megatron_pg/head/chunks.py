"""The rows of logits in memory at once: as many as a budget allows, cut so that the products' last
waves are full.

A product works in tiles, one on a multiprocessor at a time, and takes as long as its waves: the
last one may leave multiprocessors idle. The second product (chunk x hidden) has the fewest tiles of
the three. The third reads and writes the float32 sum of the weight's gradient once a chunk.
"""

import functools

import torch

_BUDGET = 5 << 29
"""2.5 GiB of bfloat16 logits."""
_ENOUGH = 8192
"""Rows beyond which a longer chunk was not faster, whatever the columns
(docs/records/benchmarks.md)."""
_LARGE_DEVICE = 80_000_000_000
"""Bytes of memory from which on a device has the whole budget."""
_PAIR, _TILE = 256, 256
"""The rows of two tiles, which share one operand, and the columns of a tile."""
_MULTIPROCESSORS = 132
# Of an H200, fitted to chunks of 2048 to 8192 rows (python -m benchmarks.chunks).
_OPERATIONS_A_BYTE = 160
_EXPOSED = 0.6
"""The part of the sum's traffic that no product hides."""
_LOST = 0.5
"""The part of an idle multiprocessor's time that is lost: the busy ones run faster, for the power
limit is shared."""


def largest_chunk(columns: int, memory_gib: float | None = None) -> int:
    """Return the most rows of logits [rows, columns] that a chunk has, the same on every rank
    whatever its device.
    """
    return min(_rows(_budget(memory_gib), columns), _ENOUGH)


def rows_in_budget(
    columns: int, device: torch.device, memory_gib: float | None = None, chunks_at_once: int = 1
) -> int:
    """Return the rows of bfloat16 logits [rows, columns] in the budget; of `chunks_at_once`, a
    student's and a teacher's.
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
    """Choose the rows of a chunk by sizes and device alone, so that tensor-parallel ranks agree
    whichever kernels they have.
    """
    multiprocessors = _MULTIPROCESSORS
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    largest = rows_in_budget(columns, device, memory_gib, chunks_at_once)
    return _fullest(tokens, hidden_size, columns, min(largest, _ENOUGH), multiprocessors)


def cost(tokens: int, hidden_size: int, columns: int, rows: int, multiprocessors: int) -> float:
    """Return the cost of the three products in chunks of so many rows, in operations at the full
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
        )  # two operations an element of a tile of _PAIR / 2 rows
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
