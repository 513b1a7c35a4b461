"""From samples to micro-batches: the plan, the layout and the step totals."""

from megatron_pg.step.bins import plan_bins
from megatron_pg.step.cost import SampleCost
from megatron_pg.step.ids import with_distinct_ids
from megatron_pg.step.plan import StepPlan, assign_to_data_parallel_ranks, plan_step

__all__ = [
    "SampleCost",
    "StepPlan",
    "assign_to_data_parallel_ranks",
    "plan_bins",
    "plan_step",
    "with_distinct_ids",
]
