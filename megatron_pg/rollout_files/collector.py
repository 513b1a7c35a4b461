"""`--docs-per-step`: pulls samples until a step holds enough documents, decided alike on every data-parallel rank.

N counts documents: a document is a rollout, of one sample or of several with the same `rollout_id`. The end of a step
never cuts a rollout, and a prompt group only where that is harmless. The order of the stream tells which of them are
whole: the samples of one follow each other in every rank's share, so one that a rank has moved on from is complete there.
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
"""A thing that stays in one piece: ("prompt group", group_index), ("rollout_id", rollout_id) or ("sample", sequence)."""


def no_sample_in(paths: Sequence[str], num_skipped: int) -> ValueError:
    """Make the error of `--rollout-files` without a good row: a run without a step would look like one that went well."""
    skipped = f"{num_skipped} bad rows skipped; --on-bad-row error names the first"
    reason = skipped if num_skipped else "no rows"
    return ValueError(f"--rollout-files {' '.join(paths)}: no sample in them ({reason})")


class SampleSource(Protocol[AnySample]):
    """One data-parallel rank's share of a stream of samples, dealt out in slots.

    All ranks are asked for the same number of slots at a time. Slot i of rank r comes, in the order of the whole
    stream, after slot i of rank r - 1 and before slot i + 1 of rank 0.
    """

    @property
    def can_reshard(self) -> bool:
        """True where a position is the same on all ranks and means the same at another data-parallel size."""

    @property
    def position(self) -> Any:
        """The place where the next pull begins; picklable."""

    def seek(self, position: Any) -> None:
        """Continue from a position, of this source or of another with the same stream."""

    def pull(self, count: int) -> list[AnySample | None]:
        """Pull the next `count` slots, fewer only at the end of this rank's share; None is a slot without a sample."""


class _Record(NamedTuple):
    """A pulled sample that is in no step yet, as every rank knows it."""

    sequence: int  # its place in the stream over all ranks
    rank: int
    document: Key  # its rollout, or the sample itself
    unit: Key  # what a step takes whole: its prompt group where groups are kept, or its document
    boundary: Key  # what no end of a step may cut: its prompt group where that is asked for, or its document
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


@dataclass(frozen=True, eq=False)
class CollectorState(Generic[AnySample]):
    """The state of one rank's `StepCollector` for a checkpoint; picklable."""

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

    Every data-parallel rank builds one with the same settings and calls `collect` for every step. Ranks agree by one
    exchange for every window of samples that they pull, most often one or two a step. In `exact` mode the steps of a
    source that can be resharded are the same at every data-parallel size.

    Args:
        source: this rank's share of the stream. Samples of one rollout follow each other in it, and those of one prompt
            group where groups are kept whole or must not be cut.
        docs_per_step: n, over all data-parallel ranks.
        mode: `at_least` trains on all samples of the last window; `exact` carries those beyond n into the next step, so
            that every step but the last holds n.
        keep_prompt_groups: end steps between prompt groups. A step then holds at least n, and less than one group
            beyond n in `exact` mode.
        refuse_cut_groups: refuse a step that would end inside a prompt group: `prompt_mean` has no denominator for a
            part of a group.
        data_parallel_group: the data-parallel group *without* context parallelism; None is this rank alone.

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
        # By rank: the boundary of its last sample, which may go on. Ranks of another data-parallel size are below 0.
        self._latest: dict[int, Key] = {}
        self._finished: frozenset[Key] = frozenset()  # boundaries in the last step
        self._num_slots = self._num_skipped = 0
        self._is_exhausted = False

    def collect(self) -> StepSamples[AnySample] | None:
        """Collect the samples of the next step, None where none are left. Every data-parallel rank must call it.

        The last step may hold fewer documents.

        Raises:
            ValueError: the end of the step cuts a prompt group or rollout, a sample lacks the `group_index` that the
                settings need, or a source raised a ValueError; on all ranks alike.
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
        num_skipped, self._num_skipped = self._num_skipped, 0
        return StepSamples(
            samples=tuple(record.sample for record in chosen if record.rank == self._rank),
            num_documents=len({record.document for record in chosen}),
            num_skipped=num_skipped,
        )

    def state(self) -> CollectorState[AnySample]:
        """Return this rank's state between two steps. A checkpoint keeps the states of all data-parallel ranks."""
        return CollectorState(
            source_position=self._source.position,
            num_slots=self._num_slots,
            carried=tuple((r.sequence, r.sample) for r in self._pending if r.rank == self._rank),
            latest=self._latest,
            finished=self._finished,
            num_skipped=self._num_skipped,
        )

    def load_states(self, states: Sequence[CollectorState[AnySample]]) -> None:
        """Continue where the states of a checkpoint, those of all its data-parallel ranks in rank order, left off.

        Every data-parallel rank must call it: a source that cannot go on ends all of them.

        Raises:
            ValueError: the number of ranks changed and the source cannot be resharded, or a source refuses its position,
                on this rank or another.
        """
        is_same_size = len(states) == self._size
        if not is_same_size and not self._source.can_reshard:
            raise ValueError(
                f"the checkpoint is of {len(states)} data-parallel ranks and this run has {self._size}: each rank's "
                "source has its own position, so resume with the same number"
            )
        mine = states[self._rank if is_same_size else 0]
        position = mine.source_position
        compute_and_gather(lambda: self._source.seek(position), lambda _: None, self._group)
        carried = sorted(
            (sequence, rank, sample)
            for rank, state in enumerate(states)
            for sequence, sample in state.carried
        )
        self._pending = []
        for index, (sequence, rank, sample) in enumerate(carried):
            rank = rank if is_same_size else index % self._size
            ids, own = (sample.group_index, sample.rollout_id), rank == self._rank
            self._pending.append(self._record(sequence, rank, ids, sample if own else None))
        # At another size no rank has a latest sample yet; until one does, open groups and rollouts stay open.
        self._latest = mine.latest
        if not is_same_size:
            self._latest = {-1 - index: key for index, key in enumerate(mine.latest.values())}
        self._finished, self._is_exhausted = mine.finished, False
        self._num_slots, self._num_skipped = mine.num_slots, mine.num_skipped

    def _record(self, sequence: int, rank: int, ids: Any, sample: Any) -> _Record:
        group_index, rollout_id = ids
        document = ("sample", sequence) if rollout_id is None else ("rollout_id", rollout_id)
        group = document if group_index is None else ("prompt group", group_index)
        unit = group if self._keeps_groups else document
        boundary = group if self._minds_groups else document
        return _Record(sequence, rank, document, unit, boundary, sample)

    def _choose(self) -> list[_Record] | None:
        """Choose the samples of the next step: none at the end of the stream, None while more have to be pulled."""
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
                rule = "; end steps between groups with --keep-prompt-groups: the prompt mean has no denominator for a part"
            raise ValueError(
                f"{kind} {identifier}{column} is cut by the end of a step at --docs-per-step {self._docs_per_step}: let "
                "its samples follow each other in the stream, give every rollout a rollout_id and every prompt group a "
                f"group_index of its own{rule}"
            )

    def _pull_window(self) -> None:
        """Pull the same number of slots on every rank, and tell every rank the ids in them. One exchange."""
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
        self._refuse_cut(records, self._finished)
        self._pending += records
        self._num_slots += count * self._size
        self._num_skipped += sum(ids is None for rank_ids in everyone for ids in rank_ids)
        ended = {rank for rank, rank_ids in enumerate(everyone) if len(rank_ids) < count}
        self._is_exhausted = len(ended) == self._size
        # A window of bad rows alone does not end what was open at another size.
        if records or self._is_exhausted:
            ended |= {rank for rank in self._latest if rank < 0}
        latest = self._latest | {record.rank: record.boundary for record in records}
        self._latest = {rank: key for rank, key in latest.items() if rank not in ended}

    def _window_size(self) -> int:
        """Estimate the slots to pull on every rank, from the missing documents and the samples per document so far."""
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
                    f"{sample.name} has no group_index: --loss-aggregation prompt_mean and --keep-prompt-groups need "
                    "one on every sample"
                )
        return [None if s is None else (s.group_index, s.rollout_id) for s in slots]
