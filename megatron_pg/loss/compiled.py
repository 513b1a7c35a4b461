"""Formulas of a micro-batch in a few generated kernels in place of a hundred launches, with their gradient.

There is no second implementation: the functions that CPU runs operator by operator are traced once, by
`torch.fx.experimental.proxy_tensor.make_fx`, together with the gradient that autograd makes of them, and `torch.compile`
turns the operators of that trace into kernels for any number of tokens and samples. The compiled part takes tensors alone, so
that a call checks nothing but their types. What cannot be traced or compiled runs operator by operator, which is said once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx

logger = logging.getLogger("megatron_pg")

DEVICES = {"cuda"}
"""The types of device where formulas are compiled: on a CPU launches cost nothing, and results stay those of the formulas to
the bit."""
MAX_PROGRAMS = 8
"""Settings that a process compiles for; further ones, such as a coefficient that every step changes, run operator by operator."""
TRACED_TOKENS, TRACED_SAMPLES = 8192, 37
"""Sizes of the micro-batch of zeros that is traced and compiled, whatever the first real one is like; the kernels take others.
So every rank compiles the same, and a long reduction."""

Outputs = tuple[Tensor | None, ...]
_programs: dict[Hashable, Callable[..., Outputs] | None] = {}


class Inputs:
    """Tensors by name, by what their last dimension counts.

    Args:
        tokens: [..., window].
        samples: [..., samples].
        fixed: of a size that the settings fix.
    """

    def __init__(
        self,
        tokens: Mapping[str, Tensor | None],
        samples: Mapping[str, Tensor | None],
        fixed: Mapping[str, Tensor],
    ) -> None:
        sized = ((tokens, TRACED_TOKENS), (samples, TRACED_SAMPLES), (fixed, None))
        self._sizes = {k: size for given, size in sized for k, v in given.items() if v is not None}
        given = {**tokens, **samples, **fixed}
        self.tensors = {name: given[name].contiguous() for name in self._sizes}  # type: ignore[union-attr]
        self.key = tuple((name, each.dtype) for name, each in self.tensors.items())
        """What a program depends on besides its settings."""

    def traced(self) -> list[Tensor]:
        """Zeros of the sizes that are traced, in order."""
        return [
            each.new_zeros(each.shape if size is None else (*each.shape[:-1], size))
            for each, size in zip(self.tensors.values(), self._sizes.values(), strict=True)
        ]

    def mark_dynamic(self, tensors: list[Tensor]) -> None:
        """Says to the compiler which sizes change from call to call."""
        for each, size in zip(tensors, self._sizes.values(), strict=True):
            if size is not None:
                torch._dynamo.mark_dynamic(each, each.dim() - 1)


def program(
    settings: Hashable, function: Callable[[Mapping[str, Tensor]], Outputs], inputs: Inputs
) -> Callable[..., Outputs] | None:
    """The compiled function of tensors in the order of `inputs`; compiled at the first call for these settings.

    Args:
        settings: all that the function depends on besides its tensors.
        function: tensors by name -> tensors; without gradients, and without reading a value on the host.
        inputs: tensors of this call.

    Returns:
        None where it is to run as it is, operator by operator.
    """
    key = (settings, inputs.key)
    if key not in _programs:
        if len(_programs) == MAX_PROGRAMS:
            logger.warning(
                "the policy loss was compiled for %d settings in this process: further ones run operator by operator, with "
                "more launches (said once)",
                MAX_PROGRAMS,
            )
        _programs[key] = _compiled(function, inputs) if len(_programs) < MAX_PROGRAMS else None
    return _programs[key]


def _compiled(
    function: Callable[[Mapping[str, Tensor]], Outputs], inputs: Inputs
) -> Callable[..., Outputs] | None:
    names, example, start = list(inputs.tensors), inputs.traced(), time.perf_counter()

    def of_tensors(*tensors: Tensor) -> Outputs:
        return function(dict(zip(names, tensors, strict=True)))

    try:
        with torch.no_grad():
            graph: Callable[..., Any] = make_fx(of_tensors, tracing_mode="symbolic")(*example)
            inputs.mark_dynamic(example)
            compiled: Callable[..., Outputs] = torch.compile(graph)
            compiled(*example)
    except Exception as error:  # whatever a compiler may raise: the formulas themselves run
        logger.warning(
            "the policy loss was not compiled (%s: %s): it runs operator by operator, with more launches (said once for these "
            "settings)",
            type(error).__name__,
            str(error).split("\n")[0],
        )
        return None
    seconds = time.perf_counter() - start
    logger.info("a part of the policy loss was compiled in %.1f s", seconds)
    return compiled


class Differentiated(torch.autograd.Function):
    """A loss whose gradients were computed with it: backward multiplies them by the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], Outputs], *differentiated: Tensor | None) -> Outputs:
        """The outputs of `call` but for those after its first, the gradients of that to each of `differentiated`."""
        ctx.set_materialize_grads(False)
        loss, *others = call()
        gradients, others = others[: len(differentiated)], others[len(differentiated) :]
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*(each for each in others if each is not None))
        return loss, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = (
            None if g is None or incoming is None else g * incoming for g in ctx.saved_tensors
        )
        return None, *gradients
