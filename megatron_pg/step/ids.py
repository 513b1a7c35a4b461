"""Checks of `group_index` and `rollout_id` in a step, and ids that are made distinct.

Ids must be unique over all data-parallel ranks and files of the step. If ranks or files each number
from 0, unrelated prompts and rollouts would merge. Two rules detect this: rollouts in a prompt
group share a prompt, and samples of a rollout come from one rank or file.
"""

import copy
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_pg.step.counts import CountedSample, Indices, Place, StepCounts
from megatron_pg.step.sample import Sample, checked_integer

AnyWholeSample = TypeVar("AnyWholeSample", bound=Sample)

NUM_IDS = 2**40
"""Ids in [0, NUM_IDS) can be made distinct: they become `number * NUM_IDS + id`."""


class Groups(NamedTuple):
    """Prompt groups of a step in the order of their first samples, each [groups] int64."""

    first: Indices
    """The first sample of each group, as an index into `StepCounts`."""
    sizes: Indices
    """The number of rollouts in each group."""


def check_ids(
    everyone: StepCounts | Sequence[Sequence[CountedSample]],
    *,
    allow_different_prompts: bool = False,
    samples_per_group: int | None = None,
) -> Groups:
    """Check that ids are unique in a step, and return its prompt groups.

    All ranks that the counts were gathered from must call it, because errors fetch the names of
    samples on other ranks.

    Raises:
        ValueError: a rollout has several prompt groups, several ranks or files, or several prompts
            with neither a group nor a source, or two rollouts in a prompt group share no prompt.
            The message names both samples. Also if a prompt group does not have `samples_per_group`
            rollouts, or a sample has no group.
    """
    counts = everyone if isinstance(everyone, StepCounts) else StepCounts.of(everyone)
    _check_rollouts(counts, allow_different_prompts)
    is_first = counts.is_first_of_rollout
    has_group = counts.has("group_index")
    first, sizes = np.unique(counts.first_of_group[is_first & has_group], return_counts=True)
    groups = Groups(first, sizes)
    if not allow_different_prompts:
        _check_prompts(counts)
    if samples_per_group is not None:
        _check_sizes(counts, np.flatnonzero(is_first & ~has_group), groups, samples_per_group)
    return groups


def odd_group(counts: StepCounts, groups: Groups) -> str:
    """Describe a prompt group with an unusual number of rollouts, or return "" if all are equal.
    All ranks call it.
    """
    if not groups.sizes.size or (groups.sizes == groups.sizes[0]).all():
        return ""
    numbers = np.bincount(groups.sizes)
    usual = len(numbers) - 1 - int(np.argmax(numbers[::-1]))
    odd = np.flatnonzero(groups.sizes != usual)
    others = len(odd) - 1
    more = f". {others} more differ" if others else ""
    (first,) = counts.places([int(groups.first[odd[0]])])
    return (
        f"prompt group {first.ids.group_index} has {groups.sizes[odd[0]]} rollouts in the step "
        f"(the first is {first}) and most groups have {usual}{more}"
    )


def _check_rollouts(counts: StepCounts, allow_different_prompts: bool) -> None:
    """Raise a ValueError if a sample cannot belong to the rollout of its id."""
    rows, first = counts.rows, counts.first_of_rollout
    source = np.where(counts.has("id_source"), rows["id_source"], counts.ranks.astype(np.uint64))
    has_prompt, has_group = counts.has("prompt_hash"), counts.has("group_index")
    may_differ = has_group | counts.has("id_source") | allow_different_prompts
    of_other_group = _differs(rows["group_index"], first) | _differs(has_group, first)
    of_other_source = _differs(source, first) | _differs(counts.has("id_source"), first)
    of_other_prompt = _differs(rows["prompt_hash"], first) & has_prompt & has_prompt[first]
    of_other_prompt &= ~may_differ[first]
    wrong = np.flatnonzero(of_other_group | of_other_source | of_other_prompt)
    if not wrong.size:
        return
    # Report the rollout that begins first.
    index = int(wrong[np.argmin(first[wrong])])
    one, other = counts.places([int(first[index]), index])
    if of_other_group[index]:
        raise ValueError(
            f"rollout_id {one.ids.rollout_id} has samples of group_index {one.ids.group_index} and "
            f"{other.ids.group_index}, {one} and {other}. A rollout has one prompt."
        )
    if of_other_source[index]:
        exception = (
            "If one rollout is on both, pass the same Sample(id_source=...) for its samples."
        )
        _refuse("rollout_id", one, other, "which number their own rollouts", exception)
    raise ValueError(
        f"rollout_id {one.ids.rollout_id} is given to {one} and to {other}, whose prompts have "
        "different tokens, without a group_index or id_source. Give every rollout its own id. If "
        "both belong to one rollout, set their group_index or the same Sample(id_source=...)."
    )


def _differs(column: NDArray[Any], first: Indices) -> NDArray[np.bool_]:
    differs: NDArray[np.bool_] = column != column[first]
    return differs


def _check_sizes(
    counts: StepCounts, without_group: Indices, groups: Groups, samples_per_group: int
) -> None:
    """Raise a ValueError if a rollout has no prompt group or a group does not have
    `samples_per_group` rollouts.
    """
    expected = f"samples_per_group is {samples_per_group}"
    if checked_integer("samples_per_group", samples_per_group) < 1:
        raise ValueError(f"{expected}, expected 1 or more")
    if without_group.size:
        (place,) = counts.places([int(without_group[0])])
        raise ValueError(
            f"{place} has no group_index and {expected}. Set every sample's group_index."
        )
    wrong = np.flatnonzero(groups.sizes != samples_per_group)
    if wrong.size:
        more = f". {len(wrong) - 1} more differ" if wrong[1:].size else ""
        (first,) = counts.places([int(groups.first[wrong[0]])])
        raise ValueError(
            f"{expected} and prompt group {first.ids.group_index} has {groups.sizes[wrong[0]]} "
            f"(the first is {first}){more}. samples_per_group counts the rollouts per prompt "
            "group, not the samples. If the end of the step split the group, use "
            "--keep-prompt-groups. If groups differ in size, remove samples_per_group."
        )


def _check_prompts(counts: StepCounts) -> None:
    """Raise a ValueError if a prompt group's rollouts share no prompt. An unknown prompt matches
    any.
    """
    columns = counts.first_of_group, counts.first_of_rollout, counts.rows["prompt_hash"]
    first, rollouts, prompts = columns
    is_known = counts.has("group_index") & ~np.isin(rollouts, rollouts[~counts.has("prompt_hash")])
    has_first_prompt = np.bincount(rollouts, prompts == prompts[first], len(counts)) > 0
    # Collisions remain, and groups whose common prompt is not their first sample's.
    groups = first[is_known & ~has_first_prompt[rollouts]]
    suspects = np.flatnonzero(is_known & np.isin(first, groups))
    prompts_of: dict[int, dict[int, set[int]]] = {}
    for group, rollout, prompt in zip(*(x[suspects].tolist() for x in columns), strict=True):
        prompts_of.setdefault(group, {}).setdefault(rollout, set()).add(prompt)
    for _, members in sorted(prompts_of.items()):
        common = itertools.accumulate(members.values(), operator.and_)
        without = [rollout for rollout, shared in zip(members, common, strict=True) if not shared]
        if without:
            exception = (
                "If a rollout has several samples, give them the same rollout_id. "
                "If the environment varies the prompt within a group, add "
                "--allow-different-prompts-in-group."
            )
            one, other = counts.places([next(iter(members)), without[0]])
            problem = "whose prompts have different tokens"
            _refuse("group_index", one, other, problem, exception)


def _refuse(field: str, first: Place, other: Place, problem: str, exception: str) -> NoReturn:
    """Raise the error for two samples that share an id by mistake."""
    flag = "--distinct-ids rank or file"
    if first.source != other.source:
        by_file = isinstance(first.source, str) and isinstance(other.source, str)
        flag = f"--distinct-ids {'file' if by_file else 'rank'}"
    raise ValueError(
        f"{field} {getattr(first.ids, field)} is given to {first} and to {other}, {problem}. Ids "
        "must be unique over all data-parallel ranks and files of the step. Make them unique or "
        f"add {flag}. {exception}"
    )


def with_distinct_ids(sample: AnyWholeSample, number: int) -> AnyWholeSample:
    """Make the sample's ids distinct between ranks (or files) that number groups and rollouts from
    0. `number` is the rank or the file.

    Call it for every sample with its data-parallel rank, before samples are collected or counted,
    as `--distinct-ids rank` does. No communication.

    Raises:
        ValueError: an id is below 0 or at least 2^40, or the number is at least 2^23. The message
            names the sample.
    """
    distinct = copy.copy(sample)
    for field in ("group_index", "rollout_id"):
        if (identifier := getattr(sample, field)) is None:
            continue
        if not 0 <= identifier < NUM_IDS or not 0 <= number < 2**63 // NUM_IDS:
            raise ValueError(
                f"{sample.name}: {field} is {identifier}, expected 0 or more and below 2^40, "
                "because --distinct-ids rank and --distinct-ids file apply to ids that count up "
                "from 0. Remove the flag if ids are already distinct."
            )
        vars(distinct)[field] = number * NUM_IDS + identifier
    return distinct
