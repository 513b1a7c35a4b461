"""Checks that a model takes the cut of a pack over context-parallel ranks, and a group of a micro-batch's own."""

from collections.abc import Iterator
from typing import Any

from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.config.versions import follows_own_group, has_partition_mode
from megatron_pg.megatron.groups import chunks_of, unwrapped
from megatron_pg.megatron.scale_contract import ScaleContract


def require_partition_mode(model: Any, mode: CpPartitionMode) -> None:
    """Refuse a `--cp-partition-mode` that the model, or a part of it, does not have; called under context parallelism.

    Megatron's development branch has the mode in its `TransformerConfig`, and refuses there what its attention does not
    take. megatron-core 0.16 to 0.19.2 knows the zigzag alone: in its rotary embedding (models/common/embeddings/rope_utils.py,
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
