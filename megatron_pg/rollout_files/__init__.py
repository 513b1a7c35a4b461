"""Samples of a step from Parquet and JSON Lines files, which any rollout engine can write, one row
per sample.
"""

from megatron_pg.rollout_files.collector import (
    CollectorState,
    SampleSource,
    StepCollector,
    StepSamples,
)
from megatron_pg.rollout_files.iterators import IteratorSource
from megatron_pg.rollout_files.sampling_mask import kept_tokens_of_engine
from megatron_pg.rollout_files.schema import (
    COLUMNS,
    RewardedSample,
    RowError,
    with_group_advantages,
)
from megatron_pg.rollout_files.source import RolloutFileReport, RolloutFiles, validate_rollout_file
from megatron_pg.step.routed_experts import routed_experts_of_engine
from megatron_pg.step.sampler_top_k import top_k_of_sglang, top_k_of_vllm

__all__ = [
    "COLUMNS",
    "CollectorState",
    "IteratorSource",
    "RewardedSample",
    "RolloutFileReport",
    "RolloutFiles",
    "RowError",
    "SampleSource",
    "StepCollector",
    "StepSamples",
    "kept_tokens_of_engine",
    "routed_experts_of_engine",
    "top_k_of_sglang",
    "top_k_of_vllm",
    "validate_rollout_file",
    "with_group_advantages",
]
