"""Killed at four moments and started again, examples/trainer leaves what an uninterrupted run does."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_pg.config.versions import has_megatron_training

from .kill_runs import KINDS, random_moments
from .trainer_kill_runs import compare

pytest.importorskip("pyarrow")


@pytest.mark.skipif(not has_megatron_training(), reason="built on megatron.training")
def test_a_killed_run_loses_nothing(tmp_path: Path) -> None:
    moments = random_moments(len(KINDS), seed=0)
    assert {moment.kind for moment in moments} == set(KINDS)
    compare(tmp_path, moments)
