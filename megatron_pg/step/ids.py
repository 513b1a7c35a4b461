"""The rule of `group_index` and `rollout_id` in a step, and ids that are made distinct on purpose.

Ids are unique over all data-parallel ranks and files of the step. Ranks or files that each number from 0 would merge prompts
and rollouts that have nothing to do with each other. Two facts reveal such ids: rollouts of one prompt group share a prompt,
and the samples of one rollout come from one rank or one file.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn, TypeVar

from megatron_pg.step.sample import Sample, checked_integer

AnyWholeSample = TypeVar("AnyWholeSample", bound=Sample)

NUM_IDS = 2**40
"""Ids from 0 below this can be made distinct: they become `number * NUM_IDS + id`."""


class BareSample(NamedTuple):
    """The counts and ids of a sample by the names of `Sample`, without its tokens.

    A data-parallel rank tells the others a `BareSample` of each of its samples. Without an identity, as for a row of a matrix,
    it cannot be told from another: the checksum of such a step is of weights alone.
    """

    num_active_tokens: int
    group_index: int | None = None
    rollout_id: int | None = None
    name: str = "sample"
    prompt_hash: int | None = None
    id_source: str | None = None
    loss_weight: float | None = None
    identity: int | None = None
    hashed_fields: tuple[str, ...] = ()
    active_coefficients: float | None = None


CountedSample = Sample | BareSample
"""A sample as far as the totals of a step and the aggregations read it."""


class _Place(NamedTuple):
    """One sample of the step, and where it is."""

    rank: int
    number: int
    ids: CountedSample

    @property
    def source(self) -> str | int:
        return self.rank if self.ids.id_source is None else self.ids.id_source

    def __str__(self) -> str:
        where = self.ids.id_source or f"number {self.number} of data-parallel rank {self.rank}"
        return f"{self.ids.name} ({where})"


Groups = dict[int, list[list[_Place]]]
"""The rollouts of each prompt group, each with its samples."""


def check_ids(
    everyone: Sequence[Sequence[CountedSample]],
    *,
    allow_different_prompts: bool = False,
    samples_per_group: int | None = None,
) -> Groups:
    """Refuse ids that stand for two things in a step, by data-parallel rank, and return the rollouts of each prompt group.

    Raises:
        ValueError: a rollout of several prompt groups, or of several ranks or files, or of several prompts with neither a
            group nor a source; a prompt group of which two rollouts have no prompt in common. Both samples are named. A prompt
            group of another size, or a sample of none.
    """
    rollouts: dict[object, list[_Place]] = {}
    for rank, samples in enumerate(everyone):
        for number, ids in enumerate(samples):
            key = (rank, number) if ids.rollout_id is None else ids.rollout_id
            rollouts.setdefault(key, []).append(_Place(rank, number, ids))
    groups: Groups = {}
    for members in rollouts.values():
        if len(members) > 1:
            _check_rollout(members, allow_different_prompts)
        if (group := members[0].ids.group_index) is not None:
            groups.setdefault(group, []).append(members)
    if not allow_different_prompts:
        for group_rollouts in groups.values():
            _check_prompts(group_rollouts)
    if samples_per_group is not None:
        _check_sizes(rollouts.values(), groups, samples_per_group)
    return groups


def odd_group(groups: Groups) -> str:
    """Name a prompt group with another number of rollouts than most; "" where all have as many."""
    sizes = Counter(map(len, groups.values()))
    if len(sizes) < 2:
        return ""
    usual = max(sizes, key=lambda size: (sizes[size], size))
    odd, rollouts = next(item for item in groups.items() if len(item[1]) != usual)
    others = len(groups) - sizes[usual] - 1
    more = f"; {others} more differ" if others else ""
    return (
        f"prompt group {odd} has {len(rollouts)} rollouts in the step (the first is {rollouts[0][0].ids.name}) and most "
        f"groups have {usual}{more}"
    )


def _check_rollout(members: Sequence[_Place], allow_different_prompts: bool) -> None:
    first, ids = members[0], members[0].ids
    may_differ = allow_different_prompts or ids.group_index is not None or ids.id_source is not None
    for other in members:
        if other.ids.group_index != ids.group_index:
            raise ValueError(
                f"rollout_id {ids.rollout_id} has samples of group_index {ids.group_index} and {other.ids.group_index}: a "
                f"rollout answers one prompt; they are {first} and {other}"
            )
        if other.source != first.source:
            exception = "where one rollout does lie on both, say so with the same Sample(id_source=...) on its samples"
            _refuse("rollout_id", first, other, "where each numbers its own", exception)
        prompts = {ids.prompt_hash, other.ids.prompt_hash}
        if not (may_differ or None in prompts or len(prompts) == 1):
            raise ValueError(
                f"rollout_id {ids.rollout_id} is given to {first} and to {other}, whose prompts have different tokens, "
                "and no group_index or id_source says that they are of one rollout: give every rollout an id of its own; "
                "where it is one, give its samples their group_index, or the same Sample(id_source=...)"
            )


def _check_sizes(
    rollouts: Iterable[Sequence[_Place]], groups: Groups, samples_per_group: int
) -> None:
    """Refuse a rollout without a prompt group, and a group of another size."""
    expected = f"samples_per_group is {samples_per_group}"
    if checked_integer("samples_per_group", samples_per_group) < 1:
        raise ValueError(f"{expected}: expected 1 or more")
    for members in rollouts:
        if members[0].ids.group_index is None:
            raise ValueError(
                f"{members[0]} has no group_index and {expected}: give every sample the id of its prompt group"
            )
    wrong = [group for group, members in groups.items() if len(members) != samples_per_group]
    if wrong:
        first, more = groups[wrong[0]], f"; {len(wrong) - 1} more differ" if wrong[1:] else ""
        raise ValueError(
            f"{expected} and prompt group {wrong[0]} has {len(first)} (the first is {first[0][0]}){more}: a step holds "
            "whole groups, as the prompt mean has no denominator for a part of one; end the step between groups "
            "(--keep-prompt-groups), or pass no samples_per_group where groups differ in size"
        )


def _check_prompts(rollouts: Sequence[Sequence[_Place]]) -> None:
    """Refuse a prompt group whose rollouts have no prompt in common."""
    common: set[int | None] | None = None
    for members in rollouts:
        prompts = {place.ids.prompt_hash for place in members}
        if None in prompts:
            continue
        if common is None:
            first, common = members[0], prompts
        common &= prompts
        if not common:
            flag = "--allow-different-prompts-in-group"
            exception = (
                f"where the environment varies the prompt within a group, say so with {flag}"
            )
            problem = "whose prompts have different tokens"
            _refuse("group_index", first, members[0], problem, exception)


def _refuse(field: str, first: _Place, other: _Place, problem: str, exception: str) -> NoReturn:
    """Raise the error for two samples that share an id and are not of one thing."""
    flag = "--distinct-ids, which makes those of ranks or of files distinct"
    if first.source != other.source:
        by_file = isinstance(first.source, str) and isinstance(other.source, str)
        flag = f"--distinct-ids {'file' if by_file else 'rank'}"
    raise ValueError(
        f"{field} {getattr(first.ids, field)} is given to {first} and to {other}, {problem}: an id is its own over all "
        f"data-parallel ranks and files of the step. Number them over all of these, or give {flag}; {exception}"
    )


def with_distinct_ids(sample: AnyWholeSample, number: int) -> AnyWholeSample:
    """Give the sample ids that no rank (or file) of another number has, where each numbers its groups and rollouts from 0.

    Call it for every sample with its data-parallel rank, before samples are collected or counted, as `--distinct-ids rank`
    does. No communication.

    Raises:
        ValueError: an id below 0 or from 2^40 on, or a number from 2^23 on, naming the sample.
    """
    distinct = copy.copy(sample)
    for field in ("group_index", "rollout_id"):
        if (identifier := getattr(sample, field)) is None:
            continue
        if not 0 <= identifier < NUM_IDS or not 0 <= number < 2**63 // NUM_IDS:
            raise ValueError(
                f"{sample.name}: {field} is {identifier}, expected 0 or more and below 2^40: --distinct-ids rank and "
                "--distinct-ids file make ids distinct that count up from 0; drop the flag where they are already"
            )
        vars(distinct)[field] = number * NUM_IDS + identifier
    return distinct
