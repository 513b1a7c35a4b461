"""Whether a model takes what it is given of a pack: its cut over context-parallel ranks, and a group of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.config.versions import follows_own_group
from megatron_pg.megatron.groups import unwrapped
from megatron_pg.megatron.scale_contract import ScaleContract


def require_partition_mode(model: Any, mode: CpPartitionMode) -> None:
    """Refuses a `--cp-partition-mode` that the model does not have; called where there is context parallelism.

    Megatron's development branch has the mode in its `TransformerConfig`, and refuses there what its attention does not
    take. megatron-core 0.15 to 0.19.2 knows the zigzag alone: in its rotary embedding (models/common/embeddings/rope_utils.py,
    `_apply_rotary_pos_emb_thd`), in multi-token prediction (`roll_tensor`), and in the attention that Transformer Engine
    brings. Attention of one's own says what it takes by an attribute `cp_partition_modes`.

    Raises:
        NotImplementedError: the model has another mode, or a part that takes only the other.
    """
    chunks = model if isinstance(model, (list, tuple)) else [model]
    config = chunks[0].config
    if "cp_partition_mode" in (field.name for field in _fields(config)):
        of_model = config.cp_partition_mode
        found = [] if of_model == mode else [f"the model's config has {of_model}"]
    else:
        found = [] if mode == "zigzag" else [each for chunk in chunks for each in _obstacles(chunk)]
    if found:
        raise NotImplementedError(
            f"--cp-partition-mode {mode}: {found[0]}; give the mode that the model's attention has (attention of your own "
            "that takes this one says so by an attribute cp_partition_modes)"
        )


def _fields(config: Any) -> tuple[Any, ...]:
    return dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()


def _obstacles(chunk: Any) -> Iterator[str]:
    """The parts of a chunk that know the zigzag alone."""
    if getattr(chunk.config, "mtp_num_layers", None):
        yield "multi-token prediction of this megatron-core shifts tokens within zigzag chunks"
    module = unwrapped(chunk)
    position = getattr(module, "position_embedding_type", None)
    is_rotary = position not in (None, "none", "learned_absolute")
    for name, attention in module.named_modules():
        # A layer of another kind has an identity there.
        if (
            name.rpartition(".")[2] != "self_attention"
            or next(attention.parameters(), None) is None
        ):
            continue
        core = getattr(attention, "core_attention", attention)
        if "contiguous" in getattr(attention, "cp_partition_modes", ()):
            continue
        if is_rotary:
            yield f"the rotary positions of this megatron-core are those of a zigzag (--position-embedding-type {position})"
        if "contiguous" not in getattr(core, "cp_partition_modes", ()):
            yield f"{type(core).__name__} of {name} takes zigzag"


def require_own_group(scale: ScaleContract, model: Any, mode: CpPartitionMode) -> None:
    """Refuses a context-parallel group of a micro-batch's own where the gradient would not be exact.

    Case 3 of `scale_contract` has the reasons. Rotary positions: `Attention.forward` of 0.19.2 gives them
    `pg_collection.cp` whatever the micro-batch's group is (transformer/attention.py).
    """
    if model is not None:
        require_partition_mode(model, mode)
    chunk = unwrapped(model[0] if isinstance(model, (list, tuple)) else model) if model else None
    position = getattr(chunk, "position_embedding_type", "none")
    obstacles = {
        "it needs per-token mode (--calculate-per-token-loss)": not scale.calculate_per_token_loss,
        "losses of experts count tokens of one size of group": scale.counts_all_tokens,
        f"--position-embedding-type {position} of this megatron-core reads the model's group": (
            position not in ("none", "learned_absolute") and not follows_own_group()
        ),
    }
    for why, is_one in obstacles.items():
        if is_one:
            raise NotImplementedError(f"a context-parallel group for each micro-batch: {why}")
