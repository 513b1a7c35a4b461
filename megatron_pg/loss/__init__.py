"""From per-token log-probs to the loss of a step: aggregation, objectives, corrections, metrics.

`policy_loss.py` is the page to begin with.
"""

from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.corrections import CORRECTIONS, accepted_samples
from megatron_pg.loss.divergence import KL_ESTIMATES
from megatron_pg.loss.metrics import METRICS, reduce_metrics
from megatron_pg.loss.objectives import OBJECTIVES
from megatron_pg.loss.padded import padded_totals, reduce_padded
from megatron_pg.loss.policy_loss import policy_loss_from_log_probs, policy_loss_function
from megatron_pg.loss.reducer import get_pg_loss_reducer

__all__ = [
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATES",
    "METRICS",
    "OBJECTIVES",
    "accepted_samples",
    "get_pg_loss_reducer",
    "padded_totals",
    "policy_loss_from_log_probs",
    "policy_loss_function",
    "reduce_metrics",
    "reduce_padded",
]
