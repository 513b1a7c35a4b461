"""Input checks for the loss over sampling sets, which each token was sampled from."""

from collections.abc import Collection

import torch

from megatron_pg.config.tables import LOG_PROB_FIELDS
from megatron_pg.step.batch import PackedBatch

TOLERANCE = 1e-3  # rounding of an engine's log-prob of 0, in nats


def require_heads_in_sets(batch: PackedBatch) -> None:
    """Raise ValueError, with sample and position, for a likely token of the sampler outside the
    token's sampling set: its probability under the policy would be 0.
    """
    for sample in batch.samples:
        kept, head = sample.kept_tokens, sample.sampler_top_k
        if kept is None or head is None or not kept.values.numel():
            continue
        keys = [(each.row_of_element() << 32) + each.values for each in (kept, head.ids)]
        rows = head.ids.row_of_element()
        wrong = ((kept.sizes[rows] > 0) & ~torch.isin(keys[1], keys[0])).nonzero()
        if wrong.numel():
            place = int(wrong[0])
            raise ValueError(
                f"{sample.name}: sampler_top_k has id {int(head.ids.values[place])} at response "
                f"token {int(rows[place])}, and its sampling set (kept_tokens) does not: give the "
                "engine's log-probs after top-k and top-p, without ids of probability 0"
            )


def require_kept_set_log_probs(required: Collection[str], batch: PackedBatch) -> None:
    """Raise a ValueError, with sample and position, if log-probs are not renormalized to the
    sampling set.

    The only token in a set has log-prob 0. A different number comes from the whole vocabulary or a
    different set, and so do the sample's other log-probs: a ratio would compare two supports.
    """
    if batch.kept_tokens is None:
        return
    window, is_alone = batch.window, batch.kept_tokens.sizes == 1
    fields = [field for field in LOG_PROB_FIELDS if field in required]
    for field in fields if is_alone.any() else ():
        values = torch.cat([getattr(sample, field) for sample in batch.samples])
        values = values[window.response_indices]
        wrong = (is_alone & (values.abs() > TOLERANCE)).nonzero()
        if wrong.numel():
            token = int(wrong[0])
            sample = int(window.window_segment_ids[token])
            position = int(window.response_indices[token]) - sum(window.response_lengths[:sample])
            raise ValueError(
                f"{batch.samples[sample].name}: {field}[{position}] is {float(values[token]):.4g}, "
                "but must be 0 because its token is the only one in its sampling set. With "
                "--replay-sampling-set pass log-probs over the same sets (from compute_log_probs "
                "with the same flag, or from the engine's sampling distribution), or remove the "
                "flag."
            )
