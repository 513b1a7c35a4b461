"""The rows of a chunk: within the budget, and never worse than another size by tiles that are
counted one by one.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_pg.head import chunks
from megatron_pg.head.chunks import chunk_rows, largest_chunk
from megatron_pg.head.output_layer import Factors, HeadOptions, OutputLayer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LARGE = 141_000_000_000


@pytest.fixture
def device(request, monkeypatch) -> torch.device:
    """A GPU with so much memory, or the CPU for None."""
    memory = getattr(request, "param", LARGE)
    properties = SimpleNamespace(total_memory=memory, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return CPU if memory is None else CUDA


@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257, 4096, 10_000, 131_072])
@pytest.mark.parametrize("columns", [0, 1, 11, 32_000, 151_936, 10**10])
@pytest.mark.parametrize("memory_gib", [None, 1.3, 1e-4])
@pytest.mark.parametrize("device", [None, 1 << 34, 80 * 10**9, LARGE], indirect=True)
def test_chunks_are_within_the_budget(device, memory_gib, columns, tokens):
    size = chunk_rows(tokens, 2048, columns, device, memory_gib)
    part = 1.0
    if device == CUDA and memory_gib is None:
        part = min(torch.cuda.get_device_properties(device).total_memory / 80e9, 1)
    budget, columns = 2**30 * (memory_gib or 2.5 * part), max(columns, 1)
    assert size == 1 or 2 * columns * size <= budget
    largest = min(budget / (2 * columns), 8192)
    if tokens <= largest:
        assert size == max(tokens, 1)
    elif largest >= 256:
        assert size % 256 == 0 and 2 * size + 256 >= largest
    assert largest_chunk(columns, memory_gib) >= size


def seconds_of_work(tokens: int, hidden: int, columns: int, rows: int) -> float:
    """Tiles of 128 x 256, handed out one by one to 132 workers, of which an idle one costs half;
    the sum's traffic beside.
    """
    total = 0.0
    for first in range(0, tokens, rows):
        height = min(rows, tokens - first)
        products = [(height, columns, hidden), (height, hidden, columns), (columns, hidden, height)]
        for high, wide, deep in products:
            pairs = len(range(0, high, 256))
            tiles = 2 * pairs * len(range(0, wide, 256))
            busy = tiles % 132
            idle = 132 - busy if busy else 0
            total += (tiles + 0.5 * idle) * 2 * 128 * 256 * deep / 1e15
        total += 0.6 * 8 * columns * hidden * 160 / 1e15
    return total


@pytest.mark.parametrize("memory_gib", [None, 1.3])
@pytest.mark.parametrize(
    "tokens, hidden, columns",
    list(itertools.product([8192, 32768, 20_001], [2048, 4096], [128256, 151936, 248320])),
)
def test_no_other_size_does_less_work(tokens, hidden, columns, memory_gib, device):
    size = chunk_rows(tokens, hidden, columns, device, memory_gib)
    largest = largest_chunk(columns, memory_gib)
    others = [*range(256, largest + 1, 256), *([tokens] if tokens <= largest else [])]
    least = min(seconds_of_work(tokens, hidden, columns, rows) for rows in others)
    assert seconds_of_work(tokens, hidden, columns, size) <= 1.002 * least


def test_a_wave_that_is_hardly_filled_is_avoided(device):
    """38 x 8 tiles of the second product take 2.3 waves of 132, and 4096 rows 1.9."""
    assert chunk_rows(32768, 2048, 128256, device, 1.25) == 4096


def test_mutant_waves_that_cost_nothing_would_be_seen(device, monkeypatch):
    """Mutant: the last wave is not counted."""
    monkeypatch.setattr(chunks, "_LOST", 0.0)
    chunks._fullest.cache_clear()
    assert chunk_rows(32768, 2048, 128256, device, 1.25) > 4096
    chunks._fullest.cache_clear()


@pytest.mark.parametrize("memory_gib, is_one", [(None, True), (0.0187, True), (0.0186, False)])
def test_rows_that_are_held_together_go_by_twice_the_budget(memory_gib, is_one):
    """20,000 rows of 1000 columns are 0.0373 GiB; other chunks have 8192 rows at most."""
    tokens = 20_000
    factors = Factors(torch.zeros(tokens, 8), torch.zeros(1000, 8), torch.zeros(tokens).long())
    layer = OutputLayer.build(factors, HeadOptions(memory_gib=memory_gib))
    assert (layer.chunks(0, tokens, held=True) == [slice(0, tokens)]) == is_one
    assert all(rows.stop - rows.start <= 8192 for rows in layer.chunks(0, tokens))
