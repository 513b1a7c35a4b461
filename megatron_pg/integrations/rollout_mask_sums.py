"""Values of `rollout_mask_sums` that turn a trainer's own sample mean into any of the four aggregations.

slime and miles give every sample i a divisor D_i, `rollout_mask_sums`, and build one reducer from it for the policy
loss, KL, entropy and metrics: `sum_i (sum_t m x) / max(D_i, 1)`, which they scale so that Megatron's schedule divides
it by N, the rollouts of the step. With this package's divisor per sample and outer count
(`megatron_pg.loss.aggregation`), D_i is

    divisor_i * outer_count / N

that is G_g P / N for prompt_mean, T / N for token_mean, L for constant, and the rollout's own sum for sample_mean.
Below 1 their clamp would change it: such a step is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.totals import BareSample, step_totals


@dataclass(frozen=True)
class TrainerStep:
    """One optimizer step as the trainer has cut it, of one data-parallel rank."""

    samples: list[BareSample]
    """The samples of this rank, with their prompt groups, rollouts and active tokens."""
    num_rollouts: int
    """N: the trainer's divisor of the step's loss, over all ranks."""


def rollout_mask_sums(
    aggregation: Aggregation,
    divisor: float | None,
    steps: Callable[[], list[TrainerStep]],
    *,
    trainer: str,
    data_parallel_group: dist.ProcessGroup | None = None,
    allow_different_prompts: bool = False,
) -> list[Tensor]:
    """Return the divisors of this rank's samples, one [num_samples] float64 tensor for each step.

    Every data-parallel rank must call it, once a rollout, with the same number of steps: one exchange of counts and ids
    over the group; none where it is None. An error is raised on every rank.

    Args:
        aggregation: the row of `AGGREGATIONS`.
        divisor: L, in tokens, for `constant`; else None.
        steps: this rank's steps; what it raises reaches every rank.
        trainer: the trainer's name, for errors.
        data_parallel_group: the data-parallel group *without* context parallelism.
        allow_different_prompts: the samples of a prompt group may have different prompts.

    Raises:
        ValueError: a prompt group lies in several steps, or holds samples of different prompts; a divisor below 1 for a
            sample with active tokens.
    """
    mine, everyone = compute_and_gather(steps, lambda found: found, data_parallel_group)
    rank = 0 if data_parallel_group is None else dist.get_rank(data_parallel_group)
    whole = [
        [sample for step in of_ranks for sample in step.samples]
        for of_ranks in zip(*everyone, strict=True)
    ]
    if aggregation.name == "prompt_mean":
        _refuse_split_groups(whole, trainer)
        if not allow_different_prompts:
            _refuse_different_prompts(whole, trainer)
    sums = []
    for number, (step, samples) in enumerate(zip(mine, whole, strict=True)):
        of_all = _of_step(aggregation, divisor, samples, step.num_rollouts, trainer)
        before = sum(len(of_rank[number].samples) for of_rank in everyone[:rank])
        sums.append(of_all[before : before + len(step.samples)])
    return sums


def _of_step(
    aggregation: Aggregation,
    divisor: float | None,
    samples: Sequence[BareSample],
    num_rollouts: int,
    trainer: str,
) -> Tensor:
    """Return the divisors of all samples of a step, [num_samples] float64."""
    # Prompts and steps of each group are compared above, in words that fit the trainer.
    totals = step_totals(samples, allow_different_prompts=True, allow_different_group_sizes=True)
    outer_count = aggregation.outer_count(totals)
    # Counts are multiplied before they are divided: a divisor of exactly 1 is not to come out below it.
    sums = aggregation.divisors_of(totals, samples, divisor) * outer_count / num_rollouts
    for sample, value in zip(samples, sums.tolist(), strict=True):
        if value < 1 and sample.num_active_tokens:
            counted = (
                f"prompt group {sample.group_index} has {totals.group_active_tokens[sample.group_index]} active tokens, "
                f"fewer than the step's {num_rollouts} rollouts / {outer_count} prompt groups"
                if aggregation.name == "prompt_mean" and sample.group_index is not None
                else f"the step has {totals.num_active_tokens} active tokens in {num_rollouts} rollouts"
            )
            raise ValueError(
                f"{aggregation.name}: {counted}. {trainer} would have to divide {sample.name} by {value:.3g}, and divides "
                "by 1 at least: filter such samples out before training, or take sample_mean, its default"
            )
    return sums


def _refuse_split_groups(steps: Sequence[Sequence[BareSample]], trainer: str) -> None:
    steps_of: dict[int | None, list[int]] = {}
    for number, samples in enumerate(steps):
        for group in dict.fromkeys(sample.group_index for sample in samples):
            steps_of.setdefault(group, []).append(number)
    split = [(group, found) for group, found in steps_of.items() if len(found) > 1]
    if split:
        named = ", ".join(f"{group} (steps {of[0]} and {of[-1]})" for group, of in split[:8])
        raise ValueError(
            f"prompt_mean: {trainer} trains the samples of {len(split)} prompt groups in several optimizer steps of this "
            f"rollout: {named}. A prompt mean is of whole groups: make --global-batch-size a multiple of "
            "--n-samples-per-prompt, and keep the samples of a group together in the order of the rollout"
        )


def _refuse_different_prompts(steps: Sequence[Sequence[BareSample]], trainer: str) -> None:
    """Refuse groups of different prompts, if each rollout of the group is one sample: such groups are wrong."""
    for samples in steps:
        groups: dict[int | None, list[BareSample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_index, []).append(sample)
        for group, members in groups.items():
            first, is_plain = members[0], len({m.rollout_id for m in members}) == len(members)
            other = next((m for m in members if m.prompt_hash != first.prompt_hash), None)
            if is_plain and other is not None:
                raise ValueError(
                    f"prompt_mean: {first.name} and {other.name} of prompt group {group} have different prompts. In {trainer} "
                    "the group is read as the docs say (docs/migrating.md); number samples and groups as its data source "
                    "does, or, where the environment varies the prompt, set allow_different_prompts_in_group: true in "
                    "--custom-config-path"
                )
