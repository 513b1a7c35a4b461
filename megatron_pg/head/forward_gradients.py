"""Gradients of the fused head that are computed in forward, before backward has asked for them.

Where the loss scale is known they are final, and the weight's goes straight into `main_grad`. That is right only if
backward follows, with that scale, and nobody zeroes `main_grad` in between. None of it can be known in forward, and a
gradient that is silently wrong is the worst outcome, so each is watched, without a wait for the device:

1. another scale arrives: seen in backward;
2. `main_grad` was zeroed after forward (`zero_grad` between forward and backward): seen in backward, by a sample
   of its elements that are all exactly 0 and were not;
3. backward never comes (evaluation with gradients enabled, the second forward of activation checkpointing): seen
   when the graph is freed;
4. forward ends with an error after some chunks were added (out of memory, then another try): seen at once.

Each turns gradients into NaN, as the norm of the step's gradient shows, the third with a warning besides. Not seen: a
`main_grad` that is zeroed and added to by others before backward. And `torch.autograd.grad(loss, hidden)`, which asks for
one gradient, finds the other added all the same.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_pg.head.linear_autograd import ChunkedHead
from megatron_pg.head.output_layer import WeightGradient
from megatron_pg.head.promise import spoil, spoil_unless_kept
from megatron_pg.head.vocabulary_shard import RowStatistics

_SAMPLED_ROWS, _SAMPLED_COLUMNS = 64, 8


class ForwardGradients:
    """Gradients of hidden states and weight that grow chunk by chunk during forward.

    Args:
        hidden: [tokens, hidden], of which the rows from `gradient_rows` on get a gradient of 0.
        weight: [v/tp, hidden].
        needs_hidden, needs_weight: which of the two gradients are wanted.
        loss_scale: the gradient that backward will hand to the loss, or None where it is not known.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        needs_hidden: bool,
        needs_weight: bool,
        gradient_rows: int,
        loss_scale: Tensor | None,
    ) -> None:
        self._detached, self._weight_values = hidden.detach(), weight.detach()
        self._hidden: Tensor | None = None
        if needs_hidden:
            self._hidden = torch.empty_like(self._detached, memory_format=torch.contiguous_format)
            self._hidden[gradient_rows:] = 0
        self._weight: WeightGradient | None = None
        if needs_weight:
            self._weight = WeightGradient(weight, final=loss_scale is not None)
        self._loss_scale: Tensor | None = None
        if loss_scale is not None:
            # A copy: what the caller does to its own by then must not change what was promised.
            self._loss_scale = loss_scale.detach().reshape(()).to(hidden.device, copy=True)
        self._early: _EarlySum | None = None

    def add(
        self,
        head: ChunkedHead,
        logits: Tensor,
        targets: Tensor,
        statistics: RowStatistics,
        coefficients: tuple[Tensor | None, ...],
        rows: slice,
    ) -> None:
        """Turns the chunk's logits into their gradient and multiplies it out; `coefficients` carry the loss scale."""
        if self._hidden is None and self._weight is None:
            return
        head.multiply_out(
            (self._detached[rows], self._weight_values, targets),
            logits,
            statistics,
            coefficients,
            None if self._hidden is None else self._hidden[rows],
            self._weight,
        )

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Chunks are added in the body. If anything was, backward is awaited from its end on; an error in it spoils the sum."""
        try:
            yield
        except BaseException:  # an interruption leaves as wrong a sum as an error does
            if self._added_to is not None:
                spoil(self._added_to)
            raise
        if self._added_to is not None:
            self._early = _EarlySum(self._added_to)

    @property
    def _added_to(self) -> Tensor | None:
        return None if self._weight is None else self._weight.added_to

    def finish(self, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden states and weight, scaled on the device."""
        if self._loss_scale is None:
            return self._scaled(grad_loss)
        found = (self._hidden, None if self._weight is None else self._weight.total)
        spoil_unless_kept(
            grad_loss,
            self._loss_scale,
            None if self._early is None else self._early.settle(),
            [gradient for gradient in found if gradient is not None],
        )
        return self._hidden, None if self._weight is None else self._weight.finish()

    def _scaled(self, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_gradient = None
        if self._hidden is not None:
            # In float32: a 0-d factor would be rounded to the dtype of the tensor it multiplies.
            wide = self._hidden.to(grad_loss.dtype).mul_(grad_loss)
            hidden_gradient = wide.to(self._hidden.dtype)
            del wide
        return hidden_gradient, None if self._weight is None else self._weight.finish(grad_loss)


class _EarlySum:
    """Watches over `main_grad` from the end of forward until backward (2 and 3 above)."""

    def __init__(self, main_grad: Tensor) -> None:
        self._main_grad = main_grad
        self._sample = self._read().clone(memory_format=torch.contiguous_format)
        self._finalizer = weakref.finalize(self, _never_differentiated, main_grad)
        self._finalizer.atexit = False

    def _read(self) -> Tensor:
        every = max(self._main_grad.shape[0] // _SAMPLED_ROWS, 1)
        return self._main_grad[::every, :_SAMPLED_COLUMNS]

    def settle(self) -> tuple[Tensor, Tensor]:
        """Called by backward: the sample after forward, and the same elements now."""
        self._finalizer.detach()
        return self._sample, self._read()


def _never_differentiated(main_grad: Tensor) -> None:
    spoil(main_grad)
    warnings.warn(
        "linear_token_loss with a loss_scale added the gradient of the output weight to main_grad in forward, and its "
        "graph was freed without backward: one row of main_grad is NaN now, so that no step is taken with it. Evaluate "
        "under torch.no_grad(), or in Megatron with model.eval(); what zeroes main_grad removes it",
        RuntimeWarning,
        stacklevel=2,
    )
