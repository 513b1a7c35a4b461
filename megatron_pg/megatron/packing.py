"""From a packed batch to the parameters that Megatron's attention wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.packed_seq_params import PackedSeqParams

if TYPE_CHECKING:
    from megatron_pg.step.batch import PackedBatch


def packed_seq_params(batch: PackedBatch) -> PackedSeqParams:
    """`packed_seq_params=` of `GPTModel.forward` for this batch, in THD format.

    The lengths are the padded ones, so that they describe where each sequence lies in the pack. The
    padding at a sequence's end is harmless: attention is causal and padding is scored by no loss.

    Args:
        batch: a packed micro-batch whose `window.cu_seqlens` (int32 [segments + 1]) is already on
            the model's device.

    Returns:
        Megatron's parameters, passed by keyword: its fields grow with each release.
    """
    window = batch.window
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=window.cu_seqlens,
        cu_seqlens_kv=window.cu_seqlens,
        max_seqlen_q=window.max_seqlen,
        max_seqlen_kv=window.max_seqlen,
    )
