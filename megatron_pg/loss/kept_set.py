"""What `--replay-sampling-set` asks of the log-probs that samples bring: that they are of the kept sets too."""

from __future__ import annotations

import torch

from megatron_pg.config.policy_loss import LOG_PROB_FIELDS, PolicyLossConfig, required_inputs
from megatron_pg.step.batch import PackedBatch

TOLERANCE = 1e-3
"""What an engine's arithmetic may make of a log-prob of 0, in nats."""


def refuse_other_distributions(config: PolicyLossConfig, batch: PackedBatch) -> None:
    """Refuses log-probs of another distribution than the one renormalised to the kept set, by sample and position.

    Where a token is the only one of its set its log-prob is 0. Another number there is one of the whole vocabulary, or of
    another set, and so are those at other tokens: a ratio to them would compare two supports, and a KL estimate of them would
    not be one of the divergence of the renormalised distributions. Looks at the host alone.

    Raises:
        ValueError: naming the first such number.
    """
    window = batch.window
    if not config.replay_sampling_set or batch.kept_tokens is None:
        return
    alone = (batch.kept_tokens.sizes == 1).nonzero()[:, 0]
    fields = [field for field in required_inputs(config) if field in LOG_PROB_FIELDS]
    for field in fields if alone.numel() else ():
        values = torch.cat([getattr(sample, field) for sample in batch.samples])
        places = window.response_indices[alone]
        wrong = (values[places].abs() > TOLERANCE).nonzero()[:, 0]
        if wrong.numel():
            at, place = int(alone[wrong[0]]), int(places[wrong[0]])
            sample = int(window.window_segment_ids[at])
            token = place - sum(window.response_lengths[:sample])
            raise ValueError(
                f"{batch.samples[sample].name}: {field}[{token}] is {float(values[place]):.4g}, and its token is the only one "
                "of its kept set, where the log-prob over the set is 0: these are log-probs of another distribution. Under "
                "--replay-sampling-set give those over the same sets (compute_log_probs under the same flag; of an engine, "
                "those that it sampled from), or drop the flag"
            )
