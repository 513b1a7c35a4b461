"""Formulas of a micro-batch in a few generated kernels in place of a hundred launches, with their
gradient.

There is no second implementation: the functions that CPU runs operator by operator are traced once
by `make_fx`, together with the gradient that autograd makes of them, and `torch.compile` turns that
trace into kernels for any number of tokens and samples. The compiled part takes tensors alone, so
that a call checks nothing but their types. What cannot be traced or compiled runs operator by
operator, which is said once.
"""

import functools
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx

logger = logging.getLogger("megatron_pg")

DEVICES = {"cuda"}
"""The types of device where formulas are compiled: on a CPU launches cost nothing, and results stay
those of the formulas to the bit."""
MAX_PROGRAMS = 8
"""Settings that a process compiles for; further ones, such as a coefficient that every step
changes, run operator by operator."""
TRACED_TOKENS = 8192
TRACED_SIZES = {"sample_weights": 37, "sums": 41, "samples_of_units": 41, "step_numbers": None}
"""Sizes of the micro-batch of zeros that is traced and compiled, by the name of a tensor whose last
dimension counts samples, or sequences or turns, and not tokens; None for one of a fixed size. Every
rank compiles the same, a long reduction, whatever its first micro-batch."""

Tensors = Mapping[str, Any]  # by name; None where there is none
Outputs = tuple[Any, ...]  # tensors; None where there is none
Function = Callable[[Tensors], Outputs]
_programs: dict[Hashable, Callable[..., Outputs] | None] = {}


def bind(
    function: Function, settings: Hashable | None, tensors: Tensors, differentiated: Sequence[str]
) -> Callable[[], Outputs]:
    """Bind the tensors to a function: to its compiled program on a GPU, to the function itself
    elsewhere.

    The function reads no value on the host, and depends on nothing but its tensors and the
    settings; None is a function that is not compiled. Its first result has a gradient to the
    tensors named in `differentiated`, the others have none.
    """
    is_compiled = settings is not None and tensors["log_probs"].device.type in DEVICES
    by_operators = functools.partial(function, tensors)
    if not is_compiled or torch.is_inference_mode_enabled():
        return by_operators
    present = {name: x.detach().contiguous() for name, x in tensors.items() if x is not None}
    kind = getattr(function, "__func__", function)  # of a method, which holds a micro-batch
    types = tuple((name, x.dtype, x.shape[:-1]) for name, x in present.items())
    key = (kind, settings, types)
    if key not in _programs and len(_programs) < MAX_PROGRAMS:
        _programs[key] = _compiled(function, present, differentiated)
    elif key not in _programs:  # settings that every step changes
        _say_that_no_more_are_compiled()
    program = _programs.get(key)
    if program is None:
        return by_operators
    call = functools.partial(program, *present.values())
    return functools.partial(Differentiated.apply, call, *map(tensors.get, differentiated))


@functools.cache
def _say_that_no_more_are_compiled() -> None:
    logger.warning(
        "the policy loss was compiled for %d settings in this process: further ones run operator "
        "by operator, with more launches "
        "(said once)",
        MAX_PROGRAMS,
    )


def _compiled(
    function: Function, tensors: Mapping[str, Tensor], differentiated: Sequence[str]
) -> Callable[..., Outputs] | None:
    """Compile the function, the gradients of its first result to `differentiated` behind that; None
    where it fails.
    """
    start, zeros = time.perf_counter(), {}
    for name, x in tensors.items():
        size = TRACED_SIZES.get(name, TRACED_TOKENS) or x.shape[-1]
        zeros[name] = x.new_zeros(*x.shape[:-1], size)
    names = [name for name in differentiated if name in zeros]

    def traced(*arguments: Tensor) -> Outputs:
        by_name = dict(zip(zeros, arguments, strict=True))
        if not differentiated:
            return function(by_name)
        with torch.enable_grad():
            leaves = {name: by_name[name].detach().requires_grad_() for name in names}
            loss, *others = function(by_name | leaves)
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradient_of = dict(zip(names, gradients, strict=True))
        return loss.detach(), *map(gradient_of.get, differentiated), *others

    try:
        with torch.no_grad():
            graph = make_fx(traced, tracing_mode="symbolic")(*zeros.values())
            for name, x in zeros.items():
                if TRACED_SIZES.get(name, TRACED_TOKENS):
                    torch._dynamo.mark_dynamic(x, x.dim() - 1)
            compiled: Callable[..., Outputs] = torch.compile(graph)
            compiled(*zeros.values())
    except Exception as error:  # whatever a compiler may raise: the formulas themselves run
        logger.warning(
            "the policy loss was not compiled (%s: %s): it runs operator by operator, with more "
            "launches (said once for these "
            "settings)",
            type(error).__name__,
            str(error).split("\n")[0],
        )
        return None
    logger.info("a part of the policy loss was compiled in %.1f s", time.perf_counter() - start)
    return compiled


class Differentiated(torch.autograd.Function):
    """A loss whose gradients were computed with it: backward multiplies them by the gradient that
    arrives.
    """

    @staticmethod
    def forward(ctx: Any, call: Callable[[], Outputs], *differentiated: Tensor | None) -> Outputs:
        """Return the outputs of `call` without its gradients, which stand behind the loss and are
        kept for backward.
        """
        ctx.set_materialize_grads(False)
        loss, *others = call()
        gradients, others = others[: len(differentiated)], others[len(differentiated) :]
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*(output for output in others if output is not None))
        return loss, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = (
            None if g is None or incoming is None else g * incoming for g in ctx.saved_tensors
        )
        return None, *gradients
