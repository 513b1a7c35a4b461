"""`--docs-per-step`: pulls samples until a step holds enough documents, decided alike on every
data-parallel rank.

N counts documents: a document is a rollout, of one sample or of several with the same `rollout_id`.
The end of a step never cuts a rollout, and a prompt group only where that is harmless. The order of
the stream tells which of them are whole: the samples of one follow each other in every rank's
share, so one that a rank has moved on from is complete there.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol

import torch.distributed as dist

from megatron_pg.config.planning import DocsPerStepMode, PlanningConfig
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.totals import AnySample

Key = tuple[str, int]
"""A thing that stays in one piece: ("prompt group", group_index), ("rollout_id", rollout_id) or
("sample", sequence)."""


def no_sample_in(paths: Sequence[str], num_skipped: int) -> ValueError:
    """Make the error of `--rollout-files` without a good row: a run without a step would look like
    one that went well.
    """
    skipped = f"{num_skipped} bad rows skipped; --on-bad-row error names the first"
    reason = skipped if num_skipped else "no rows"
    return ValueError(f"--rollout-files {' '.join(paths)}: no sample in them ({reason})")


class SampleSource(Protocol[AnySample]):
    """One data-parallel rank's share of a stream of samples, dealt out in slots.

    All ranks are asked for the same number of slots at a time. Slot i of rank r comes, in the order
    of the whole stream, after slot i of rank r - 1 and before slot i + 1 of rank 0.
    """

    @property
    def is_shared(self) -> bool:
        """True if all ranks read one stream and take slots by rank, False if each rank has its own
        stream.
        """

    def seek(self, num_slots: int) -> None:
        """Continue after that many slots: of all ranks if `is_shared`, otherwise of this rank."""

    def pull(self, count: int) -> list[AnySample | None]:
        """Pull the next `count` slots, fewer only at the end of this rank's share; None is a slot
        without a sample.
        """


class _Record(NamedTuple):
    """A pulled sample that is in no step yet, as every rank knows it."""

    sequence: int  # its place in the stream over all ranks
    rank: int
    document: Key  # its rollout, or the sample itself
    unit: Key  # what a step takes whole: its prompt group where groups are kept, or its document
    # what no end of a step may cut: its prompt group where that is asked for, or its document
    boundary: Key
    sample: Any  # on its own rank, None on others


@dataclass(frozen=True, eq=False)
class StepSamples(Generic[AnySample]):
    """The samples of one step."""

    samples: tuple[AnySample, ...]
    """The samples of this rank, in the order of the stream."""
    num_documents: int
    """N of the step, over all data-parallel ranks."""
    num_skipped: int
    """Slots without a sample (bad rows) since the last step, over all data-parallel ranks."""


class CollectorState(NamedTuple):
    """The place of a `StepCollector` in the stream, for a checkpoint: plain values, the same on
    every rank.

    Samples are not in it: a resumed run reads them again.
    """

    start: int
    """The slot to read from, counted over all ranks."""
    num_slots: int
    """Slots pulled so far, over all ranks."""
    carried: tuple[int, ...]
    """The slots from `start` on that were pulled and are in no step yet."""
    finished: tuple[Key, ...]
    """What the last step held, so that a group or rollout that comes back is refused."""
    num_ranks: int


class StepCollector(Generic[AnySample]):
    """Collects the samples of one step after the other from a stream that is shared out over
    data-parallel ranks.

    Every data-parallel rank builds one with the same settings and calls `collect` for every step.
    Ranks agree by one exchange for every window of samples that they pull, most often one or two a
    step. In `exact` mode the steps of a shared source are the same at every data-parallel size.

    Args:
        source: this rank's share of the stream. Samples of one rollout follow each other in it, and
            those of one prompt group where groups are kept whole or must not be cut.
        docs_per_step: n, over all data-parallel ranks.
        mode: `at_least` trains on all samples of the last window; `exact` carries those beyond n
            into the next step, so that every step but the last holds n.
        keep_prompt_groups: end steps between prompt groups. A step then holds at least n, and less
            than one group beyond n in `exact` mode.
        refuse_cut_groups: refuse a step that would end inside a prompt group: `prompt_mean` has no
            denominator for a part of a group.
        data_parallel_group: the data-parallel group *without* context parallelism; None is this
            rank alone.

    Raises:
        ValueError: `docs_per_step` below 1 or an unknown mode.
    """

    def __init__(
        self,
        source: SampleSource[AnySample],
        *,
        docs_per_step: int,
        mode: DocsPerStepMode = "at_least",
        keep_prompt_groups: bool = False,
        refuse_cut_groups: bool = False,
        data_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        # Checks the flags; the collector has no budget.
        PlanningConfig(1, docs_per_step=docs_per_step, docs_per_step_mode=mode)
        self._source, self._docs_per_step, self._is_exact = source, docs_per_step, mode == "exact"
        self._keeps_groups = keep_prompt_groups
        self._minds_groups = keep_prompt_groups or refuse_cut_groups
        self._group = data_parallel_group
        self._rank = 0 if data_parallel_group is None else dist.get_rank(data_parallel_group)
        self._size = 1 if data_parallel_group is None else dist.get_world_size(data_parallel_group)
        self._pending: list[_Record] = []  # in the order of the stream, of all ranks
        # By rank: the boundary of its last sample, which may go on.
        self._latest: dict[int, Key] = {}
        self._finished: frozenset[Key] = frozenset()  # boundaries in the last step
        self._start = self._num_slots = 0
        # Of the slots below, which a run before has pulled, only those that it carried are new.
        self._num_known, self._carried = 0, frozenset[int]()
        self.num_skipped = 0
        """Slots without a sample since the last step, over all ranks."""
        self._is_exhausted = False

    def collect(self) -> StepSamples[AnySample] | None:
        """Collect the samples of the next step, None where none are left. Every data-parallel rank
        must call it.

        The last step may hold fewer documents.

        Raises:
            ValueError: the end of the step cuts a prompt group or rollout, a sample lacks the
                `group_index` that the settings need, or a source raised a ValueError; on all ranks
                alike.
            RuntimeError: the source of another rank raised another error; that rank raises its own.
        """
        while (chosen := self._choose()) is None:
            self._pull_window()
        if not chosen:
            return None
        chosen.sort()
        sequences = {record.sequence for record in chosen}
        left = [record for record in self._pending if record.sequence not in sequences]
        boundaries = frozenset(record.boundary for record in chosen)
        self._refuse_cut(left, boundaries)
        self._pending, self._finished = left, boundaries
        num_skipped, self.num_skipped = self.num_skipped, 0
        return StepSamples(
            samples=tuple(record.sample for record in chosen if record.rank == self._rank),
            num_documents=len({record.document for record in chosen}),
            num_skipped=num_skipped,
        )

    @property
    def carried(self) -> tuple[AnySample, ...]:
        """This rank's samples that were pulled and are in no step yet."""
        return tuple(record.sample for record in self._pending if record.rank == self._rank)

    def state(self) -> CollectorState:
        """Return the place between two steps, the same on every rank."""
        unread = {slot for slot in self._carried if slot >= self._num_slots}
        carried = tuple(sorted(unread.union(record.sequence for record in self._pending)))
        num_slots = max(self._num_slots, self._num_known)
        start = num_slots
        if carried:  # a slot of rank 0
            start = carried[0] - (carried[0] - self._start) % self._size
        finished = tuple(sorted(key for key in self._finished if key[0] != "sample"))
        return CollectorState(start, num_slots, carried, finished, self._size)

    def load_state(self, state: CollectorState) -> None:
        """Continue where a run stopped. Every data-parallel rank must call it.

        Raises:
            ValueError: another number of ranks, whose streams are their own; or a source that
                cannot go on, on this rank or another.
        """
        is_shared = self._source.is_shared
        if not is_shared and state.num_ranks != self._size:
            raise ValueError(
                f"the checkpoint is of {state.num_ranks} data-parallel ranks and this run has "
                f"{self._size}, but each rank has its own stream: resume with the same number"
            )
        place = state.start if is_shared else state.start // self._size
        compute_and_gather(lambda: self._source.seek(place), lambda _: None, self._group)
        self._pending, self._latest, self._finished = [], {}, frozenset(state.finished)
        self._start = self._num_slots = state.start
        self._num_known, self._carried = state.num_slots, frozenset(state.carried)
        self._is_exhausted, self.num_skipped = False, 0

    def _record(self, sequence: int, rank: int, ids: Any, sample: Any) -> _Record:
        group_index, rollout_id = ids
        document = ("sample", sequence) if rollout_id is None else ("rollout_id", rollout_id)
        group = document if group_index is None else ("prompt group", group_index)
        unit = group if self._keeps_groups else document
        boundary = group if self._minds_groups else document
        return _Record(sequence, rank, document, unit, boundary, sample)

    def _choose(self) -> list[_Record] | None:
        """Choose the samples of the next step: none at the end of the stream, None while more have
        to be pulled.
        """
        units: dict[Key, list[_Record]] = {}
        for record in self._pending:
            units.setdefault(record.unit, []).append(record)
        may_go_on = {key for key in self._latest.values() if key[0] != "sample"}
        chosen: list[_Record] = []
        documents: set[Key] = set()
        for unit in units.values():
            is_open = any(record.boundary in may_go_on for record in unit)
            if self._is_exact and (is_open or len(documents) >= self._docs_per_step):
                break  # what comes after an open one is not to overtake it
            if not is_open:
                chosen += unit
                documents.update(record.document for record in unit)
        if len(documents) < self._docs_per_step and not self._is_exhausted:
            return None
        return chosen

    def _refuse_cut(self, left: Sequence[_Record], taken: Collection[Key]) -> None:
        """Refuse a record of a later step whose group or rollout is in an earlier step."""
        for kind, identifier in (record.boundary for record in left if record.boundary in taken):
            is_group = kind == "prompt group"
            column, rule = " (group_index)" if is_group else "", ""
            if is_group and not self._keeps_groups:
                rule = (
                    "; end steps between groups with --keep-prompt-groups: the prompt mean has no "
                    "denominator for a part"
                )
            raise ValueError(
                f"{kind} {identifier}{column} is cut by the end of a step at --docs-per-step "
                f"{self._docs_per_step}: let "
                "its samples follow each other in the stream, give every rollout a rollout_id and "
                "every prompt group a "
                f"group_index of its own{rule}"
            )

    def _pull_window(self) -> None:
        """Pull the same number of slots on every rank, and tell every rank the ids in them. One
        exchange.
        """
        count = self._window_size()
        slots, everyone = compute_and_gather(
            lambda: self._source.pull(count), self._ids, self._group
        )
        records = []
        for turn, turn_ids in enumerate(itertools.zip_longest(*everyone)):
            for rank, ids in enumerate(turn_ids):
                if ids is not None:
                    sequence = self._num_slots + turn * self._size + rank
                    sample = slots[turn] if rank == self._rank else None
                    records.append(self._record(sequence, rank, ids, sample))
        new = [r for r in records if r.sequence >= self._num_known or r.sequence in self._carried]
        self._refuse_cut(new, self._finished)
        self._pending += new
        self.num_skipped += sum(
            ids is None and self._num_slots + turn * self._size + rank >= self._num_known
            for rank, rank_ids in enumerate(everyone)
            for turn, ids in enumerate(rank_ids)
        )
        num_pulled = list(map(len, everyone))
        ended = {rank for rank, number in enumerate(num_pulled) if number < count}
        self._is_exhausted = len(ended) == self._size
        # A shared stream ends for all ranks, and may have grown when a run goes on.
        is_end = ended and self._source.is_shared
        self._num_slots += sum(num_pulled) if is_end else count * self._size
        latest = self._latest | {record.rank: record.boundary for record in records}
        self._latest = {rank: key for rank, key in latest.items() if rank not in ended}

    def _window_size(self) -> int:
        """Estimate the slots to pull on every rank, from the missing documents and the samples per
        document so far.
        """
        if self._num_slots < self._num_known:
            return -(-(self._num_known - self._num_slots) // self._size)
        num_documents = len({record.document for record in self._pending})
        missing = self._docs_per_step - num_documents
        if missing > 0:
            num_slots = missing * max(len(self._pending), 1) / max(num_documents, 1)
        else:  # enough are here, and one of them may go on
            num_slots = len(self._pending) / len({record.unit for record in self._pending})
        return max(-(-int(num_slots) // self._size), 1)

    def _ids(self, slots: Sequence[AnySample | None]) -> list[Any]:
        """Return each sample's `group_index` and `rollout_id`, None for a slot without a sample."""
        for sample in slots:
            if self._minds_groups and sample is not None and sample.group_index is None:
                raise ValueError(
                    f"{sample.name} has no group_index: --loss-aggregation prompt_mean and "
                    f"--keep-prompt-groups need "
                    "one on every sample"
                )
        return [None if s is None else (s.group_index, s.rollout_id) for s in slots]
