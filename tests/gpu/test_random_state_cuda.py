"""The random state that a checkpoint keeps, put back on a GPU: what is drawn next is what would have been."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

TRACKED = "model-parallel-rng"


def draw() -> dict[str, float]:
    """A number of every generator that a run draws from; the last as dropout under tensor parallelism does."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    numbers = {
        "python": random.random(),
        "torch": torch.rand(()).item(),
        "cuda": torch.rand((), device="cuda").item(),
    }
    with get_cuda_rng_tracker().fork(TRACKED):
        numbers["megatron"] = torch.rand((), device="cuda").item()
    return numbers


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from quickstart import checkpoint

    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(TRACKED, 7)
    random.seed(1)
    torch.manual_seed(2)
    draw()
    device = torch.device("cuda")
    checkpoint._write(checkpoint._random_state(device), tmp_path / "rank_0.pt")
    expected = [draw(), draw()]
    # As in a new process, whose generators begin elsewhere.
    random.seed(3)
    torch.manual_seed(4)
    tracker.reset()
    tracker.add(TRACKED, 5)
    others = draw()
    assert all(others[name] != expected[0][name] for name in others), "the seeds tell"
    checkpoint._set_random_state(checkpoint._read(tmp_path / "rank_0.pt"), device)
    assert [draw(), draw()] == expected
