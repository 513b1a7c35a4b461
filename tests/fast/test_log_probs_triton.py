"""The Triton kernels, through Triton's interpreter on the CPU, against the same oracle.

The interpreter is chosen when Triton is imported, so the tests run in a process of their own.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_pg.head import from_logits
from megatron_pg.head.vocabulary_shard import LogitRows, VocabularyShard
from tests import progress
from tests.distributed.launch import run_ranks
from tests.fast import test_log_probs as shared
from tests.fast.log_probs_oracle import peaked_logits, reference
from tests.fast.triton_interpreter import INTERPRETED, MARKS

needs_interpreter, pytestmark = MARKS

if INTERPRETED:
    from megatron_pg.head import rows_triton


@pytest.mark.full
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_under_the_interpreter():
    files = Path(__file__).parent.glob("test_*_triton.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    finished = progress.run(command, env=environment, cwd=Path(__file__).parents[2])
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
    assert " passed" in finished.stdout


@pytest.fixture(params=[(1, 8), (256, 2048)], ids=["many tiles", "one tile"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles for rows of several of them; the real ones for rows shorter than one."""
    if request.node.callspec.params.get("dtype") == torch.float64:
        pytest.skip("the kernels are for narrower numbers")
    vectors, tile = request.param
    monkeypatch.setattr(rows_triton, "_VECTORS", vectors)
    monkeypatch.setattr(rows_triton, "_GRADIENT_TILES", dict.fromkeys((2, 4), (tile, 2)))
    monkeypatch.setattr(from_logits, "row_passes", lambda logits: rows_triton)
    # The interpreter cuts float32 to bfloat16 where a GPU rounds.
    monkeypatch.setitem(shared.ROUNDING, torch.bfloat16, 2.0**-7)


@needs_interpreter
@pytest.mark.usefixtures("kernels")
class TestKernels:
    """The tests of the torch passes, run on the kernels."""

    test_values_and_gradients = staticmethod(shared.test_values_and_gradients)
    test_masked_rows = staticmethod(shared.test_masked_rows_are_zero_and_their_logits_harmless)
    test_unknown_target = staticmethod(shared.test_target_outside_the_vocabulary_is_nan)
    test_padding = staticmethod(shared.test_padding_columns_take_no_part_even_with_nan)
    test_extreme_logits = staticmethod(shared.test_extreme_logits)
    test_dead_rows = staticmethod(shared.test_rows_of_zero_incoming_gradient_get_zero_even_with_nan)
    test_nan = staticmethod(shared.test_nan_at_an_active_row_stays_visible)
    test_one_output = staticmethod(shared.test_one_output_alone_can_be_differentiated)
    test_temperature = staticmethod(shared.test_temperature_may_be_a_tensor)
    test_no_tokens = staticmethod(shared.test_no_tokens_stay_connected_to_the_graph)
    test_strided_logits = staticmethod(shared.test_strided_logits)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_gradient_in_place(self, dtype):
        logits, targets = peaked_logits(6, 37, dtype=dtype)
        targets = targets.clamp(max=32)
        elsewhere = gradient_of(logits.clone(), targets, torch.full_like(logits, torch.nan))
        assert torch.equal(elsewhere, gradient_of(logits, targets, logits))

    def test_narrow_gradient_at_the_front_of_each_wide_row(self):
        logits, targets = peaked_logits(6, 40)
        targets = targets.clamp(max=32)
        elsewhere = logits.clone()
        wanted = gradient_of(elsewhere, targets, elsewhere).half()
        front = logits.view(torch.float16)[:, : logits.shape[1]]
        found = gradient_of(logits, targets, front)
        assert found.data_ptr() == logits.data_ptr() and torch.equal(found, wanted)

    @pytest.mark.parametrize("width", [80, 112, 208])
    @pytest.mark.parametrize("dead_rows", [False, True])
    def test_rows_that_begin_inside_cache_lines(self, width, dead_rows, monkeypatch):
        """The gradient's tiles begin before such rows: nothing of the row before them may
        change.
        """
        monkeypatch.setattr(rows_triton, "_GRADIENT_TILES", {2: (64, 2)})
        logits, targets = peaked_logits(9, width, dtype=torch.bfloat16)
        assert rows_triton._columns_of_a_line(logits, logits) == 64
        targets = targets.clamp(max=width - 8)
        targets[:3] = torch.tensor([0, 1, width - 8])
        gradients = shared.incoming(9)
        if dead_rows:
            gradients = [torch.where(torch.arange(9) % 2 == 0, each, 0.0) for each in gradients]
        shard = VocabularyShard.build(width, width - 7, None)
        whole = LogitRows(logits, targets, shard, torch.tensor(0.9))
        statistics = rows_triton.row_statistics(whole)
        found = []
        for row_by_row in (True, False):
            out = logits.clone()
            rows = [slice(row, row + 1) for row in range(9)] if row_by_row else [slice(0, 9)]
            for each in rows:
                of_rows = [gradient[each] for gradient in gradients]
                part = LogitRows(out[each], targets[each], shard, whole.temperature)
                rows_triton.write_gradient(part, statistics.rows(each), of_rows, out[each])
            found.append(out)
        assert torch.equal(*found) and (found[0][:, width - 7 :] == 0).all()


def gradient_of(logits: Tensor, targets: Tensor, out: Tensor) -> Tensor:
    shard = VocabularyShard.build(logits.shape[1], 33, None)
    rows = LogitRows(logits, targets, shard, torch.tensor(0.9))
    statistics = rows_triton.row_statistics(rows)
    rows_triton.write_gradient(rows, statistics, shared.incoming(len(targets)), out)
    return out


def shard_on_rank() -> tuple[Tensor, Tensor, Tensor | None, list[tuple[int, ...]]]:
    from_logits.row_passes = lambda logits: rows_triton
    rows_triton._VECTORS, rows_triton._GRADIENT_TILES = 1, {2: (8, 2), 4: (8, 2)}
    return shared.shard_on_rank()


@needs_interpreter
@pytest.mark.parametrize("size", [2, 4])
def test_shards(size):
    shared.check_shards(run_ranks(shard_on_rank, size))


@needs_interpreter
@pytest.mark.parametrize("stride", [1001, 1004, 1012, 1016])
def test_rows_that_no_vector_can_be_read_from_do_not_begin_at_lines(stride):
    logits = torch.zeros((3, stride), dtype=torch.bfloat16)
    assert rows_triton._columns_of_a_line(logits, logits) == 0
    aligned = torch.zeros((3, 1008), dtype=torch.bfloat16)
    assert rows_triton._columns_of_a_line(aligned, aligned) == 64


@needs_interpreter
def test_mutant_a_shift_left_out_would_be_seen(monkeypatch):
    """Mutant: parts merged without moving their dot products to the common maximum."""
    logits, targets = peaked_logits(6, 37)
    rows = LogitRows(logits, targets, VocabularyShard.build(37, None, None), torch.tensor(1.0))
    monkeypatch.setattr(rows_triton, "_VECTORS", 2)
    right = rows_triton.row_statistics(rows).entropy

    whole = rows_triton._rescale

    def broken(maximum, safe, scale):
        shift, shrink = whole(maximum, safe, scale)
        return shift * 0.0, shrink

    monkeypatch.setattr(rows_triton, "_rescale", broken)
    wrong = rows_triton.row_statistics(rows).entropy
    wanted = reference(logits, targets, torch.zeros(6), torch.zeros(6))[1]
    torch.testing.assert_close(right.double(), wanted, rtol=2e-6, atol=2e-6)
    assert not torch.allclose(wrong.double(), wanted, rtol=1e-3, atol=1e-3)
