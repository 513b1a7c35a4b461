"""`--docs-per-step`: pulls samples until a step has enough rollouts, decided equally on all
data-parallel ranks.

N counts rollouts (`document` in names here), of one sample or of several with the same
`rollout_id`. The end of a step never splits a rollout, and splits a prompt group only if that is
harmless. Samples of one rollout or group are contiguous in every rank's share, so that it is
complete once a rank has moved on.
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
"""Key of an indivisible unit: ("prompt group", group_index), ("rollout_id", rollout_id) or
("sample", sequence)."""


def no_sample_in(paths: Sequence[str], num_skipped: int) -> ValueError:
    """Make the error for `--rollout-files` without a good row, because a run without steps would
    look successful.
    """
    skipped = f"{num_skipped} bad rows skipped, --on-bad-row error names the first"
    reason = skipped if num_skipped else "no rows"
    return ValueError(f"--rollout-files {' '.join(paths)}: no sample in them ({reason})")


class SampleSource(Protocol[AnySample]):
    """One data-parallel rank's share of a stream of samples, in slots.

    All ranks pull the same number of slots at a time. In the order of the whole stream, slot i of
    rank r comes after slot i of rank r - 1 and before slot i + 1 of rank 0.
    """

    @property
    def is_shared(self) -> bool:
        """Whether all ranks read one stream and take slots by rank, instead of separate streams."""

    def seek(self, num_slots: int) -> None:
        """Continue after `num_slots` slots: of all ranks if `is_shared`, otherwise of this rank."""

    def pull(self, count: int) -> list[AnySample | None]:
        """Pull the next `count` slots, fewer only at the end of this rank's share. None is a slot
        without a sample.
        """


class _Record(NamedTuple):
    """Pulled sample that is not in a step yet, with the fields that every rank knows."""

    sequence: int  # position in the stream over all ranks
    rank: int
    document: Key  # its rollout, or the sample itself
    unit: Key  # taken whole: its prompt group if groups are kept, or its rollout
    # not to be split by the end of a step: its prompt group if requested, or its rollout
    boundary: Key
    sample: Any  # on its own rank, None on other ranks


@dataclass(frozen=True, eq=False)
class StepSamples(Generic[AnySample]):
    """Samples of one step."""

    samples: tuple[AnySample, ...]
    """This rank's samples, in the order of the stream."""
    num_documents: int
    """N of the step, over all data-parallel ranks."""
    num_skipped: int
    """Slots without a sample (bad rows) since the last step, over all data-parallel ranks."""


class CollectorState(NamedTuple):
    """Position of a `StepCollector` in the stream, for a checkpoint: plain values, equal on every
    rank.

    It has no samples, because a resumed run reads them again.
    """

    start: int
    """The slot to read from, counted over all ranks."""
    num_slots: int
    """Slots pulled so far, over all ranks."""
    carried: tuple[int, ...]
    """The slots from `start` on that were pulled but are not in a step yet."""
    finished: tuple[Key, ...]
    """The last step's groups or rollouts, so that a returning one is an error."""
    num_ranks: int


class StepCollector(Generic[AnySample]):
    """Collector of the samples of each step from a stream that is split over data-parallel ranks.

    Every data-parallel rank builds one with the same settings and calls `collect` for every step.
    Ranks agree by one exchange per window of samples, usually one or two per step. In `exact` mode
    the steps of a shared source are equal at every data-parallel size.

    Args:
        source: this rank's share of the stream. Samples of a rollout must be contiguous in it, and
            samples of a prompt group too if groups are kept whole or must not be split.
        docs_per_step: n rollouts, over all data-parallel ranks.
        mode: `at_least` trains on all samples of the last window. `exact` carries samples beyond n
            into the next step, so that every step except the last has n rollouts.
        keep_prompt_groups: end steps between prompt groups. A step then has at least n rollouts,
            and less than one group beyond n in `exact` mode.
        refuse_cut_groups: raise an error if a step would end inside a prompt group, for which
            `prompt_mean` has no denominator.
        data_parallel_group: the data-parallel group *without* context parallelism. None: only this
            rank.

    Raises:
        ValueError: `docs_per_step` is below 1, or the mode is unknown.
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
        # Checks the flags. The collector has no budget.
        PlanningConfig(1, docs_per_step=docs_per_step, docs_per_step_mode=mode)
        self._source, self._docs_per_step, self._is_exact = source, docs_per_step, mode == "exact"
        self._keeps_groups = keep_prompt_groups
        self._checks_groups = keep_prompt_groups or refuse_cut_groups
        self._group = data_parallel_group
        self._rank = 0 if data_parallel_group is None else dist.get_rank(data_parallel_group)
        self._size = 1 if data_parallel_group is None else dist.get_world_size(data_parallel_group)
        self._pending: list[_Record] = []  # of all ranks, in the order of the stream
        # By rank: the boundary of its last sample, which may continue.
        self._latest: dict[int, Key] = {}
        self._finished: frozenset[Key] = frozenset()  # boundaries in the last step
        self._start = self._num_slots = 0
        # An earlier run pulled the slots below. Only those that it carried are new.
        self._num_known, self._carried = 0, frozenset[int]()
        self.num_skipped = 0
        """Slots without a sample since the last step, over all ranks."""
        self._is_exhausted = False

    def collect(self) -> StepSamples[AnySample] | None:
        """Collect the samples of the next step, or return None if none are left. Every
        data-parallel rank must call it.

        The last step may have fewer rollouts.

        Raises:
            ValueError: the end of the step splits a prompt group or rollout, a sample lacks a
                required `group_index`, or a source raised a ValueError. Raised on all ranks.
            RuntimeError: the source on a different rank raised any other error.
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
        """This rank's samples that were pulled but are not in a step yet."""
        return tuple(record.sample for record in self._pending if record.rank == self._rank)

    def state(self) -> CollectorState:
        """Return the position between two steps, equal on every rank."""
        unread = {slot for slot in self._carried if slot >= self._num_slots}
        carried = tuple(sorted(unread.union(record.sequence for record in self._pending)))
        num_slots = max(self._num_slots, self._num_known)
        start = num_slots
        if carried:  # start at a slot of rank 0
            start = carried[0] - (carried[0] - self._start) % self._size
        finished = tuple(sorted(key for key in self._finished if key[0] != "sample"))
        return CollectorState(start, num_slots, carried, finished, self._size)

    def load_state(self, state: CollectorState) -> None:
        """Continue where a run stopped. Every data-parallel rank must call it.

        Raises:
            ValueError: the number of ranks changed but each rank has its own stream, or a source
                on any rank cannot continue.
        """
        is_shared = self._source.is_shared
        if not is_shared and state.num_ranks != self._size:
            raise ValueError(
                f"the checkpoint has {state.num_ranks} data-parallel ranks and this run has "
                f"{self._size}, but each rank has its own stream. Resume with the same number."
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
        boundary = group if self._checks_groups else document
        return _Record(sequence, rank, document, unit, boundary, sample)

    def _choose(self) -> list[_Record] | None:
        """Choose the samples of the next step, empty at the end of the stream. Return None if more
        must be pulled.
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
                break  # later units must not overtake an open one
            if not is_open:
                chosen += unit
                documents.update(record.document for record in unit)
        if len(documents) < self._docs_per_step and not self._is_exhausted:
            return None
        return chosen

    def _refuse_cut(self, left: Sequence[_Record], taken: Collection[Key]) -> None:
        """Raise a ValueError if a later record's group or rollout is in an earlier step."""
        for kind, identifier in (record.boundary for record in left if record.boundary in taken):
            is_group = kind == "prompt group"
            column, rule = " (group_index)" if is_group else "", ""
            if is_group and not self._keeps_groups:
                rule = " Or add --keep-prompt-groups to end steps between groups."
            raise ValueError(
                f"{kind} {identifier}{column} is split by the end of a step at --docs-per-step "
                f"{self._docs_per_step}. Make its samples contiguous in the stream, with unique "
                f"rollout_id and group_index.{rule}"
            )

    def _pull_window(self) -> None:
        """Pull the same number of slots on every rank, and exchange the ids in them once."""
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
        # A shared stream ends for all ranks, but may have grown when a run is resumed.
        is_end = ended and self._source.is_shared
        self._num_slots += sum(num_pulled) if is_end else count * self._size
        latest = self._latest | {record.rank: record.boundary for record in records}
        self._latest = {rank: key for rank, key in latest.items() if rank not in ended}

    def _window_size(self) -> int:
        """Estimate the slots to pull on every rank, from the missing rollouts and the samples per
        rollout so far.
        """
        if self._num_slots < self._num_known:
            return -(-(self._num_known - self._num_slots) // self._size)
        num_documents = len({record.document for record in self._pending})
        missing = self._docs_per_step - num_documents
        if missing > 0:
            num_slots = missing * max(len(self._pending), 1) / max(num_documents, 1)
        else:  # there are enough, but one may continue
            num_slots = len(self._pending) / len({record.unit for record in self._pending})
        return max(-(-int(num_slots) // self._size), 1)

    def _ids(self, slots: Sequence[AnySample | None]) -> list[Any]:
        """Return each sample's `group_index` and `rollout_id`, None for a slot without a sample."""
        for sample in slots:
            if self._checks_groups and sample is not None and sample.group_index is None:
                raise ValueError(
                    f"{sample.name} has no group_index, which --loss-aggregation prompt_mean and "
                    "--keep-prompt-groups require of every sample"
                )
        return [None if s is None else (s.group_index, s.rollout_id) for s in slots]
