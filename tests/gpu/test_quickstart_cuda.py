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
SETTINGS = '{"size":512,"min_word_len":3,"max_word_len":5}'
FLAGS = """
    --device cuda --seed 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100
    --seq-length 64 --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --lr 1e-3
    --task spell_backward --held-out-tasks 16 --prompts-per-step 4 --samples-per-prompt 4
    --steps-per-round 2 --max-response-tokens 8 --max-tokens-per-microbatch 512 --train-iters 12
    --save-interval 4 --entropy-coef 0.01 --exit-signal-handler
"""


def start(run_dir: Path) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [sys.executable, *launcher, "examples/train.py", *FLAGS.split()]
    command += ["--task-settings", SETTINGS, "--save", str(run_dir), "--load", str(run_dir)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True)


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
    assert status_of(start(tmp_path / "stopped")) == 0
    whole, resumed = steps_of(tmp_path / "whole"), steps_of(tmp_path / "stopped")
    for expected, found in zip(whole, resumed, strict=True):
        assert found["response_length"] == expected["response_length"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)
