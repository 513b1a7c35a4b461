"""The peers, each from its PyPI package. A peer that is not installed is left out with the reason.

Three peers are imported without their package's `__init__`, which needs libraries unrelated to the
kernel (Ray, a compiled core).
"""

import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def import_below(
    *modules: str, packages: tuple[str, ...], only_peers: bool = False
) -> types.ModuleType:
    """Import `modules` without the `__init__` of `packages`, and return the first module.

    The folder PEERS_PATH is searched first, for unpacked packages that other packages must not
    find. With `only_peers`, nothing else is searched.
    """
    peers = [*filter(None, [os.environ.get("PEERS_PATH")])]
    folders = peers if only_peers else [*peers, *sys.path]
    for package in packages:
        root, *rest = package.split(".")
        found = importlib.machinery.PathFinder.find_spec(root, folders)
        if found is None or not found.submodule_search_locations:
            raise ModuleNotFoundError(f"No module named {root!r}")
        stub = types.ModuleType(package)
        stub.__path__ = ["/".join([found.submodule_search_locations[0], *rest])]
        sys.modules[package] = stub
    return [importlib.import_module(module) for module in modules][0]


def try_load(name: str, load: Callable[[], Callable]) -> Callable | None:
    """Return the peer's function, or print the reason and return None."""
    try:
        return load()
    except Exception as error:  # anything that an import raises
        print(f"left out {name}: {type(error).__name__}: {error}".splitlines()[0])
        return None


def liger_grpo() -> Callable[..., Tensor]:
    """Return (logits, tokens) -> loss by Liger's Triton GRPO kernel, without entropy, with the
    gradient in place.
    """
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def call(logits: Tensor, tokens) -> Tensor:
        count = logits.shape[0]
        padded = logits.unsqueeze(0)
        per_token, _, _ = triton_grpo_loss(
            padded,
            tokens.old_log_probs[None, : count - 1],
            None,
            tokens.targets[None, : count - 1],
            tokens.advantages[:1],
            temperature=1.0,
            beta=0.0,
            eps_low=0.2,
            eps_high=0.2,
            inplace=True,
            loss_type="grpo",
            reduce=False,
        )
        return per_token.sum()

    return call


def transformer_engine() -> Callable[..., Tensor]:
    """Return (logits, targets) -> -log_probs by the installed Transformer Engine, without
    entropy.
    """
    call = _transformer_engine(only_peers=False)
    return lambda logits, targets: call(logits.unsqueeze(0), targets.unsqueeze(0))[0]


def transformer_engine_rewritten() -> Callable[..., Tensor]:
    """Return the same for a release from 2.20 on, unpacked in PEERS_PATH, with the gradient over
    the logits.
    """
    call = _transformer_engine(only_peers=True)
    return lambda logits, targets: call(
        logits.unsqueeze(0), targets.unsqueeze(0), overwrite_input=True
    )[0]


def _transformer_engine(*, only_peers: bool) -> Callable[..., Tensor]:
    """Import its cross-entropy without the compiled core, and restore the imported package."""
    installed = _taken_out("transformer_engine")
    below = ("", ".common", ".pytorch", ".pytorch.triton")
    packages = tuple(f"transformer_engine{name}" for name in below)
    # Stub a decorator of releases from 2.20 on that disables torch.compile, because its module
    # imports the core.
    jit: Any = types.ModuleType("transformer_engine.pytorch.jit")
    jit.no_torch_dynamo = lambda *_, **__: lambda function: function
    sys.modules[jit.__name__] = jit
    try:
        module = import_below(
            "transformer_engine.pytorch.cross_entropy", packages=packages, only_peers=only_peers
        )
    finally:
        _taken_out("transformer_engine")
        sys.modules.update(installed)
    call: Callable[..., Tensor] = module.parallel_cross_entropy
    return call


def _taken_out(package: str) -> dict[str, types.ModuleType]:
    """Remove a package from the imported modules, and return its modules."""
    names = [name for name in sys.modules if name.split(".")[0] == package]
    return {name: sys.modules.pop(name) for name in names}


def _one_process() -> None:
    if not dist.is_initialized():
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)


def megatron() -> Callable[..., Tensor]:
    """Return (logits, targets) -> -log_probs by Megatron's fused kernel, without entropy."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    _one_process()
    return lambda logits, targets: fused_vocab_parallel_cross_entropy(
        logits.unsqueeze(1), targets.unsqueeze(1), dist.group.WORLD
    )[:, 0]


def eager(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropy in plain float32 torch."""
    log_p = logits.float().log_softmax(1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `eager` under torch.compile, specialized to each shape."""
    return torch.compile(eager, dynamic=False)


def liger_sm90() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return (hidden, weight, targets) -> log_probs, entropy by Liger's CuTe kernels for Hopper."""
    importlib.import_module("cutlass.cute")
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, weight, targets, 1.0, -100, 1, True
        )
        return -loss, entropy

    return call


def verl() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return (hidden, weight, targets) -> log_probs, entropy by verl's Triton linear
    cross-entropy.
    """
    module = import_below(
        "verl.utils.kernel.linear_cross_entropy",
        "verl.utils.kernel.kernels",
        packages=("verl", "verl.utils"),
    )
    return lambda hidden, weight, targets: module.linear_cross_entropy(
        hidden, weight, targets, 1.0, "none"
    )


def quack() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return (hidden, weight, targets) -> both gradients (the weight's in float32) by QuACK's
    cross-entropy.
    """
    from quack.linear_cross_entropy import scaled_exp_linear_cross_entropy_fwd

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # QuACK refuses a chunk as long as the hidden size as ambiguous.
        chunk = 4096 if hidden.shape[1] != 4096 else 8192
        parts = hidden.detach(), weight.detach(), targets
        return scaled_exp_linear_cross_entropy_fwd(*parts, chunk)[1:]

    return call
