"""Training from files that any rollout engine can write: Parquet and JSON Lines, one row a sample. Needs pyarrow."""

from megatron_pg.rollout_files.schema import (
    COLUMNS,
    RewardedSample,
    RowError,
    with_group_advantages,
)
from megatron_pg.rollout_files.source import (
    RolloutFileReport,
    RolloutFiles,
    RolloutPosition,
    validate_rollout_file,
)

__all__ = [
    "COLUMNS",
    "RewardedSample",
    "RolloutFileReport",
    "RolloutFiles",
    "RolloutPosition",
    "RowError",
    "validate_rollout_file",
    "with_group_advantages",
]
