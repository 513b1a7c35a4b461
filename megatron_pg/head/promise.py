"""What becomes of gradients that were computed in forward, for a loss scale that was promised then."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pg.head.autograd import kernels

RELATIVE_TOLERANCE = 1e-5
"""Of the scale that arrives to the one promised: float32 factors are multiplied in one order or another."""


def spoil(gradient: Tensor) -> None:
    """Turns the first row into NaN: nothing that is summed over rows stays clean, and no pass over the others is needed."""
    with torch.no_grad():
        gradient[:1] = float("nan")


def spoil_unless_kept(
    arrived: Tensor,
    promised: Tensor,
    sample: tuple[Tensor, Tensor] | None,
    gradients: list[Tensor],
) -> None:
    """`spoil` for each gradient unless the promise was kept; the device decides, nobody waits for it.

    Args:
        arrived, promised: 0-d, the gradient handed to the loss and the one that was announced.
        sample: elements [rows, columns] of the early sum, as they were after forward and as they are now; a sum
            that was not all 0 and is, was zeroed in between. None: no such sum.
        gradients: one or two, [rows, columns] with equal columns, contiguous, changed in place.
    """
    on_cuda = kernels("triton_promise") if arrived.is_cuda else None
    if on_cuda is not None:
        on_cuda.spoil_unless_kept(arrived, promised, sample, gradients)
        return
    kept = (arrived - promised).abs() <= RELATIVE_TOLERANCE * promised.abs()
    if sample is not None:
        before, now = sample
        kept = kept & ((before == 0).all() | (now != 0).any())
    spoil = torch.where(kept, 0.0, float("nan"))
    for gradient in gradients:
        gradient[:1].add_(spoil)  # not +=, which would copy the row onto itself besides
