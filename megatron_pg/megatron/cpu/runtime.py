"""Run unmodified Megatron-Core on CPU with gloo, by redirecting its CUDA calls from outside.

Megatron-Core asks for CUDA devices, streams and NVTX ranges without a check that they exist.
`enable_cpu_runtime` replaces these entry points of torch for this process. It edits nothing of
Megatron's. The lists were read off megatron-core 0.16.0 to 0.19.2.
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
    """A stand-in for a CUDA stream, event or range where all work is done in order: waiting and
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
    """Let Megatron-Core run on CPU in this process. Another call changes nothing.

    Every rank calls it before it builds models, where no GPU is used. It holds for the process and
    cannot be undone. The caller chooses the gloo backend, `use_cpu_initialization=True`, dropout 0
    (Megatron's random-number tracker is replaced by one without states), and for a virtual pipeline
    `overlap_p2p_comm=True, batch_p2p_comm=False`.

    Raises:
        UnsupportedMegatronError: Megatron-Core is missing or of an unsupported version.
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
    """Let `torch.compile` return functions uncompiled. It is called before Megatron is imported.

    On CPU each function takes a C++ build, and the compiler takes as long to import as Megatron
    does.
    """

    def as_written(model: Any = None, **kwargs: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = as_written  # type: ignore[assignment]
    if "torch._dynamo" in sys.modules:  # something may be compiled already
        torch.compiler.set_stance("force_eager")


def _constant(answer: Any = None) -> Callable[..., Any]:
    """Make a function of any arguments; a new one for each call, because torch.compile tells them
    apart.
    """
    return lambda *args, **kwargs: answer


def _redirect_cuda_module() -> None:
    """Replace the entry points of `torch.cuda` that Megatron calls without a check."""
    cuda: Any = torch.cuda
    cuda.current_device = _constant(CPU)
    # Megatron's validate_args asks for the architecture under TP and CP (training/arguments.py).
    cuda.get_device_properties = _constant(SimpleNamespace(name="cpu", major=9, minor=0))
    cuda.get_device_capability = _constant((9, 0))
    cuda.current_stream = cuda.default_stream = _constant(NullStream())
    cuda.Stream = cuda.Event = cuda.stream = cuda.nvtx.range = NullStream
    # Without CUDA torch would keep every seed in a queue for an initialization that never comes.
    seeds = ("manual_seed", "manual_seed_all", "set_rng_state")
    waits = ("synchronize", "empty_cache", "set_device", "set_stream", "reset_peak_memory_stats")
    for name in (*seeds, *waits):
        setattr(cuda, name, _constant())
    cuda.get_rng_state = _constant(NO_STATE)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = _constant()


def _redirect_tensors() -> None:
    """Send `device="cuda"` of torch's functions to the CPU, and drop `pin_memory=True`.

    A `TorchFunctionMode` would do so too, and cost two microseconds for every call of torch.
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
        if not isinstance(name, str):  # a tensor, converted to the type of the arguments
            return name
        # The name may be CUDA's already: under an active mode torch calls this method twice.
        return "torch.cuda." + name.removeprefix("torch.").removeprefix("cuda.")

    # Megatron's optimizers take parameters, and its clipping gradients, of types with these names
    # alone (optimizer/optimizer.py, distrib_optimizer.py, clip_grads.py).
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
    """Replace Megatron's tracker of CUDA random states by one without, fetch split sizes, and name
    an absent GEMM.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    # Recomputation of activations gets and sets the state of the device.
    random._get_cuda_rng_state = _constant(NO_STATE)
    random._set_cuda_rng_state = _constant()
    # The all-to-all needs split sizes as numbers. Megatron makes them when it fetches a tensor from
    # the GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    # moe_utils.py of 0.16.0 to 0.17.1 compares Transformer Engine's GEMM with None in every router,
    # and binds it only where that is installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
