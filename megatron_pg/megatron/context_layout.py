"""Checks that a model takes the cut of a pack over context-parallel ranks."""

from collections.abc import Iterator
from typing import Any

from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.config.versions import has_partition_mode
from megatron_pg.megatron.groups import chunks_of, unwrapped


def require_partition_mode(model: Any, mode: CpPartitionMode) -> None:
    """Refuse a `--cp-partition-mode` that the model, or a part of it, does not have; called under context parallelism.

    Megatron's development branch has the mode in its `TransformerConfig`, and refuses there what its attention does not
    take. megatron-core 0.15 to 0.19.2 knows the zigzag alone: in its rotary embedding (models/common/embeddings/rope_utils.py,
    `_apply_rotary_pos_emb_thd`), in multi-token prediction (`roll_tensor`), and in Transformer Engine's attention. Attention
    of the user's own names the modes that it takes in an attribute `cp_partition_modes`.
    """
    chunks, obstacle = chunks_of(model), None
    config = chunks[0].config
    if has_partition_mode(config):
        if config.cp_partition_mode != mode:
            obstacle = f"the model's config has {config.cp_partition_mode}"
    elif mode != "zigzag":
        obstacle = next((part for chunk in chunks for part in _zigzag_parts(chunk)), None)
    if obstacle is not None:
        raise NotImplementedError(
            f"--cp-partition-mode {mode}: {obstacle}; give the mode that the model's attention has (attention of your own "
            "that takes this one says so by an attribute cp_partition_modes)"
        )


def _zigzag_parts(chunk: Any) -> Iterator[str]:
    """Name the parts of a chunk that take no other cut than the zigzag."""
    if getattr(chunk.config, "mtp_num_layers", None):
        yield "multi-token prediction of this megatron-core shifts tokens within zigzag chunks"
    module = unwrapped(chunk)
    position = getattr(module, "position_embedding_type", None)
    for name, attention in module.named_modules():
        is_attention = name.rpartition(".")[2] == "self_attention"
        # A layer of another kind has an identity there.
        if not is_attention or next(attention.parameters(), None) is None:
            continue
        if "contiguous" in getattr(attention, "cp_partition_modes", ()):
            continue
        if position not in (None, "none", "learned_absolute"):
            yield f"the rotary positions of this megatron-core are those of a zigzag (--position-embedding-type {position})"
        core = getattr(attention, "core_attention", attention)
        if "contiguous" not in getattr(core, "cp_partition_modes", ()):
            yield f"{type(core).__name__} of {name} takes zigzag"
