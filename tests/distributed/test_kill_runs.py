"""Killed at a few moments and started again, a run leaves what an uninterrupted one does (ten
moments: kill_runs.py).
"""

from pathlib import Path

import pytest

from .kill_runs import KINDS, TASK, compare, files_in, random_moments


def test_moments_are_seeded_and_of_every_kind() -> None:
    moments = random_moments(10, seed=0)
    assert moments == random_moments(10, seed=0) != random_moments(10, seed=1)
    assert {moment.kind for moment in moments} == set(KINDS)
    assert [moment.step for moment in moments] == sorted(moment.step for moment in moments)


def test_a_killed_run_on_a_task_loses_nothing(tmp_path: Path) -> None:
    """The middle of a round is in its checkpoints: they come every three steps of rounds of two."""
    compare(TASK, tmp_path, random_moments(3, seed=0))


@pytest.mark.full
def test_a_killed_run_from_files_loses_nothing(tmp_path: Path) -> None:
    moments = random_moments(len(KINDS), seed=0)
    assert {moment.kind for moment in moments} == set(KINDS)
    compare(files_in(tmp_path), tmp_path, moments)
