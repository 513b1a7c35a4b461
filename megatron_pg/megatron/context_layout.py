"""The check that a model expects packs split in zigzag chunks over context-parallel ranks."""

from typing import Any

from megatron_pg.megatron.groups import chunks_of


def require_zigzag(model: Any) -> None:
    """Raise NotImplementedError for a model that does not expect zigzag chunks over
    context-parallel ranks.

    Megatron's development branch has this setting in `TransformerConfig`. megatron-core up to
    0.19.2 has only zigzag.
    """
    mode = getattr(chunks_of(model)[0].config, "cp_partition_mode", "zigzag")
    if mode != "zigzag":
        raise NotImplementedError(
            f"the model's config has cp_partition_mode={mode!r}, but packs are split in zigzag "
            "chunks: set it to 'zigzag'"
        )
