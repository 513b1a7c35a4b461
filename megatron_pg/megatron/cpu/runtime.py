"""A CPU runtime for unmodified Megatron-Core with gloo, which redirects its CUDA calls from
outside.

Megatron-Core uses CUDA devices, streams and NVTX ranges without checking that they exist.
`enable_cpu_runtime` replaces these torch entry points in this process, and a few functions that
Megatron imports. The lists are from megatron-core 0.16.0 to 0.19.2.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megatron_pg.config.versions import require_supported_version

CPU = torch.device("cpu")
NO_STATE = torch.zeros(16, dtype=torch.uint8, device="cpu")


class NullStream(contextlib.ContextDecorator):
    """A placeholder for a CUDA stream, event or range. All work runs in order, so waiting and
    recording do nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> NullStream:
        return self

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    synchronize = record = wait = wait_event = wait_stream = _nothing


@functools.cache
def enable_cpu_runtime() -> None:
    """Let Megatron-Core run on CPU in this process. A second call changes nothing.

    Every rank calls it before it builds models, only if no GPU is used. It cannot be undone in the
    process. The caller must use the gloo backend, `use_cpu_initialization=True`, dropout 0
    (Megatron's random-number tracker is replaced by one without states), and for a virtual pipeline
    `overlap_p2p_comm=True, batch_p2p_comm=False`.

    Raises:
        UnsupportedMegatronError: Megatron-Core is missing or its version is unsupported.
        RuntimeError: CUDA is already initialized in this process.
    """
    compile_nothing()
    require_supported_version()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("enable_cpu_runtime must be called before CUDA is used in this process")
    _redirect_cuda_module()
    _redirect_tensors()
    _patch_megatron()


def compile_nothing() -> None:
    """Let `torch.compile` return functions uncompiled. Call it before importing Megatron.

    On CPU, each function needs a C++ build, and the compiler takes as long to import as Megatron.
    """

    def as_written(model: Any = None, **kwargs: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = as_written  # type: ignore[assignment]
    if "torch._dynamo" in sys.modules:  # something may be compiled already
        torch.compiler.set_stance("force_eager")


def _constant(answer: Any = None) -> Callable[..., Any]:
    """Make a new function of any arguments in each call, because torch.compile distinguishes
    functions.
    """
    return lambda *args, **kwargs: answer


def _redirect_cuda_module() -> None:
    """Replace the entry points of `torch.cuda` that Megatron calls without a check."""
    cuda: Any = torch.cuda
    cuda.current_device = _constant(CPU)
    # Megatron's validate_args reads the architecture under TP and CP (training/arguments.py).
    cuda.get_device_properties = _constant(SimpleNamespace(name="cpu", major=9, minor=0))
    cuda.get_device_capability = _constant((9, 0))
    cuda.current_stream = cuda.default_stream = _constant(NullStream())
    cuda.Stream = cuda.Event = cuda.stream = cuda.nvtx.range = NullStream
    # Without CUDA, torch would queue every seed for an initialization that never comes.
    seeds = ("manual_seed", "manual_seed_all", "set_rng_state")
    waits = ("synchronize", "empty_cache", "set_device", "set_stream", "reset_peak_memory_stats")
    for name in (*seeds, *waits):
        setattr(cuda, name, _constant())
    cuda.get_rng_state = _constant(NO_STATE)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = _constant()


def _redirect_tensors() -> None:
    """Redirect `device="cuda"` in torch's functions to the CPU, and drop `pin_memory=True`.

    A `TorchFunctionMode` would add two microseconds to every torch call.
    """
    factories = {factory.__name__ for factory in _device_constructors()}
    for name in {*factories, *(f"{name}_like" for name in factories)}:
        if hasattr(torch, name):
            setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    for name in ("cuda", "pin_memory"):
        setattr(tensor, name, lambda tensor, *args, **kwargs: tensor)
    tensor.record_stream = _constant()
    original = tensor.type

    @functools.wraps(original)
    def type_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(tensor, *args, **kwargs)
        if not isinstance(name, str):  # a converted tensor
            return name
        # Under an active mode, torch calls this method twice, so the name may already be CUDA's.
        return "torch.cuda." + name.removeprefix("torch.").removeprefix("cuda.")

    # Megatron's optimizers and clipping accept only types with these names (optimizer/optimizer.py,
    # distrib_optimizer.py, clip_grads.py).
    tensor.type = type_on_cuda


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def is_cuda(device: Any) -> bool:
        return isinstance(device, str | torch.device) and str(device).startswith("cuda")

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if len(args) > 1 and is_cuda(args[1]):  # in `Tensor.to`
            args = (args[0], CPU, *args[2:])
        return function(*args, **kwargs)

    return on_cpu


def _patch_megatron() -> None:
    """Replace Megatron's tracker of CUDA random states, fetch split sizes, and define an absent
    GEMM.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    # Activation recomputation gets and sets the device's random state.
    random._get_cuda_rng_state = _constant(NO_STATE)
    random._set_cuda_rng_state = _constant()
    # The all-to-all needs split sizes as numbers. Megatron makes them while it fetches a tensor
    # from the GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    # moe_utils.py of 0.16.0 to 0.17.1 compares Transformer Engine's GEMM with None in every router,
    # but binds the name only if it is installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
