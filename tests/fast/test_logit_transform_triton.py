"""The row kernels under a soft-cap, through Triton's interpreter, against the passes in torch in
float64.
"""

import dataclasses

import pytest
import torch

from megatron_pg.head import rows_torch
from megatron_pg.head.vocabulary_shard import LogitRows, VocabularyShard
from tests.fast.log_probs_oracle import close
from tests.fast.triton_interpreter import INTERPRETED, MARKS

if INTERPRETED:
    from megatron_pg.head import rows_triton

_, pytestmark = MARKS
WIDTH, VOCAB_SIZE = 24, 21


@MARKS[0]
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels(softcap, dtype, monkeypatch):
    """Both kernels against the passes in torch, of logits beyond the cap and near 0."""
    monkeypatch.setattr(rows_triton, "_VECTORS", 1)
    monkeypatch.setattr(rows_triton, "_GRADIENT_TILES", dict.fromkeys((2, 4), (8, 2)))
    generator = torch.Generator().manual_seed(5)
    logits = (6 * torch.randn(7, WIDTH, generator=generator)).to(dtype)
    logits[0] *= 1e-3
    targets = torch.randint(0, VOCAB_SIZE, (7,), generator=generator)
    incoming = torch.randn(2, 7, generator=generator).unbind()
    shard = VocabularyShard.build(WIDTH, VOCAB_SIZE, None)
    rows = LogitRows(logits, targets, shard, torch.tensor(0.8), softcap=softcap)
    wide = dataclasses.replace(rows, logits=logits.double(), temperature=rows.temperature.double())
    found, wanted = rows_triton.row_statistics(rows), rows_torch.row_statistics(wide)
    for value, expected in zip(found, wanted, strict=True):
        close(value, expected, 2e-6)
    out, reference = torch.empty_like(logits), torch.empty_like(wide.logits)
    rows_triton.write_gradient(rows, found, incoming, out)
    rows_torch.write_gradient(wide, wanted, incoming, reference)
    close(out, reference, 3e-6 if dtype == torch.float32 else 2.0**-7)
