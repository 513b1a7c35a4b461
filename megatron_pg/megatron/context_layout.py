"""Check that a model takes the cut of a pack over context-parallel ranks."""

from typing import Any

from megatron_pg.megatron.groups import chunks_of


def require_zigzag(model: Any) -> None:
    """Refuse a model that is not cut in zigzag chunks over context-parallel ranks.

    Megatron's development branch has the cut in its `TransformerConfig`; megatron-core up to 0.19.2
    has only the zigzag.
    """
    mode = getattr(chunks_of(model)[0].config, "cp_partition_mode", "zigzag")
    if mode != "zigzag":
        raise NotImplementedError(
            f"the model's config has cp_partition_mode={mode!r}, and packs are cut in zigzag "
            "chunks: set it to 'zigzag'"
        )
