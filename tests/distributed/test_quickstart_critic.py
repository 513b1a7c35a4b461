"""The quickstart with a critic: what it reports, and that a resumed run goes on as if it had not been stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tasks
from run_log import checkpoints

from .quickstart_run import output_of, start, steps_of, wait

FLAGS = "--advantage gae --whiten-advantages --lam 0.95 --train-iters 6 --save-interval 2"


def even_lengths_win(rank: int) -> None:
    """A reward that a model this little trained finds by chance."""
    tasks.Tasks.reward = lambda self, entry, answer: float(len(answer) % 2 == 0)  # type: ignore[method-assign]


def run(folder: Path, flags: str) -> None:
    codes = wait(start(folder, flags, prepare=even_lengths_win))
    assert not any(codes), output_of(folder).read_text()


def test_a_resumed_critic_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, FLAGS)
    steps = steps_of(folder)
    assert len(steps) == 6
    for step in steps:
        assert step["value_aggregation_checksum"] == pytest.approx(1.0, abs=1e-9)
        assert step["aggregation_checksum"] == pytest.approx(1.0, abs=1e-9)
        assert step["advantage"] == pytest.approx(0.0, abs=0.5)
    # A head of zeros explains nothing and is half the mean square away from returns of 0 and 1.
    first, last = steps[0], steps[-1]
    assert first["value"] == 0.0 and first["value_clipfrac"] == 0.0
    assert first["value_loss"] == pytest.approx(first["return"] / 2, rel=0.2)
    assert first["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert last["value"] != 0.0
    for late in checkpoints(folder)[-1:]:
        shutil.rmtree(late)
    run(folder, f"{FLAGS} --resume")
    assert steps_of(folder) == steps
