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

from megatron_pg.head.from_logits import row_passes
from megatron_pg.head.output_layer import FactorGradients

_SAMPLED_ROWS, _SAMPLED_COLUMNS = 64, 8


class ForwardGradients(FactorGradients):
    """Gradients of hidden states and weight that grow chunk by chunk during forward.

    Args:
        hidden, weight, needed: as for `FactorGradients`.
        gradient_rows: rows of `hidden` from this one on get a gradient of 0.
        loss_scale: the gradient that backward will hand to the loss, or None where it is not known. What is added
            carries it already.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        needed: tuple[bool, bool],
        gradient_rows: int,
        loss_scale: Tensor | None,
    ) -> None:
        super().__init__(hidden, weight, needed, final=loss_scale is not None)
        if self.hidden is not None:
            self.hidden[gradient_rows:] = 0
        self._promised: Tensor | None = None
        if loss_scale is not None:
            # A copy: what the caller does to its own by then must not change what was promised.
            self._promised = loss_scale.detach().reshape(()).to(hidden.device, copy=True)
        self._held: Tensor | None = None

    @property
    def _early_sum(self) -> Tensor | None:
        """The buffer `main_grad`, once something was added to it."""
        return self.weight.total if self.weight is not None and self.weight.is_direct else None

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Chunks are added in the body. If anything was, backward is awaited from its end on; an error in it spoils the sum."""
        try:
            yield
        except BaseException:  # an interruption leaves as wrong a sum as an error does
            if self._early_sum is not None:
                _spoil(self._early_sum)
            raise
        if self._early_sum is not None:
            self._held = holds_anything(self._early_sum)
            self._awaited = weakref.finalize(self, _never_differentiated, self._early_sum)
            self._awaited.atexit = False

    def settle(self, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden states and weight for the gradient that arrives in backward."""
        if self._promised is None:
            return self.finish(grad_loss)
        held = None
        if self._held is not None and self._early_sum is not None:
            self._awaited.detach()
            held = self._held, holds_anything(self._early_sum)
        weight_sum = None if self.weight is None else self.weight.total
        spoil_unless_kept(grad_loss, self._promised, held, self.hidden, weight_sum)
        return self.finish()


def holds_anything(main_grad: Tensor) -> Tensor:
    """A 0-d bool: whether a sample of the elements has one that is not 0."""
    every = max(main_grad.shape[0] // _SAMPLED_ROWS, 1)
    return main_grad[::every, :_SAMPLED_COLUMNS].any()


def spoil_unless_kept(
    arrived: Tensor, promised: Tensor, held: tuple[Tensor, Tensor] | None, *gradients: Tensor | None
) -> None:
    """Turns a row of each gradient into NaN unless the promise was kept (see `rows_torch.nan_unless_kept`).

    Nothing that is summed over rows stays clean, and no pass over the others is needed.
    """
    for gradient in gradients:
        if gradient is not None:
            penalty = row_passes(gradient).nan_unless_kept(arrived, promised, held)
            gradient[:1].add_(penalty)  # not +=, which would copy the row onto itself besides


def _spoil(gradient: Tensor) -> None:
    with torch.no_grad():
        gradient[:1] = float("nan")


def _never_differentiated(main_grad: Tensor) -> None:
    _spoil(main_grad)
    warnings.warn(
        "linear_token_loss with a loss_scale added the gradient of the output weight to main_grad in forward, and its "
        "graph was freed without backward: one row of main_grad is NaN now, so that no step is taken with it. Evaluate "
        "under torch.no_grad(), or in Megatron with model.eval(); what zeroes main_grad removes it",
        RuntimeWarning,
        stacklevel=2,
    )
