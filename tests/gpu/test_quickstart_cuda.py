"""The quickstart on a GPU: a run that is stopped and resumed goes on with its random state."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.progress import communicate

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("megatron.core")
pytest.importorskip("reasoning_gym")

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--device cuda --warm-start-iters 4 --warm-start-batch-size 16 --num-training-tasks 256 "
    "--num-held-out-tasks 16 "
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 16 --train-iters 12 "
    "--save-interval 4 "
    "--entropy-coef 0.01 --run-dir "
)


def start(run_dir: Path, *flags: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [sys.executable, *launcher, "examples/train_grpo.py", *FLAGS.split(), str(run_dir)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen([*command, *flags], cwd=ROOT, env=environment, text=True)


def status_of(process: subprocess.Popen[str]) -> int:
    communicate(process)
    return process.returncode


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []


def test_answers_after_a_stop_are_those_without_one(tmp_path: Path) -> None:
    """Sampled by a CUDA generator: one that began anew would answer otherwise."""
    assert status_of(start(tmp_path / "whole")) == 0
    stopped = start(tmp_path / "stopped")
    while len(steps_of(tmp_path / "stopped")) < 2:
        assert stopped.poll() is None
        time.sleep(0.01)
    stopped.terminate()
    status_of(stopped)
    assert len(steps_of(tmp_path / "stopped")) < 12
    assert status_of(start(tmp_path / "stopped", "--resume")) == 0
    whole, resumed = steps_of(tmp_path / "whole"), steps_of(tmp_path / "stopped")
    for expected, found in zip(whole, resumed, strict=True):
        assert found["response_length"] == expected["response_length"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)
