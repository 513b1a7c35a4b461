"""Inputs of the loss over kept sets, the tokens that each token was sampled from."""

from collections.abc import Collection

import torch

from megatron_pg.config.tables import LOG_PROB_FIELDS
from megatron_pg.step.batch import PackedBatch

TOLERANCE = 1e-3  # rounding of an engine's log-prob of 0, in nats


def require_heads_in_sets(batch: PackedBatch) -> None:
    """Refuse a sampler's likely tokens that the set of a token lacks, by sample and position: their
    probability under the policy would be 0.
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
    """Refuse log-probs of another distribution than the one renormalised to the kept set, by sample
    and position.

    A token that is alone in its set has the log-prob 0. Another number there belongs to the whole
    vocabulary, or to another set, and so do the numbers at other tokens: a ratio to them would
    compare two supports.
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
                f"and its token is the only one "
                "of its kept set, where the log-prob over the set is 0: these are log-probs of "
                "another distribution. Under "
                "--replay-sampling-set give those over the same sets (compute_log_probs under the "
                "same flag; of an engine, "
                "those that it sampled from), or drop the flag"
            )
