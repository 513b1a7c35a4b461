"""Integers among the values that callers give, without a cut or a guess."""

from __future__ import annotations

import operator

import torch


def as_integer(value: object) -> int | None:
    """The 64-bit integer that a Python, NumPy or 0-d tensor value is; None for anything else, 3.0 and True included."""
    if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
        return None
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if -(2**63) <= number < 2**63 else None
