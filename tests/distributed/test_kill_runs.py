"""Killed at three moments and resumed, a run leaves what an uninterrupted one does (ten: kill_runs.py)."""

from __future__ import annotations

from pathlib import Path

from tests.lanes import in_one_lane

from .kill_runs import KINDS, compare, random_moments

pytestmark = in_one_lane  # test_quickstart_critic.py resumes a run in both


def test_moments_are_seeded_and_of_every_kind() -> None:
    moments = random_moments(10, seed=0)
    assert moments == random_moments(10, seed=0) != random_moments(10, seed=1)
    assert {moment.kind for moment in moments} == set(KINDS)
    assert [moment.step for moment in moments] == sorted(moment.step for moment in moments)


def test_a_killed_run_loses_nothing(tmp_path: Path) -> None:
    compare(tmp_path, random_moments(3, seed=0))
