"""From per-token log-probs to the loss of a step: aggregation, objectives, corrections, metrics.

Start with `policy_loss.py`. The exports are the tables that settings choose from.
"""

from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.corrections import CORRECTIONS, LEVELS
from megatron_pg.loss.metrics import METRICS
from megatron_pg.loss.objectives import DPPO_DELTAS, OBJECTIVES
from megatron_pg.loss.regularizers import KL_ESTIMATES

__all__ = [
    "AGGREGATIONS",
    "CORRECTIONS",
    "DPPO_DELTAS",
    "KL_ESTIMATES",
    "LEVELS",
    "METRICS",
    "OBJECTIVES",
]
