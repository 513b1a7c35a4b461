"""A micro-batch goes to CUDA as bytes in one copy; here the bytes."""

import pytest
import torch

from megatron_pg.step.batch import _bytes_of, pack


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(7).expand(1),  # counts as contiguous with a stride of 0
        torch.tensor([1.5]).expand(3),
        torch.arange(6)[::2],
        torch.zeros(0, dtype=torch.float64),
        pack([]).window.cu_seqlens,
        torch.arange(24, dtype=torch.int16).view(2, 3, 4).transpose(0, 1),
    ],
    ids=["one element expanded", "expanded", "every second", "none", "of an empty micro-batch"]
    + ["of three dimensions"],
)
def test_the_bytes_of_any_strides_are_those_of_the_values(tensor):
    found = _bytes_of(tensor)
    assert found.dtype == torch.uint8 and found.numel() == tensor.numel() * tensor.element_size()
    assert torch.equal(found.view(tensor.dtype).view(tensor.shape), tensor)
