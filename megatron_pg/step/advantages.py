"""Advantages of a step's samples from their rewards, and masking of overlong samples.

Per prompt group of n rollouts, each with one reward, in float64, on the host:

    grpo       (reward - mean) / (std + 1e-6), std with n - 1          arXiv:2402.03300 sec. 4.1.2
    dr_grpo    reward - mean                                           arXiv:2503.20783
    rloo       reward - mean of the other n - 1                        arXiv:2402.14740
    maxrl      (reward - mean) / (mean + 1e-6), rewards >= 0           arXiv:2602.02710
    step_rloo  reward - mean of all other rollouts in the step         arXiv:2402.14740,
                                                                       the step as one group
    reward     reward, to be whitened over the step (REINFORCE++)      arXiv:2501.03262

With several rewards, GDPO (arXiv:2601.05242) adds the advantages.

A rollout of several samples counts once, and all its samples get its advantage. A group with one
rollout has no baseline, and a group with equal rewards no preference. Both get advantages of
exactly 0 (except under `reward` and `step_rloo`) and train only through KL and entropy terms, so
they are reported.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_pg.step.counts import BareSample, StepCounts
from megatron_pg.step.ids import check_ids
from megatron_pg.step.sample import Sample, checked_integer
from megatron_pg.step.values import has_integers, hash_of_tokens, host_tensor, refuse_values

EPSILON = 1e-6
"""Added to a group's standard deviation or mean, as is common. Rewards are of order 1."""

OF_PROMPT_GROUPS = ("grpo", "dr_grpo", "rloo", "maxrl")
"""Methods with the prompt group as baseline. A step must contain whole groups."""
METHODS = (*OF_PROMPT_GROUPS, "step_rloo", "reward")


def half_of_dr_grpo(method: str, loss_aggregation: str) -> str:
    """Return a remark on settings with one half of Dr.GRPO (advantages `dr_grpo`, aggregation
    `constant`), or "" with both or neither.
    """
    if method == "grpo" and loss_aggregation == "constant":
        return (
            "--loss-aggregation constant is one half of Dr.GRPO (arXiv:2503.20783), but the "
            "advantages are grpo's, divided by the standard deviation. Use --advantage dr_grpo for "
            "the other half."
        )
    if method == "dr_grpo" and loss_aggregation != "constant":
        return (
            "--advantage dr_grpo is one half of Dr.GRPO (arXiv:2503.20783), but the loss is "
            f"{loss_aggregation}. Use --loss-aggregation constant with --loss-aggregation-divisor "
            "for the other half."
        )
    return ""


@dataclass(frozen=True, eq=False)
class GroupAdvantages:
    """Advantages of a step's samples, and the prompt groups without any."""

    advantages: Tensor
    """The advantages [samples] float32, in the order of the rewards."""
    num_groups: int
    zero_advantage_groups: tuple[int, ...]
    """Sorted group indices of groups with only zero advantages."""

    @property
    def zero_advantage_fraction(self) -> float:
        """Fraction of groups with only zero advantages, 0 for a step without groups."""
        return len(self.zero_advantage_groups) / max(self.num_groups, 1)


def group_advantages(
    rewards: Sequence[float] | Tensor,
    group_indices: Sequence[int] | Tensor,
    *,
    method: str = "grpo",
    prompts: Sequence[Sequence[int] | Tensor] | None = None,
    rollout_ids: Sequence[int | None] | Tensor | None = None,
) -> GroupAdvantages:
    """Compare every rollout's reward with its prompt group, or with the step (`step_rloo`).

    If data-parallel ranks share a prompt group, gather the rewards of all its samples first.
    `step_rloo` needs the rewards of the whole step. `megatron_pg.rollout_files` has
    `with_group_advantages`, which gathers the rewards of samples.

    Args:
        rewards: [samples] finite numbers.
        group_indices: [samples], any int64: samples with the same prompt share it.
        method: one of `METHODS`.
        prompts: [samples] token ids of each prompt. Different prompts in a group are an error. Pass
            None if the environment varies the prompt within a group, or if the ids are known to be
            unique.
        rollout_ids: [samples], any int64: samples of one rollout share it and have the same reward.
            A sample without an id is a rollout. None: every sample is a rollout.

    Returns:
        The `advantages` [samples] float32, and the groups with only zero advantages.

    Raises:
        ValueError: sizes differ, a group has different prompts, a rollout has different rewards or
            groups, a reward is not finite, or below 0 under `maxrl`, advantages exceed float32, ids
            are not integers, or the method is unknown.
    """
    reward, group_index = _checked(rewards, group_indices)
    is_counted = torch.ones_like(reward, dtype=torch.bool)
    if prompts is not None or rollout_ids is not None:
        counts = _counts(group_index.tolist(), prompts, rollout_ids)
        check_ids(counts, allow_different_prompts=prompts is None)
        check_rewards(counts, reward.numpy())
        is_counted = torch.from_numpy(counts.is_first_of_rollout)
    return advantages_of_rollouts(reward, group_index, is_counted, method)


def multi_reward_advantages(
    rewards: Mapping[str, Sequence[float] | Tensor],
    group_indices: Sequence[int] | Tensor,
    *,
    weights: Mapping[str, float] | None = None,
    method: str = "grpo",
    normalize: bool = True,
    prompts: Sequence[Sequence[int] | Tensor] | None = None,
    rollout_ids: Sequence[int | None] | Tensor | None = None,
) -> GroupAdvantages:
    """Compare rollouts by several rewards: normalize each within its prompt group, then add them.

    GDPO (arXiv:2601.05242): the advantages of each reward (see `group_advantages`) are weighted and
    added. The sum is divided by its standard deviation over the step's rollouts (with n - 1, plus
    1e-6). Its mean over the step is 0. Pass the rewards of the whole step, or of whole prompt
    groups with `normalize=False`.

    Args:
        rewards: [samples] finite numbers by the reward's name.
        group_indices: see `group_advantages`, also for `prompts` and `rollout_ids`.
        weights: the weight of each reward by its name. None: 1 for each.
        method: one of `OF_PROMPT_GROUPS`. The paper uses `grpo`.
        normalize: False omits the division. `whiten` can then normalize over tokens, as in verl.

    Returns:
        See `group_advantages`.

    Raises:
        ValueError: as in `group_advantages`, naming the reward, or there is no reward, weights have
            wrong names or are not finite, or the method does not use prompt groups.
    """
    if not rewards:
        raise ValueError("rewards is empty: pass at least one reward by its name")
    weights = dict.fromkeys(rewards, 1.0) if weights is None else weights
    if weights.keys() != rewards.keys() or not all(map(math.isfinite, weights.values())):
        raise ValueError(
            f"weights is {dict(weights)}, expected a finite number for each of {', '.join(rewards)}"
        )
    if method not in OF_PROMPT_GROUPS:
        raise ValueError(
            f"method is {method!r}, expected one of {', '.join(OF_PROMPT_GROUPS)}, which normalize "
            "each reward within its prompt group"
        )
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for name, values in rewards.items():
        try:
            of_reward = group_advantages(
                values, group_indices, method=method, prompts=prompts, rollout_ids=rollout_ids
            )
        except ValueError as error:
            raise ValueError(f"reward {name!r}: {error}") from error
        total = total + weights[name] * of_reward.advantages.double()
    _, group_index = _checked(next(iter(rewards.values())), group_indices)
    if normalize:
        counts = _counts(group_index.tolist(), None, rollout_ids)
        of_rollouts = total[torch.from_numpy(counts.is_first_of_rollout)]
        if len(of_rollouts) > 1:
            total = total / (of_rollouts.std() + EPSILON)
    return _with_groups(total.float(), group_index)


def advantages_of_rollouts(
    reward: Tensor, group_index: Tensor, is_counted: Tensor, method: str
) -> GroupAdvantages:
    """Compute advantages of samples with equal rewards within each rollout.

    Args:
        reward: [samples] float64.
        group_index: [samples] int64.
        is_counted: [samples] bool, True for one sample per rollout.
        method: one of `METHODS`.

    Raises:
        ValueError: see `group_advantages`.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
    problem = ", expected a finite number: otherwise its prompt group has no valid advantages"
    refuse_values("rewards", reward, ~torch.isfinite(reward), problem)
    if method == "maxrl":
        problem = ", expected 0 or more: maxrl divides by the mean reward of a prompt group"
        refuse_values("rewards", reward, reward < 0, problem)
    compared = torch.zeros_like(group_index) if method == "step_rloo" else group_index
    units, group = torch.unique(compared, return_inverse=True)

    def group_sum(values: Tensor) -> Tensor:
        """Sum values [samples] over the rollouts of each group, [groups]."""
        counted = torch.where(is_counted, values, 0.0)
        return torch.zeros_like(units, dtype=torch.float64).index_add_(0, group, counted)

    size = group_sum(torch.ones_like(reward))[group]
    mean = group_sum(reward)[group] / size
    centered = reward - mean
    # Compare the rewards, because their mean rounds and leaves a residue that would be normalized.
    one_of_group = torch.zeros_like(units, dtype=torch.float64).scatter_(0, group, reward)
    is_equal = group_sum((reward != one_of_group[group]).double()) == 0
    if method == "grpo":
        variance = group_sum(centered.square())[group] / (size - 1).clamp(min=1)
        # An infinite variance would turn advantages into zeros.
        std = torch.where(variance.isinf(), torch.nan, variance.sqrt())
        advantages = centered / (std + EPSILON)
    elif method == "maxrl":
        advantages = centered / (mean + EPSILON)
    elif method in ("rloo", "step_rloo"):
        advantages = centered * size / (size - 1).clamp(min=1)
    else:
        advantages = reward if method == "reward" else centered
    if method != "reward":
        advantages = torch.where(is_equal[group], 0.0, advantages)
    advantages = advantages.float()
    beyond_range = (~torch.isfinite(advantages)).nonzero()
    if beyond_range.numel():
        at = int(beyond_range[0])
        raise ValueError(
            f"rewards[{at}] is {float(reward[at])}, too far from the rest of prompt group "
            f"{int(group_index[at])} for an advantage in float32. Scale rewards to order 1."
        )
    return _with_groups(advantages, group_index)


def _with_groups(advantages: Tensor, group_index: Tensor) -> GroupAdvantages:
    """Add the prompt groups with only zero advantages [samples]."""
    groups, prompt = torch.unique(group_index, return_inverse=True)
    num_others = torch.zeros_like(groups).index_add_(0, prompt, (advantages != 0).long())
    return GroupAdvantages(
        advantages=advantages,
        num_groups=groups.numel(),
        zero_advantage_groups=tuple(groups[num_others == 0].tolist()),
    )


def filter_overlong(samples: Sequence[Sample], is_overlong: Sequence[bool]) -> list[Sample]:
    """Mask every token of the samples truncated at the length limit (DAPO, arXiv:2503.14476).

    Call it after the advantages, so that the rewards stay in their group's baseline. A masked
    sample does not count in the sum and in T. It counts in N and P, so that the scale does not
    depend on the number of masked samples.

    Raises:
        ValueError: the numbers of flags and samples differ.
    """
    if len(samples) != len(is_overlong):
        raise ValueError(
            f"is_overlong has {len(is_overlong)} flags for {len(samples)} samples: pass one each"
        )
    return [
        dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))
        if overlong
        else sample
        for sample, overlong in zip(samples, is_overlong, strict=True)
    ]


def check_rewards(counts: StepCounts, rewards: NDArray[np.float64]) -> None:
    """Raise a ValueError that names two samples of a rollout with different rewards [samples].

    All ranks that the counts were gathered from must call it.
    """
    of_rollout = rewards[counts.first_of_rollout]
    # Not !=, because NaN differs from itself. It is an error elsewhere.
    wrong = np.flatnonzero((rewards < of_rollout) | (rewards > of_rollout))
    if wrong.size:
        index = int(wrong[0])
        first, other = counts.places([int(counts.first_of_rollout[index]), index])
        raise ValueError(
            f"rollout_id {first.ids.rollout_id} has the rewards {float(of_rollout[index])} "
            f"({first.ids.name}) and {float(rewards[index])} ({other.ids.name}). Give all samples "
            "of a rollout the same reward, or each its own rollout_id."
        )


def _counts(
    group_indices: Sequence[int],
    prompts: Sequence[Sequence[int] | Tensor] | None,
    rollout_ids: Sequence[int | None] | Tensor | None,
) -> StepCounts:
    """Count samples, with the positions of their rewards as names."""
    hashes: list[int | None] = [None] * len(group_indices)
    if prompts is not None:
        hashes = [hash_of_tokens(host_tensor(prompt).to(torch.int64)) for prompt in prompts]
    rollouts = [None] * len(group_indices) if rollout_ids is None else list(rollout_ids)
    for name, column in (("prompts", hashes), ("rollout_ids", rollouts)):
        if len(column) != len(group_indices):
            raise ValueError(
                f"{len(column)} {name} for {len(group_indices)} rewards: pass one for each sample"
            )
    samples = []
    for n, (group, rollout, prompt) in enumerate(zip(group_indices, rollouts, hashes, strict=True)):
        known = None if rollout is None else checked_integer(f"rollout_ids[{n}]", rollout)
        samples.append(BareSample(0, group, known, f"rewards[{n}]", prompt, "of those passed"))
    return StepCounts.of([samples])


def _checked(
    rewards: Sequence[float] | Tensor, group_indices: Sequence[int] | Tensor
) -> tuple[Tensor, Tensor]:
    reward = torch.as_tensor(rewards, dtype=torch.float64, device="cpu")
    ids = torch.as_tensor(group_indices, device="cpu")
    # An absent float id is NaN, and all absent ids would be one group.
    if ids.numel() and not has_integers(ids):
        raise ValueError(
            f"group_indices has dtype {ids.dtype}, expected integers. A column with gaps is read "
            "as float: remove the rows without a prompt group."
        )
    if reward.dim() != 1 or reward.shape != ids.shape:
        raise ValueError(
            f"rewards has shape {list(reward.shape)} and group_indices {list(ids.shape)}, expected "
            "one number each per sample"
        )
    return reward, ids.to(torch.int64)
