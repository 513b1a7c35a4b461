"""Advantages of a step's samples from the rewards of their rollout file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch.distributed as dist

from megatron_pg.rollout_files.schema import RewardedSample
from megatron_pg.step.advantages import GroupAdvantages, group_advantages
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sample import Sample


def with_group_advantages(
    samples: Sequence[Sample],
    *,
    method: str = "grpo",
    data_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[list[Sample], GroupAdvantages]:
    """Replaces the advantages of a step's samples by those of their rewards within their prompt groups.

    Every data-parallel rank must call it with its samples of the step; a group may be spread over ranks. One exchange.

    Args:
        samples: this rank's samples of the step, from rollout files.
        method: see :func:`megatron_pg.step.advantages.group_advantages`.
        data_parallel_group: the data-parallel group *without* context parallelism; None is this rank alone.

    Returns:
        The samples, and the advantages of the whole step in rank order, for its report.

    Raises:
        ValueError: a sample without a reward or a ``group_index``, or an unknown method; on all ranks alike.
    """
    _, everyone = compute_and_gather(
        lambda: _rewards_and_groups(samples), lambda pairs: pairs, data_parallel_group
    )
    rank = 0 if data_parallel_group is None else dist.get_rank(data_parallel_group)
    pairs = [pair for part in everyone for pair in part]
    step = group_advantages([r for r, _ in pairs], [g for _, g in pairs], method=method)
    first = sum(len(part) for part in everyone[:rank])
    mine = step.advantages[first : first + len(samples)].tolist()
    replaced = [
        dataclasses.replace(sample, advantages=advantage)
        for sample, advantage in zip(samples, mine, strict=True)
    ]
    return replaced, step


def _rewards_and_groups(samples: Sequence[Sample]) -> list[tuple[float, int]]:
    pairs = []
    for sample in samples:
        reward = sample.reward if isinstance(sample, RewardedSample) else None
        if reward is None or sample.group_index is None:
            field = "reward" if reward is None else "group_index"
            raise ValueError(
                f"{sample.name} has no {field}: an advantage is a reward against those of the same prompt group"
            )
        pairs.append((reward, sample.group_index))
    return pairs
