"""Formulas of a micro-batch in a few generated kernels in place of a hundred launches, with their gradient.

There is no second implementation: the functions that CPU runs operator by operator are traced once, by
`torch.fx.experimental.proxy_tensor.make_fx`, together with the gradient that autograd makes of them, and `torch.compile`
turns the operators of that trace into kernels for any number of tokens and samples. The compiled part takes tensors alone, so
that a call checks nothing but their types. What cannot be traced or compiled runs operator by operator, which is said once.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass
class Inputs:
    """The tensors of a function by name, by what their last dimension counts. None is a tensor that is not there."""

    tokens: dict[str, Any]
    """[..., window]."""
    samples: dict[str, Any]
    """[..., samples]."""
    fixed: dict[str, Any]
    """Tensors of a size that the settings fix."""

    @property
    def by_name(self) -> dict[str, Any]:
        """All tensors, None included."""
        return {**self.tokens, **self.samples, **self.fixed}

    @property
    def present(self) -> dict[str, Tensor]:
        """The tensors that are there, detached."""
        tensors = self.by_name.items()
        return {name: each.detach().contiguous() for name, each in tensors if each is not None}


Function = Callable[[Mapping[str, Any]], Outputs]


def evaluate(
    function: Function, settings: Hashable | None, inputs: Inputs, differentiated: Sequence[str]
) -> Outputs:
    """Evaluate a function of tensors: by a compiled program on a GPU, operator by operator elsewhere.

    The function reads no value on the host, and depends on nothing but its tensors and the settings; None is a function that
    is not compiled. Its first result has a gradient to the tensors named in `differentiated`, the others have none.
    """
    program, device = None, inputs.tokens["log_probs"].device.type
    if settings is not None and device in DEVICES and not torch.is_inference_mode_enabled():
        program = _program(function, settings, inputs, differentiated)
    if program is None:
        return function(inputs.by_name)
    call = functools.partial(program, *inputs.present.values())
    if not differentiated:
        with torch.no_grad():
            return call()
    leaves = (inputs.by_name[name] for name in differentiated)
    outputs: Outputs = Differentiated.apply(call, *leaves)  # type: ignore[no-untyped-call]
    return outputs


def _program(
    function: Function, settings: Hashable, inputs: Inputs, differentiated: Sequence[str]
) -> Callable[..., Outputs] | None:
    """Return the compiled function, compiled at the first call for these settings; None where it runs operator by operator."""
    kind = getattr(function, "func", function)
    dtypes = tuple((name, each.dtype) for name, each in inputs.by_name.items() if each is not None)
    key = (kind, settings, dtypes)
    if key not in _programs:
        if len(_programs) >= MAX_PROGRAMS:  # nothing is kept of settings that every step may change
            _say_that_no_more_are_compiled()
            return None
        _programs[key] = _compiled(_with_gradients(function, differentiated), inputs)
    return _programs[key]


def _with_gradients(function: Function, differentiated: Sequence[str]) -> Function:
    """Return the function with the gradients of its first result to `differentiated` behind that result."""
    if not differentiated:
        return function

    def traced(tensors: Mapping[str, Any]) -> Outputs:
        with torch.enable_grad():
            leaves = {
                name: tensors[name].detach().requires_grad_()
                for name in differentiated
                if tensors.get(name) is not None
            }
            results: Any = function({**tensors, **leaves})
            loss, *others = results
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        by_name = dict(zip(leaves, gradients, strict=True))
        return loss.detach(), *map(by_name.get, differentiated), *others

    return traced


@functools.cache
def _say_that_no_more_are_compiled() -> None:
    logger.warning(
        "the policy loss was compiled for %d settings in this process: further ones run operator by operator, with more launches "
        "(said once)",
        MAX_PROGRAMS,
    )


def _compiled(function: Function, inputs: Inputs) -> Callable[..., Outputs] | None:
    """Trace the function on zeros of `TRACED_TOKENS` and `TRACED_SAMPLES`, and compile the trace for any numbers of them."""
    start = time.perf_counter()
    sizes = dict.fromkeys(inputs.tokens, TRACED_TOKENS)
    sizes |= dict.fromkeys(inputs.samples, TRACED_SAMPLES)
    zeros = {
        name: each.new_zeros((*each.shape[:-1], sizes.get(name, each.shape[-1])))
        for name, each in inputs.present.items()
    }

    def of_tensors(*tensors: Tensor) -> Outputs:
        return function(dict(zip(zeros, tensors, strict=True)))

    try:
        with torch.no_grad():
            graph: Callable[..., Any] = make_fx(of_tensors, tracing_mode="symbolic")(
                *zeros.values()
            )
            for name in zeros.keys() & sizes.keys():
                torch._dynamo.mark_dynamic(zeros[name], zeros[name].dim() - 1)
            compiled: Callable[..., Outputs] = torch.compile(graph)
            compiled(*zeros.values())
    except Exception as error:  # whatever a compiler may raise: the formulas themselves run
        logger.warning(
            "the policy loss was not compiled (%s: %s): it runs operator by operator, with more launches (said once for these "
            "settings)",
            type(error).__name__,
            str(error).split("\n")[0],
        )
        return None
    logger.info("a part of the policy loss was compiled in %.1f s", time.perf_counter() - start)
    return compiled


class Differentiated(torch.autograd.Function):
    """A loss whose gradients were computed with it: backward multiplies them by the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], Outputs], *differentiated: Tensor | None) -> Outputs:
        """Return the outputs of `call` without its gradients, which stand behind the loss and are kept for backward."""
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
