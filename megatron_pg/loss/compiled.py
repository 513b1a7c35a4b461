"""Formulas of a micro-batch, with their gradient, in a few generated kernels instead of a hundred
launches.

There is no second implementation: `make_fx` traces the functions that the CPU runs operator by
operator, together with their autograd gradient, and `torch.compile` turns the trace into kernels
for any number of tokens and samples. The compiled part takes only tensors, so that a call only
checks their types. If tracing or compiling fails, the functions run operator by operator, and a
warning is logged once.
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
"""Device types with compiled formulas. On a CPU launches are cheap, and results stay bitwise equal
to the formulas."""
MAX_PROGRAMS = 8
"""Maximum settings that a process compiles. Further ones, such as a coefficient that changes every
step, run operator by operator."""
TRACED_TOKENS = 8192
TRACED_SIZES = {"sample_weights": 37, "sums": 41, "samples_of_units": 41, "step_numbers": None}
"""Last sizes of tensors, by name, in the micro-batch of zeros that is traced, if they do not count
tokens but samples, sequences or turns. None: fixed. Every rank compiles the same long reduction for
any first micro-batch."""

Tensors = Mapping[str, Any]  # by name, None if absent
Outputs = tuple[Any, ...]  # tensors, None if absent
Function = Callable[[Tensors], Outputs]
_programs: dict[Hashable, Callable[..., Outputs] | None] = {}


def bind(
    function: Function, settings: Hashable | None, tensors: Tensors, differentiated: Sequence[str]
) -> Callable[[], Outputs]:
    """Bind tensors to a function: to its compiled program on a GPU, and elsewhere to the function.

    The function reads no value on the host, and depends only on its tensors and the settings. With
    settings None it is not compiled. Only its first result has a gradient, to the tensors named in
    `differentiated`.
    """
    is_compiled = settings is not None and tensors["log_probs"].device.type in DEVICES
    by_operators = functools.partial(function, tensors)
    if not is_compiled or torch.is_inference_mode_enabled():
        return by_operators
    present = {name: x.detach().contiguous() for name, x in tensors.items() if x is not None}
    kind = getattr(function, "__func__", function)  # a bound method would keep its micro-batch
    types = tuple((name, x.dtype, x.shape[:-1]) for name, x in present.items())
    key = (kind, settings, types)
    if key not in _programs and len(_programs) < MAX_PROGRAMS:
        _programs[key] = _compiled(function, present, differentiated)
    elif key not in _programs:  # settings that change every step
        _warn_about_program_limit()
    program = _programs.get(key)
    if program is None:
        return by_operators
    call = functools.partial(program, *present.values())
    return functools.partial(Differentiated.apply, call, *map(tensors.get, differentiated))


@functools.cache
def _warn_about_program_limit() -> None:
    logger.warning(
        "the policy loss was compiled for %d settings in this process. Further settings run "
        "operator by operator, with more launches (logged once)",
        MAX_PROGRAMS,
    )


def _compiled(
    function: Function, tensors: Mapping[str, Tensor], differentiated: Sequence[str]
) -> Callable[..., Outputs] | None:
    """Compile the function with the gradients of its first result to `differentiated` as further
    results after it. Return None if compiling fails.
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
    except Exception as error:  # compilers may raise anything, and the formulas still run
        logger.warning(
            "the policy loss was not compiled (%s: %s). It runs operator by operator, with more "
            "launches (logged once for these settings)",
            type(error).__name__,
            str(error).split("\n")[0],
        )
        return None
    logger.info("a part of the policy loss was compiled in %.1f s", time.perf_counter() - start)
    return compiled


class Differentiated(torch.autograd.Function):
    """Loss with precomputed gradients, which backward multiplies by the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], Outputs], *differentiated: Tensor | None) -> Outputs:
        """Return the outputs of `call` without the gradients after the loss, which are saved for
        backward.
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
