"""From rollouts to steps: which samples a step holds, its micro-batches and its totals."""

from megatron_pg.step.bins import plan_bins
from megatron_pg.step.collector import CollectorState, StepCollector, StepSamples
from megatron_pg.step.cost import SampleCost
from megatron_pg.step.hybrid_context import plan_hybrid_cp_step
from megatron_pg.step.ids import with_distinct_ids
from megatron_pg.step.plan import StepPlan, assign_to_data_parallel_ranks, plan_step
from megatron_pg.step.sources import IteratorSource, SampleSource

__all__ = [
    "CollectorState",
    "IteratorSource",
    "SampleSource",
    "StepCollector",
    "StepPlan",
    "StepSamples",
    "SampleCost",
    "assign_to_data_parallel_ranks",
    "plan_bins",
    "plan_hybrid_cp_step",
    "plan_step",
    "with_distinct_ids",
]
