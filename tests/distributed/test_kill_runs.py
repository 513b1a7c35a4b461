"""Killed at a few moments and started again, a run leaves what an uninterrupted one does (ten
moments: kill_runs.py).
"""

from pathlib import Path

import pytest

from megatron_pg.config.versions import has_megatron_training

from .kill_runs import KINDS, QUICKSTART, compare, random_moments, trainer_in


def test_moments_are_seeded_and_of_every_kind() -> None:
    moments = random_moments(10, seed=0)
    assert moments == random_moments(10, seed=0) != random_moments(10, seed=1)
    assert {moment.kind for moment in moments} == set(KINDS)
    assert [moment.step for moment in moments] == sorted(moment.step for moment in moments)


def test_a_killed_quickstart_loses_nothing(tmp_path: Path) -> None:
    compare(QUICKSTART, tmp_path, random_moments(3, seed=0))


@pytest.mark.full
@pytest.mark.skipif(not has_megatron_training(), reason="built on megatron.training")
def test_a_killed_trainer_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    moments = random_moments(len(KINDS), seed=0)
    assert {moment.kind for moment in moments} == set(KINDS)
    compare(trainer_in(tmp_path), tmp_path, moments)
