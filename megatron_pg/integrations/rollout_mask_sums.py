"""Divisors of samples that turn a trainer's own sample mean into any of the four aggregations.

slime and miles reduce a loss by `sum_i (sum_t m x) / D_i`, which Megatron's schedule divides by N, the rollouts of the
step. With the divisor per sample and the outer count of `megatron_pg.loss.aggregation`, D_i is `divisor_i * outer_count / N`:
G_g P / N for prompt_mean, T / N for token_mean, L for constant, and the rollout's own sum for sample_mean. As their
`rollout_mask_sums` it divides KL, entropy and metrics too, by 1 at least: a step with a D_i below 1 is refused there.
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
    """One data-parallel rank's samples of a rollout, and the trainer's cut of them into optimizer steps."""

    samples: Sequence[BareSample]  # with prompt groups, rollouts and active tokens
    steps: Sequence[Sequence[int]]  # the indices of each step's samples
    num_rollouts: Sequence[int]  # N of each step, over all ranks: the divisor of the step's loss


def rollout_mask_sums(
    aggregation: Aggregation,
    divisor: float | None,
    rollout: Callable[[], Rollout],
    *,
    trainer: str,
    data_parallel_group: dist.ProcessGroup | None = None,
    allow_different_prompts: bool = False,
    is_clamped: bool = True,
) -> Tensor:
    """Return the divisors of this rank's samples, [num_samples] float64.

    Every rank of the data-parallel group *without* context parallelism (None: one rank) must call it, once a rollout, with
    the same number of steps. It makes one exchange of counts and ids. An error, of `rollout` too, is raised on every rank:
    a ValueError for a prompt group that lies in several steps or holds samples of different prompts, or, where the trainer
    divides by 1 at least (`is_clamped`), for a sample with active tokens and a divisor below 1. `divisor` is L of `constant`.
    """
    mine, everyone = compute_and_gather(rollout, lambda own: own, data_parallel_group)
    rank = 0 if data_parallel_group is None else dist.get_rank(data_parallel_group)
    by_rank = [[[own.samples[i] for i in step] for step in own.steps] for own in everyone]
    by_step = list(zip(*by_rank, strict=True))
    steps = [[sample for samples in step for sample in samples] for step in by_step]
    if aggregation.name == "prompt_mean":
        _refuse_split_groups(steps, trainer)
        if not allow_different_prompts:
            _refuse_different_prompts(steps, trainer)
    sums = torch.zeros(len(mine.samples), dtype=torch.float64, device="cpu")
    for number, (indices, samples) in enumerate(zip(mine.steps, steps, strict=True)):
        # Prompts and the steps of each group are compared above, in words that fit the trainer.
        others = dict.fromkeys(("allow_different_prompts", "allow_different_group_sizes"), True)
        totals = step_totals(samples, data_parallel_group=None, **others)
        # Counts are multiplied before they are divided: a divisor of exactly 1 is not to come out below it.
        step_sums = aggregation.divisors_of(totals, samples, divisor)
        step_sums = step_sums * aggregation.outer_count(totals) / mine.num_rollouts[number]
        if is_clamped:
            _refuse_below_one(aggregation, step_sums, samples, trainer)
        before = sum(map(len, by_step[number][:rank]))
        sums[list(indices)] = step_sums[before : before + len(indices)]
    return sums


def _refuse_below_one(
    aggregation: Aggregation, sums: Tensor, samples: Sequence[BareSample], trainer: str
) -> None:
    """Refuse divisors of a step that the trainer would raise to 1."""
    for sample, value in zip(samples, sums.tolist(), strict=True):
        if value < 1 and sample.num_active_tokens:
            members = samples
            if aggregation.name == "prompt_mean":
                members = [other for other in samples if other.group_index == sample.group_index]
            tokens = sum(other.num_active_tokens for other in members)
            where = "the step" if members is samples else f"prompt group {sample.group_index}"
            raise ValueError(
                f"{aggregation.name}: {where} has {tokens} active tokens. {trainer} would have to divide {sample.name} by "
                f"{value:.3g}, and divides by 1 at least: set regularizer_aggregation: sample_mean, which leaves KL and entropy "
                "to the trainer's own mean, or filter such samples out before training"
            )


def _refuse_split_groups(steps: Sequence[Sequence[BareSample]], trainer: str) -> None:
    first: dict[int | None, int] = {}
    last: dict[int | None, int] = {}
    for number, samples in enumerate(steps):
        for sample in samples:
            last[sample.group_index] = number
            first.setdefault(sample.group_index, number)
    split = [f"{g} (steps {n} and {last[g]})" for g, n in first.items() if n != last[g]]
    if split:
        raise ValueError(
            f"prompt_mean: {trainer} trains the samples of {len(split)} prompt groups in several optimizer steps of this "
            f"rollout: {', '.join(split[:8])}. A prompt mean is of whole groups: make --global-batch-size a multiple of "
            "--n-samples-per-prompt, and keep the samples of a group together in the order of the rollout"
        )


def _refuse_different_prompts(steps: Sequence[Sequence[BareSample]], trainer: str) -> None:
    """Refuse groups of different prompts. A rollout of several samples has several prompts, and its group is skipped."""
    samples = [sample for step in steps for sample in step]
    rollouts = Counter((sample.group_index, sample.rollout_id) for sample in samples)
    in_parts = {group for (group, _), count in rollouts.items() if count > 1}
    first: dict[int | None, BareSample] = {}
    for sample in samples:
        group = sample.group_index
        other = first.setdefault(group, sample)
        if group not in in_parts and sample.prompt_hash != other.prompt_hash:
            raise ValueError(
                f"prompt_mean: {other.name} and {sample.name} of prompt group {group} have different prompts. In {trainer} "
                "the group is read as the docs say (docs/migrating.md); number samples and groups as its data source does, "
                "or, where the environment varies the prompt, set allow_different_prompts_in_group: true in "
                "--custom-config-path"
            )
