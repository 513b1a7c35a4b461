"""Checks that a model takes a cut of packs over context parallelism, and groups of micro-batches."""

import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import Module

from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.config.versions import follows_own_group, has_partition_mode
from megatron_pg.megatron.groups import chunks_of, unwrapped
from megatron_pg.megatron.scale_contract import ScaleContract

_taken: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By chunk the mode that it was found to take."""


def require_partition_mode(model: Any, mode: CpPartitionMode) -> None:
    """Refuse a `--cp-partition-mode` that the model, or a part of it, does not have; called under context parallelism.

    Megatron's development branch has the mode in its `TransformerConfig`, and refuses there what its attention does not
    take. megatron-core 0.15 to 0.19.2 knows the zigzag alone: in its rotary embedding (models/common/embeddings/rope_utils.py,
    `_apply_rotary_pos_emb_thd`), in multi-token prediction (`roll_tensor`), in Transformer Engine's
    attention and in Mamba.
    Attention of the user's own names the modes that it takes in an attribute `cp_partition_modes`.
    """
    chunks, obstacle = chunks_of(model), None
    config = chunks[0].config
    if has_partition_mode(config):
        if config.cp_partition_mode != mode:
            obstacle = f"the model's config has {config.cp_partition_mode}"
    else:
        for chunk in map(unwrapped, chunks):
            if obstacle is None and isinstance(chunk, Module) and _taken.get(chunk) != mode:
                obstacle = next(_obstacles(chunk, mode), None)
                _taken[chunk] = mode if obstacle is None else ""
    if obstacle is not None:
        raise NotImplementedError(
            f"--cp-partition-mode {mode}: {obstacle}; give the mode that the model's attention has (attention of your own "
            "that takes this one says so by an attribute cp_partition_modes)"
        )


def _obstacles(chunk: Module, mode: CpPartitionMode) -> Iterator[str]:
    """Name the parts of a chunk that do not take a cut."""
    if mode != "zigzag" and getattr(chunk.config, "mtp_num_layers", None):
        yield "multi-token prediction of this megatron-core shifts tokens within zigzag chunks"
    kinds = (vars(module).get("position_embedding_type") for module in chunk.modules())
    position = next(filter(None, kinds), "none")
    for name, part, is_innermost in _sequence_mixers(chunk):
        modes = getattr(part, "cp_partition_modes", ("zigzag",))
        if mode in modes:
            continue
        if is_innermost:
            yield f"{type(part).__name__} of {name} takes {' and '.join(modes)}"
        elif position not in ("none", "learned_absolute"):
            yield (
                "the rotary positions of this megatron-core are those of a zigzag "
                f"(--position-embedding-type {position})"
            )


def _sequence_mixers(module: Any, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Find what mixes tokens of a pack: modules that are told its sequences, and if any is inside.

    A module that names its modes stands for all inside of it.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if hasattr(child, "cp_partition_modes"):
            yield path, child, True
            continue
        inner = list(_sequence_mixers(child, f"{path}."))
        yield from inner
        is_container = isinstance(child, TransformerLayer) or hasattr(child, "layers")
        if not is_container and _is_told_sequences(type(child).forward):
            yield path, child, not inner


@functools.cache
def _is_told_sequences(forward: Any) -> bool:
    return "packed_seq_params" in inspect.signature(forward).parameters


def require_own_group(scale: ScaleContract, model: Any, mode: CpPartitionMode) -> None:
    """Refuse a context-parallel group of a micro-batch's own where the gradient would not be exact.

    Case 3 of `scale_contract` has the reasons. Rotary positions: `Attention.forward` of 0.19.2 gives them
    `pg_collection.cp` whatever the micro-batch's group is (transformer/attention.py).
    """
    position, expert_size = "none", 1
    if model is not None:
        require_partition_mode(model, mode)
        chunk = unwrapped(chunks_of(model)[0])
        position = getattr(chunk, "position_embedding_type", "none")
        expert_size = getattr(chunk.config, "expert_model_parallel_size", 1)
    obstacles = {
        "it needs per-token mode (--calculate-per-token-loss)": not scale.calculate_per_token_loss,
        "losses of experts count tokens of one size of group": scale.counts_all_tokens,
        f"--expert-model-parallel-size {expert_size} exchanges tokens with ranks that run other micro-batches": (
            expert_size > 1
        ),
        f"--position-embedding-type {position} of this megatron-core reads the model's group": (
            position not in ("none", "learned_absolute") and not follows_own_group()
        ),
    }
    for obstacle, is_present in obstacles.items():
        if is_present:
            raise NotImplementedError(f"a context-parallel group for each micro-batch: {obstacle}")
