"""The two backward products, which give the gradients of hidden states and weight."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.rows_torch import wide_dtype


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write left @ right to `out` or add it, accumulated in float32. `out` may have a wider
    dtype.
    """
    is_widened = left.dtype in (torch.bfloat16, torch.float16) and out.dtype == torch.float32
    widening: dict[str, Any] = {}
    if is_widened and left.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):
        widening["out_dtype"] = out.dtype
    else:
        left, right = left.to(out.dtype), right.to(out.dtype)
    if add:
        torch.addmm(out, left, right, out=out, **widening)
    else:
        torch.mm(left, right, out=out, **widening)


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Return the gradient buffer that Megatron's DistributedDataParallel holds for this parameter,
    or None.

    Megatron-FSDP allocates the buffer later and tracks it, so its buffer is not used.
    """
    if hasattr(weight, "__fsdp_param__") or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    return getattr(weight, "main_grad", None)


class FactorGradients:
    """The needed gradients of hidden states [tokens, hidden] and weight [v/tp, hidden], computed
    chunk by chunk.

    `final` products include backward's incoming gradient, so the weight's gradient may go directly
    to `main_grad`. Otherwise it waits in a separate float32 buffer.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, needed: tuple[bool, bool], *, final: bool
    ) -> None:
        self.weight, self.needs_weight = weight, needed[1]
        self.hidden: Tensor | None = None  # [tokens, hidden]
        if needed[0]:  # zeros, because not every row is added
            self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        self._main_grad = main_grad_of(weight)
        self._sum = self._main_grad if final else None

    def add_products(self, rows: slice, hidden: Tensor, gradient: Tensor) -> None:
        """Multiply the gradient [rows, v/tp] of the logits by both factors. It has the dtype of
        `hidden` [rows, hidden].
        """
        if self.hidden is not None:
            multiply(gradient, self.weight, self.hidden[rows])
        if self.needs_weight:
            self.add_to_weight(lambda out, add: multiply(gradient.t(), hidden, out, add=add))

    def add_to_weight(self, product: Callable[[Tensor, bool], None]) -> None:
        """Call `product(sum, add)` on the weight's gradient sum [v/tp, hidden], which is
        uninitialized if add is False.

        A first product that raises leaves no sum.
        """
        total = self._sum
        if total is None:
            dtype = wide_dtype(self.weight.dtype)
            total = self.weight.new_empty(self.weight.shape, dtype=dtype, requires_grad=False)
        product(total, self._sum is not None)
        self._sum = total

    def finish(self, scale: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Finish the sum and return both gradients times `scale` for autograd.

        With `main_grad`, the weight's gradient is a placeholder, because DistributedDataParallel
        only checks that it exists. It is zeros for a weight tied to an embedding on the same stage
        (`zero_out_wgrad`), else a sparse tensor without elements.
        """
        hidden, weight, total, main_grad = self.hidden, self.weight, self._sum, self._main_grad
        self._sum = None
        if hidden is not None and scale is not None:
            # A 0-d factor would be rounded to the dtype of the tensor, hence float32.
            hidden = hidden.to(scale.dtype).mul_(scale).to(hidden.dtype)
        if not self.needs_weight:
            return hidden, None
        if main_grad is not None:
            if total is not None and total is not main_grad:
                factor = total.new_ones(()) if scale is None else scale.to(total.dtype)
                main_grad.addcmul_(total, factor)
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            if not getattr(weight, "zero_out_wgrad", False):
                return hidden, torch.sparse_coo_tensor(  # type: ignore[call-arg]
                    size=weight.shape,
                    dtype=weight.dtype,
                    device=weight.device,
                    check_invariants=False,
                )
        if main_grad is not None or total is None:
            return hidden, torch.zeros_like(weight, requires_grad=False)
        return hidden, (total if scale is None else total.mul_(scale)).to(weight.dtype)
