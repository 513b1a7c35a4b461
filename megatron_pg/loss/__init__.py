"""From per-token log-probs to the loss of a step: aggregation, objectives, corrections, metrics."""
