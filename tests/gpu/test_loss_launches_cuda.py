"""The compiled loss on a GPU: few launches whatever the samples, kernels for any size, and a
micro-batch moved in one copy.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from benchmarks.loss_launches import SETTINGS, TOKENS, Work, launches, recompiled
from megatron_pg.loss import compiled
from megatron_pg.step.batch import pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

LIMITS = {"basic": 12, "none": 12, "everything": 20, "gspo": 20, "gspo_by_turn": 21}


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_programs", {})


@pytest.mark.parametrize("setting", SETTINGS)
def test_few_launches_whatever_the_samples_and_no_graph_for_other_sizes(setting: str) -> None:
    counts = []
    for num_samples in (8, 64):
        work = Work(num_samples, TOKENS, setting, "cuda")
        work.loss()
        count, _, names = launches(work.loss, "cuda")
        counts.append(count)
    assert compiled._programs and None not in compiled._programs.values()
    assert counts[0] == counts[1] <= LIMITS[setting], names
    assert recompiled(lambda samples, tokens: Work(samples, tokens, setting, "cuda")) == 0


def test_the_check_of_launches_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "DEVICES", set())
    work = Work(8, TOKENS, "everything", "cuda")
    work.loss()
    assert launches(work.loss, "cuda")[0] > LIMITS["everything"]


def test_a_micro_batch_moves_in_one_copy() -> None:
    work = Work(8, 1001, "everything", "cuda")
    on_host = pack(work.samples, cp_rank=1, cp_size=2)
    on_device = on_host.to("cuda")
    count, _, names = launches(lambda: on_host.to("cuda"), "cuda")
    assert count == 1, names
    fields = [field.name for field in dataclasses.fields(on_host)]
    pairs = [(getattr(on_host, name), getattr(on_device, name)) for name in fields]
    pairs.append((on_host.window.cu_seqlens, on_device.window.cu_seqlens))
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    assert len(tensors) > 10
    for host, device in tensors:
        assert device.is_cuda and host.dtype == device.dtype and torch.equal(host, device.cpu())
        assert device.data_ptr() % 16 == 0


def test_the_smallest_micro_batches_move() -> None:
    one = Work(1, 1, "everything", "cpu").samples
    for samples in ([], one):
        on_host = pack(samples)
        on_device = on_host.to("cuda")
        assert torch.equal(on_device.tokens.cpu(), on_host.tokens)
        assert torch.equal(on_device.window.cu_seqlens.cpu(), on_host.window.cu_seqlens)
