"""``--docs-per-step``: pulls samples until a step holds enough documents, decided alike on every data-parallel rank.

A document is what N counts: a rollout, be it one sample or several with the same ``rollout_id``. A rollout is never cut
by a step boundary, a prompt group only where that is harmless. Which of them are whole is known from their order: the
samples of one follow each other in every rank's share of the stream, so one that a rank has moved on from is complete
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch.distributed as dist

from megatron_pg.config.planning import MODES
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sources import SampleSource
from megatron_pg.step.totals import AnySample, CountedSample

Key = tuple[str, int]
"""What is kept in one piece: ("prompt group", group_index), ("rollout", rollout_id) or ("sample", sequence)."""


class _Record(NamedTuple):
    """What every rank knows of a pulled sample that is in no step yet."""

    sequence: int
    """Its place in the order of the stream over all ranks."""
    rank: int
    """The data-parallel rank that holds it."""
    group_index: int | None
    rollout_id: int | None

    @property
    def document(self) -> Key:
        return (
            ("sample", self.sequence) if self.rollout_id is None else ("rollout", self.rollout_id)
        )


@dataclass(frozen=True, eq=False)
class StepSamples(Generic[AnySample]):
    """The samples of one step."""

    samples: tuple[AnySample, ...]
    """This rank's, in the order of the stream."""
    num_documents: int
    """The count that was achieved, over all data-parallel ranks; N of the step."""
    num_skipped: int
    """Slots without a sample (bad rows) that were passed since the last step, over all data-parallel ranks."""


@dataclass(frozen=True, eq=False)
class CollectorState(Generic[AnySample]):
    """What a checkpoint keeps of one rank's :class:`StepCollector`; picklable."""

    source_position: Any
    num_slots: int
    """Slots pulled so far, over all ranks."""
    carried: tuple[tuple[int, AnySample], ...]
    """This rank's samples that were pulled and are in no step yet, each with its place in the stream."""
    latest: dict[int, Key]
    finished: frozenset[Key]
    num_skipped: int


class StepCollector(Generic[AnySample]):
    """Collects the samples of one step after the other from a stream that is shared out over data-parallel ranks.

    Every data-parallel rank builds one with the same settings and calls :meth:`collect` for every step. Ranks agree by
    one exchange for every window of samples that they pull, most often one or two a step. In ``exact`` mode a source
    that can be resharded gives the same steps at every data-parallel size.

    Args:
        source: this rank's share of the stream. Samples of one rollout, and of one prompt group where groups are kept
            whole or must not be cut, follow each other in it.
        docs_per_step: n, over all data-parallel ranks.
        mode: ``at_least`` keeps what the last window brought beyond n in the step; ``exact`` carries it into the next,
            so that every step but the last holds n.
        keep_prompt_groups: steps end between prompt groups. A step then holds at least n, and less than one group
            beyond n in ``exact`` mode.
        refuse_cut_groups: a step that would end inside a prompt group is an error: ``prompt_mean`` has no denominator
            for a part of a group.
        data_parallel_group: the data-parallel group *without* context parallelism; None is this rank alone.

    Raises:
        ValueError: ``docs_per_step`` below 1 or an unknown mode.
    """

    def __init__(
        self,
        source: SampleSource[AnySample],
        *,
        docs_per_step: int,
        mode: str = "at_least",
        keep_prompt_groups: bool = False,
        refuse_cut_groups: bool = False,
        data_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        if docs_per_step < 1:
            raise ValueError(f"--docs-per-step is {docs_per_step}: expected 1 or more")
        if mode not in MODES:
            raise ValueError(
                f"--docs-per-step-mode is {mode!r}: expected one of {', '.join(MODES)}"
            )
        self._source = source
        self._docs_per_step = docs_per_step
        self._is_exact = mode == "exact"
        self._keeps_groups = keep_prompt_groups
        self._minds_groups = keep_prompt_groups or refuse_cut_groups
        self._group = data_parallel_group
        self._rank = 0 if data_parallel_group is None else dist.get_rank(data_parallel_group)
        self._size = 1 if data_parallel_group is None else dist.get_world_size(data_parallel_group)
        self._held: dict[int, AnySample] = {}
        self._pending: list[_Record] = []
        self._latest: dict[
            int, Key
        ] = {}  # by rank: what its last sample is part of, which may go on; below 0 of ranks of another size
        self._finished: frozenset[Key] = frozenset()  # what the last step has taken
        self._num_slots = 0
        self._num_skipped = 0
        self._is_exhausted = False

    def collect(self) -> StepSamples[AnySample] | None:
        """The samples of the next step; the last one may hold fewer documents, and None says that none are left.

        Every data-parallel rank must call it.

        Raises:
            ValueError: a prompt group or rollout is cut by the end of the step, a sample lacks the ``group_index``
                that the settings need, or the source raised one; on all ranks alike.
            RuntimeError: the source of another rank raised an error that is no ValueError; that rank raises it as it is.
        """
        while (chosen := self._choose()) is None:
            self._pull_window()
        if not chosen:
            return None
        return self._take(chosen)

    def state(self) -> CollectorState[AnySample]:
        """This rank's state between two steps. A checkpoint keeps those of all data-parallel ranks."""
        return CollectorState(
            source_position=self._source.position,
            num_slots=self._num_slots,
            carried=tuple(sorted(self._held.items(), key=lambda item: item[0])),
            latest=dict(self._latest),
            finished=self._finished,
            num_skipped=self._num_skipped,
        )

    def load_states(self, states: Sequence[CollectorState[AnySample]]) -> None:
        """Continues where the states of a checkpoint left off, on any number of ranks that the source allows.

        Every data-parallel rank must call it: a source that cannot go on ends all of them.

        Args:
            states: those of all data-parallel ranks of the run that wrote the checkpoint, in rank order.

        Raises:
            ValueError: another number of ranks, and a source whose positions belong to one number of ranks; or the
                source refuses its position, on this rank or another.
        """
        is_same_size = len(states) == self._size
        if not is_same_size and not self._source.can_reshard:
            raise ValueError(
                f"the checkpoint is of {len(states)} data-parallel ranks and this run has {self._size}: each rank's "
                "source has its own position, so resume with the same number"
            )
        mine = states[self._rank if is_same_size else 0]
        compute_and_gather(
            lambda: self._source.seek(mine.source_position), lambda _: None, self._group
        )
        carried = [
            (sequence, rank, sample)
            for rank, state in enumerate(states)
            for sequence, sample in state.carried
        ]
        carried.sort(key=lambda item: item[0])
        if not is_same_size:
            carried = [
                (sequence, index % self._size, sample)
                for index, (sequence, _, sample) in enumerate(carried)
            ]
        self._held = {seq: sample for seq, rank, sample in carried if rank == self._rank}
        self._pending = [
            _Record(sequence, rank, sample.group_index, sample.rollout_id)
            for sequence, rank, sample in carried
        ]
        # At another size no rank has a latest sample yet; until one does, all that was open stays so.
        self._latest = (
            dict(mine.latest)
            if is_same_size
            else {-1 - index: key for index, key in enumerate(mine.latest.values())}
        )
        self._finished = mine.finished
        self._num_slots, self._num_skipped = mine.num_slots, mine.num_skipped
        self._is_exhausted = False

    def _boundary(self, record: _Record) -> Key | None:
        """What of the sample's must not be cut by the end of a step; None for a sample that stands alone."""
        if self._minds_groups and record.group_index is not None:
            return ("prompt group", record.group_index)
        return None if record.rollout_id is None else ("rollout", record.rollout_id)

    def _units(self) -> dict[Key, list[_Record]]:
        """The pending samples in pieces that a step takes whole, in the order of their first samples."""
        units: dict[Key, list[_Record]] = {}
        for record in self._pending:
            key = record.document
            if self._keeps_groups and record.group_index is not None:
                key = ("prompt group", record.group_index)
            units.setdefault(key, []).append(record)
        return units

    def _choose(self) -> list[_Record] | None:
        """The samples of the next step, none at the end of the stream; None while more have to be pulled."""
        may_go_on = set(self._latest.values())
        chosen: list[_Record] = []
        num_documents = 0
        for unit in self._units().values():
            if any(self._boundary(record) in may_go_on for record in unit):
                if self._is_exact:
                    break  # what comes after it is not to overtake it
                continue
            if self._is_exact and num_documents >= self._docs_per_step:
                break
            chosen += unit
            num_documents += _num_documents(unit)
        if num_documents < self._docs_per_step and not self._is_exhausted:
            return None
        return chosen

    def _take(self, chosen: list[_Record]) -> StepSamples[AnySample]:
        sequences = {record.sequence for record in chosen}
        left = [record for record in self._pending if record.sequence not in sequences]
        boundaries = {self._boundary(record) for record in chosen} - {None}
        for record in left:
            if self._boundary(record) in boundaries:
                raise ValueError(self._cut_message(record))
        self._pending = left
        self._finished = frozenset(key for key in boundaries if key is not None)
        num_skipped, self._num_skipped = self._num_skipped, 0
        return StepSamples(
            samples=tuple(
                self._held.pop(record.sequence)
                for record in sorted(chosen)
                if record.rank == self._rank
            ),
            num_documents=_num_documents(chosen),
            num_skipped=num_skipped,
        )

    def _cut_message(self, record: _Record) -> str:
        """`record` is left for a later step while others of its group or rollout are in one."""
        kind, identifier = self._boundary(record) or record.document
        if kind == "rollout":
            return (
                f"rollout_id {identifier} is cut by the end of a step: let its samples follow each other in the "
                "stream, and give every rollout an id of its own"
            )
        return (
            f"prompt group {identifier} (group_index) is cut by the end of a step at --docs-per-step "
            f"{self._docs_per_step}: the prompt mean has no denominator for a part of a group. Let the samples of a "
            "group follow each other in the stream, give every group a group_index of its own, and end steps between "
            "groups with --keep-prompt-groups"
        )

    def _pull_window(self) -> None:
        """Asks every rank for the same number of slots, and tells everyone what they hold. One exchange."""
        count = self._window_size()
        slots, everyone = compute_and_gather(
            lambda: self._checked(self._source.pull(count)), _describe, self._group
        )
        first = self._num_slots
        records = []
        for rank, described in enumerate(everyone):
            for index, ids in enumerate(described):
                if ids is not None:
                    records.append(_Record(first + index * self._size + rank, rank, *ids))
        for record in records:
            if self._boundary(record) in self._finished:
                raise ValueError(self._cut_message(record))
        self._pending += sorted(records)
        self._held |= {
            first + index * self._size + self._rank: sample
            for index, sample in enumerate(slots)
            if sample is not None
        }
        self._num_slots += count * self._size
        self._num_skipped += sum(ids is None for described in everyone for ids in described)
        self._is_exhausted = all(len(described) < count for described in everyone)
        self._note_latest(records, [len(described) < count for described in everyone])

    def _note_latest(self, records: Sequence[_Record], is_at_end: Sequence[bool]) -> None:
        # A window of bad rows alone says nothing of what was open at another size.
        if records or all(is_at_end):
            self._latest = {rank: key for rank, key in self._latest.items() if rank >= 0}
        for record in records:
            boundary = self._boundary(record)
            self._latest.pop(record.rank, None)
            if boundary is not None:
                self._latest[record.rank] = boundary
        for rank in range(self._size):
            if is_at_end[rank]:
                self._latest.pop(rank, None)

    def _window_size(self) -> int:
        """Slots to ask of every rank: what is missing, by the samples per document of those at hand."""
        units = self._units()
        num_documents = sum(_num_documents(unit) for unit in units.values())
        missing = self._docs_per_step - num_documents
        if missing > 0:
            num_slots = missing * max(len(self._pending), 1) / max(num_documents, 1)
        else:  # enough are here, and one of them may go on
            num_slots = len(self._pending) / len(units)
        return max(-(-int(num_slots) // self._size), 1)

    def _checked(self, slots: list[AnySample | None]) -> list[AnySample | None]:
        for sample in slots:
            if self._minds_groups and sample is not None and sample.group_index is None:
                raise ValueError(
                    f"{sample.name} has no group_index: --loss-aggregation prompt_mean and --keep-prompt-groups need "
                    "one on every sample"
                )
        return slots


def _num_documents(records: Sequence[_Record]) -> int:
    return len({record.document for record in records})


def _describe(
    slots: Sequence[CountedSample | None],
) -> list[tuple[int | None, int | None] | None]:
    return [None if sample is None else (sample.group_index, sample.rollout_id) for sample in slots]
