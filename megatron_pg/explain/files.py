"""Rollout files as a source of counted samples: read as training reads them, without keeping tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_pg.config import PolicyLossConfig
from megatron_pg.step import PlanningConfig
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import BareSample

if TYPE_CHECKING:
    from megatron_pg.rollout_files import RolloutPosition

WINDOW_ROWS = 256
"""Rows whose tokens are held at a time."""


@dataclass(frozen=True)
class FileSample(BareSample):
    """A counted sample of a rollout file."""

    missing_fields: tuple[str, ...] = ()
    """Fields of ``Sample`` that the flags ask for and the row does not have."""


class CountedFiles:
    """The rollout files of a launch line on one data-parallel rank; a ``SampleSource``.

    A row without log-probs that the flags ask for is no bad row here: the weights do not depend on them, and a training
    script may compute them itself.

    Args:
        planning: names the files, and what becomes of bad rows.
        config: says which fields a sample must have.
        vocab_size: token ids must be below it; None leaves them unchecked.

    Raises:
        ValueError: see :class:`megatron_pg.rollout_files.RolloutFiles`.
        FileNotFoundError: a path that does not exist.
    """

    can_reshard = False

    def __init__(
        self, planning: PlanningConfig, config: PolicyLossConfig, vocab_size: int | None
    ) -> None:
        from megatron_pg.rollout_files import RolloutFiles

        self._required = config.required_sample_fields
        self._files = RolloutFiles(
            planning.rollout_files,
            on_bad_row=planning.on_bad_row,
            required_fields={"group_index"}.intersection(self._required),
            vocab_size=vocab_size,
        )

    @property
    def num_skipped(self) -> int:
        """Bad rows that were passed so far."""
        return self._files.num_skipped

    @property
    def position(self) -> RolloutPosition:
        """Where the next pull begins."""
        return self._files.position

    def seek(self, position: RolloutPosition) -> None:
        """Continues from a position."""
        self._files.seek(position)

    def pull(self, count: int) -> list[BareSample | None]:
        """The next rows as counted samples, fewer than `count` at the end of the files; None for a bad row."""
        pulled: list[BareSample | None] = []
        while len(pulled) < count:
            wanted = min(count - len(pulled), WINDOW_ROWS)
            window = self._files.pull(wanted)
            pulled += [None if sample is None else self._counted(sample) for sample in window]
            if len(window) < wanted:
                break
        return pulled

    def _counted(self, sample: Sample) -> FileSample:
        return FileSample(
            sample.num_active_tokens,
            sample.group_index,
            sample.rollout_id,
            sample.name,
            tuple(field for field in self._required if getattr(sample, field) is None),
        )
