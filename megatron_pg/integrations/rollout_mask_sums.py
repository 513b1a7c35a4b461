"""Divisors that turn a trainer's sample mean into any of the four aggregations.

slime and miles reduce a loss by `sum_i (sum_t m x) / D_i`, which Megatron's schedule divides by N,
the step's rollouts. Here D_i is `divisor_i * outer_count / N`: G_g P / N for prompt_mean, T / N for
token_mean, L for constant, and the rollout's active tokens for sample_mean. As `rollout_mask_sums`,
D_i also divides KL, entropy and metrics, and the trainers divide by at least 1.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.totals import BareSample, step_totals


class Rollout(NamedTuple):
    """One data-parallel rank's samples of a rollout, with the trainer's split into steps."""

    samples: Sequence[BareSample]  # with prompt groups, rollouts and active tokens
    steps: Sequence[Sequence[int]]  # the indices of each step's samples
    num_rollouts: Sequence[int]  # N of each step over all ranks, the divisor of the step's loss
    divisor: float | None = None  # L of constant


def rollout_mask_sums(
    aggregation: Aggregation,
    rollout: Callable[[], Rollout],
    *,
    trainer: str,
    data_parallel_group: dist.ProcessGroup | None = None,
    allow_different_prompts: bool = False,
    is_clamped: bool = True,
) -> Tensor:
    """Return the divisors of this rank's samples, [num_samples] float64.

    Every rank of the data-parallel group *without* context parallelism (None: one rank) must call
    it once per rollout, with the same number of steps. One exchange carries counts and ids.

    Raises:
        ValueError: on every rank, for an error in `rollout`, different divisors, a prompt group in
            several steps or with different prompts, or, if the trainer divides by at least 1
            (`is_clamped`), a sample with active tokens and a divisor below 1.
    """
    mine, everyone = compute_and_gather(rollout, lambda own: own, data_parallel_group)
    rank = 0 if data_parallel_group is None else dist.get_rank(data_parallel_group)
    divisors = [own.divisor for own in everyone]
    if len(set(divisors)) > 1:
        raise ValueError(f"{aggregation.name}: the ranks have different divisors, {divisors}")
    by_rank = [[[own.samples[i] for i in step] for step in own.steps] for own in everyone]
    by_step = list(zip(*by_rank, strict=True))
    steps = [[sample for samples in step for sample in samples] for step in by_step]
    if aggregation.name == "prompt_mean":
        _refuse_split_groups(steps, trainer)
        if not allow_different_prompts:
            _refuse_different_prompts([sample for step in steps for sample in step], trainer)
    sums = torch.zeros(len(mine.samples), dtype=torch.float64, device="cpu")
    for number, (indices, samples) in enumerate(zip(mine.steps, steps, strict=True)):
        # Groups were checked above, with the trainer's words.
        totals = step_totals(
            samples, allow_different_prompts=True, allow_different_group_sizes=True
        )
        # Multiply before dividing, so that a divisor of exactly 1 is not rounded below 1.
        step_sums = aggregation.divisors_of(totals, samples, mine.divisor)
        step_sums = step_sums * aggregation.outer_count(totals) / mine.num_rollouts[number]
        if is_clamped:
            _refuse_below_one(aggregation.name, step_sums, samples, trainer)
        before = sum(map(len, by_step[number][:rank]))
        sums[list(indices)] = step_sums[before : before + len(indices)]
    return sums


def _refuse_below_one(name: str, sums: Tensor, samples: list[BareSample], trainer: str) -> None:
    """Raise ValueError for a step's divisors that the trainer would raise to 1."""
    for sample, value in zip(samples, sums.tolist(), strict=True):
        if value < 1 and sample.num_active_tokens:
            where, members = "the step", samples
            if name == "prompt_mean":
                where = f"prompt group {sample.group_index}"
                members = [s for s in samples if s.group_index == sample.group_index]
            tokens = sum(member.num_active_tokens for member in members)
            raise ValueError(
                f"{name}: {where} has {tokens} active tokens. {trainer} would have to divide "
                f"{sample.name} by {value:.3g}, but divides by at least 1: set "
                "regularizer_aggregation: sample_mean, or filter these samples out"
            )


def _refuse_split_groups(steps: Sequence[Sequence[BareSample]], trainer: str) -> None:
    places = [(sample.group_index, n) for n, samples in enumerate(steps) for sample in samples]
    first, last = dict(reversed(places)), dict(places)
    split = [f"{g} (steps {first[g]} and {last[g]})" for g in last if first[g] != last[g]]
    if split:
        raise ValueError(
            f"prompt_mean: {trainer} trains the samples of {len(split)} prompt groups in several "
            f"optimizer steps of this rollout: {', '.join(split[:8])}. Make --global-batch-size a "
            "multiple of --n-samples-per-prompt, and keep the samples of a group together"
        )


def _refuse_different_prompts(samples: Sequence[BareSample], trainer: str) -> None:
    """Raise ValueError for groups with different prompts, except groups with a rollout of several
    samples.
    """
    rollouts = Counter((sample.group_index, sample.rollout_id) for sample in samples)
    in_parts = {group for (group, _), count in rollouts.items() if count > 1}
    first: dict[int | None, BareSample] = {}
    for sample in samples:
        other = first.setdefault(sample.group_index, sample)
        if sample.group_index not in in_parts and sample.prompt_hash != other.prompt_hash:
            raise ValueError(
                f"prompt_mean: {other.name} and {sample.name} of prompt group {sample.group_index} "
                f"have different prompts. Number samples like {trainer}'s data source, or set "
                "allow_different_prompts_in_group: true in --custom-config-path"
            )
