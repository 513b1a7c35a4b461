"""What becomes of gradients that were computed in forward, for a loss scale that was promised then."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

RELATIVE_TOLERANCE = 1e-5
"""Of the scale that arrives to the one promised: float32 factors are multiplied in one order or another."""


@functools.cache
def _triton_promise() -> ModuleType | None:
    try:
        return importlib.import_module("megatron_pg.log_probs.triton_promise")
    except ImportError:
        return None


def spoil_unless_kept(
    arrived: Tensor,
    promised: Tensor,
    sample: tuple[Tensor, Tensor] | None,
    gradients: list[Tensor],
) -> None:
    """Turns the first row of each gradient into NaN unless the promise was kept; the device decides, nobody waits for it.

    One row: nothing that is summed over tokens or parameters stays clean, and no pass over the others is needed.

    Args:
        arrived, promised: 0-d, the gradient handed to the loss and the one that was announced.
        sample: elements [rows, columns] of the early sum, as they were after forward and as they are now; a sum
            that was not all 0 and is, was zeroed in between. None: no such sum.
        gradients: one or two, [rows, columns] with equal columns, changed in place.
    """
    kernel = _triton_promise() if arrived.is_cuda else None
    seen = gradients if sample is None else [*gradients, sample[1]]
    if any(tensor.stride(1) != 1 for tensor in seen):
        kernel = None
    if kernel is not None:
        kernel.spoil_unless_kept(arrived, promised, sample, gradients)
        return
    kept = (arrived - promised).abs() <= RELATIVE_TOLERANCE * promised.abs()
    if sample is not None:
        before, now = sample
        kept = kept & ((before == 0).all() | (now != 0).any())
    spoil = torch.where(kept, 0.0, float("nan"))
    for gradient in gradients:
        gradient[:1].add_(spoil)  # not +=, which would copy the row onto itself besides
