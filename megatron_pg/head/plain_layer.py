"""The plain output layer with float32 logits: one product in forward, two in backward, nothing fused with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.factor_gradients import FactorGradients, multiply
from megatron_pg.head.from_logits import refuse_second_derivative
from megatron_pg.head.output_layer import check_factors, default_chunk_tokens
from megatron_pg.head.rows_torch import chunk_slices, wide_dtype


def float32_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute float32 logits from operands that are not upcast: accumulated, written and shifted by the bias in float32.

    Backward rounds the gradient of the logits to the dtype of the hidden states, some rows at a time, the one rounding
    before the two other products.

    Args:
        hidden: [..., hidden] bfloat16, float16 or float32 (or float64, for tests), the same on every tensor-parallel
            rank. Its gradient, in its own dtype, is the part of this rank's columns, which the caller sums.
        weight: [v/tp, hidden], the same dtype. Its gradient is accumulated in float32, into `weight.main_grad` where
            Megatron's DistributedDataParallel made one.
        bias: [v/tp]; its gradient is summed in float32 and rounded to its dtype.

    Returns:
        [..., v/tp] float32 (float64 for float64), which may be overwritten.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    check_factors(rows, weight)
    logits: Tensor = Float32Product.apply(rows, weight)  # type: ignore
    if bias is not None:
        logits = logits.add_(bias)
    return logits.view(*hidden.shape[:-1], weight.shape[0])


class Float32Product(torch.autograd.Function):
    """hidden [tokens, hidden] times the transposed weight [v/tp, hidden], in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.parameter = weight  # saved, it may come back without its `main_grad`
        ctx.save_for_backward(hidden, weight)
        shape = (hidden.shape[0], weight.shape[0])
        logits = weight.new_empty(shape, dtype=wide_dtype(weight.dtype))
        multiply(hidden, weight.t(), logits)
        return logits

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("float32_logits")
        hidden, weight = ctx.saved_tensors
        gradients = FactorGradients(hidden, ctx.parameter, ctx.needs_input_grad, final=True)
        size = default_chunk_tokens(len(hidden), weight.shape[0], hidden.device)
        for rows in chunk_slices(0, len(hidden), size):
            gradients.add_products(rows, hidden[rows], incoming[rows].to(hidden.dtype))
        return gradients.finish()
