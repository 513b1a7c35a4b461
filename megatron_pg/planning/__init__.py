"""From rollouts to steps: which samples a step holds, its micro-batches and its totals."""

from megatron_pg.planning.bins import plan_bins
from megatron_pg.planning.step import StepPlan, assign_to_data_parallel_ranks, plan_step

__all__ = ["StepPlan", "assign_to_data_parallel_ranks", "plan_bins", "plan_step"]
