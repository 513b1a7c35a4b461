"""The four aggregations for trainers with a padded `[batch, length]` loss matrix, without Megatron.

    # once per step, all rows of the rank
    totals = padded_totals(mask, group_index=ids, data_parallel_group=group)
    for rows in micro_batches:
        loss = reduce_padded(
            x[rows], mask[rows], totals=totals, ..., data_parallel_size=group.size()
        )
        loss.backward()

The gradients of a step are the sum of its micro-batches' gradients, averaged over the data-parallel
ranks by DistributedDataParallel and FSDP2 (`torch.distributed.fsdp.fully_shard`).
`data_parallel_size` undoes the average: `DP * (1 / DP) * sum over ranks and micro-batches` is the
step's gradient. If a trainer also divides the loss by the number of micro-batches, multiply by that
number too (see docs/migrating.md).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.loss.aggregation import checked_aggregation
from megatron_pg.loss.reducer import weighted_sum
from megatron_pg.step.batch import to_device
from megatron_pg.step.counts import BareSample, StepCounts
from megatron_pg.step.sample import as_integer, checked_integer
from megatron_pg.step.totals import StepTotals, totals_of_counts
from megatron_pg.step.values import check_mask


def padded_totals(
    mask: Tensor,
    *,
    group_index: Sequence[int] | None = None,
    rollout_id: Sequence[int] | None = None,
    id_source: str | None = None,
    data_parallel_group: dist.ProcessGroup | None = None,
    allow_different_group_sizes: bool = False,
) -> StepTotals:
    """Count one optimizer step whose samples are the rows of a mask.

    Every rank of the data-parallel group must call it once per step, with all its rows of the step.
    It copies the mask's row sums to the host and exchanges them with the ids. Rows have no prompts,
    so that prompt groups that two ranks each number from 0 are not detected. Only colliding
    `rollout_id` are.

    Args:
        mask: `[batch, length]` of 0 and 1, any dtype and device: the tokens that the objective
            counts.
        group_index: prompt group of each row, any int64. None without `prompt_mean`.
        rollout_id: rollout of each row, any int64. None: every row is a rollout.
        id_source: the source of the ids, equal on all ranks if the rows of one rollout may be on
            several ranks. None: each rank.
        data_parallel_group: the group that gradients are averaged over. None for a step on one
            rank.
        allow_different_group_sizes: see `step_totals`.

    Raises:
        ValueError: the mask is not a matrix of 0 and 1, ids are not one per row, or a rollout is in
            two prompt groups or on two ranks. Raised on all ranks.
    """

    def rows() -> tuple[list[BareSample], None, None]:
        _check_mask(mask)
        counts = mask.sum(dim=1, dtype=torch.int64).tolist()
        return _counted_rows(counts, group_index, rollout_id, id_source), None, None

    counts, _, _ = StepCounts.over_ranks(rows, data_parallel_group)
    return totals_of_counts(
        counts, counts.rank, allow_different_group_sizes=allow_different_group_sizes
    )


def reduce_padded(
    loss: Tensor,
    mask: Tensor,
    *,
    totals: StepTotals | None = None,
    aggregation: str = "sample_mean",
    divisor: float | None = None,
    group_index: Sequence[int] | None = None,
    rollout_id: Sequence[int] | None = None,
    data_parallel_size: int = 1,
) -> Tensor:
    """Aggregate this rank's share of the step, times `data_parallel_size`.

    No communication, and with `totals` no host synchronization. Values and gradients at masked
    positions, even NaN and infinity, do not reach the result.

    Args:
        loss: `[batch, length]` floating: the per-token losses of one micro-batch.
        mask: `[batch, length]` of 0 and 1, any dtype, on the device of `loss`.
        totals: the step totals from `padded_totals`. None: count these rows, which synchronizes
            with the device.
        aggregation: `sample_mean`, `prompt_mean`, `token_mean` or `constant`.
        divisor: L of `constant`, in tokens. An error with any other aggregation.
        group_index: prompt group of each row. `prompt_mean` requires it.
        rollout_id: rollout of each row, if the totals were counted with rollouts.
        data_parallel_size: number of ranks that the trainer averages gradients over, or 1 if it
            sums them.

    Returns:
        0-d, float32 or, for float64, float64: the tensor to call `backward()` on. Summed over
        micro-batches and averaged over the data-parallel ranks it is the objective.

    Raises:
        ValueError: shapes, ids or the divisor are wrong, or ids are not in the totals.
    """
    mode = checked_aggregation(aggregation, divisor)
    _check_mask(mask)
    if loss.shape != mask.shape:
        raise ValueError(
            f"loss has shape {list(loss.shape)} and mask {list(mask.shape)}, expected the same "
            "[batch, length]"
        )
    if as_integer(data_parallel_size) is None or data_parallel_size < 1:
        raise ValueError(
            f"data_parallel_size is {data_parallel_size!r}, expected an integer of 1 or more"
        )
    if totals is None:
        totals = padded_totals(
            mask, group_index=group_index, rollout_id=rollout_id, allow_different_group_sizes=True
        )
    if totals.rollout_active_tokens and len(mask) and rollout_id is None:
        raise ValueError(
            "the totals were counted with rollout_id, but this call has none. Pass the rollout_id "
            "of each row."
        )
    if mode.defaults_to_own_tokens and rollout_id is None:
        denominators = mask.sum(dim=1, dtype=torch.float64)  # bfloat16 would round the counts
        divisors = torch.as_tensor(mode.divisors(denominators, divisor), device=mask.device)
    else:
        # Looked up by id, without counting rows or waiting for the device.
        rows = _counted_rows([0] * len(mask), group_index, rollout_id)
        divisors = to_device(mode.divisors_of(totals, rows, divisor), mask.device)
    inner_sum = weighted_sum(loss, mask / divisors[:, None])
    return inner_sum * (data_parallel_size / mode.outer_count(totals))


def _counted_rows(
    active_tokens: Sequence[int],
    group_index: Sequence[int] | None,
    rollout_id: Sequence[int] | None,
    id_source: str | None = None,
) -> list[BareSample]:
    columns: list[Sequence[int | None]] = []
    for field, ids in (("group_index", group_index), ("rollout_id", rollout_id)):
        if ids is None:
            columns.append([None] * len(active_tokens))
        elif len(ids) == len(active_tokens):
            columns.append([checked_integer(f"{field}[{row}]", x) for row, x in enumerate(ids)])
        else:
            raise ValueError(
                f"{field} has {len(ids)} ids for {len(active_tokens)} rows: pass one per row"
            )
    return [
        BareSample(count, group, rollout, f"row {row}", id_source=id_source)
        for row, (count, group, rollout) in enumerate(zip(active_tokens, *columns, strict=True))
    ]


def _check_mask(mask: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask is a {type(mask).__name__}, expected a tensor [batch, length]")
    if mask.dim() != 2:
        raise ValueError(f"mask has shape {list(mask.shape)}, expected [batch, length]")
    # On a device the check would synchronize.
    if mask.device.type == "cpu":
        check_mask("mask", mask)
