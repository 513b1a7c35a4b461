"""The policy-gradient loss for RL on Megatron-Core, normalised right at any parallelism.

Importing this package needs torch and NumPy. What touches Megatron is in ``megatron_pg.megatron``.
"""

from megatron_pg.aggregation import AGGREGATIONS, StepTotals, step_totals
from megatron_pg.batch import PackedBatch, pack
from megatron_pg.reducers import get_pg_loss_reducer
from megatron_pg.samples import Sample
from megatron_pg.token_window import TokenWindow

__version__ = "0.1.0"

__all__ = [
    "AGGREGATIONS",
    "PackedBatch",
    "Sample",
    "StepTotals",
    "TokenWindow",
    "get_pg_loss_reducer",
    "pack",
    "step_totals",
]
