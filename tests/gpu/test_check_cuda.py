"""A whole step through Transformer Engine's layers: every gradient against the unsharded reference,
on one GPU.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("megatron.core")
pytest.importorskip("transformer_engine.pytorch")

ROOT = Path(__file__).parents[2]
FUSED = "--fused-lm-head --fp32-lm-head"


@pytest.mark.parametrize("flags", ["", FUSED])
def test_a_step_through_transformer_engine(flags: str) -> None:
    launcher = (
        "-m torch.distributed.run --standalone --nproc-per-node 1 -m megatron_pg check --json"
    )
    layers = "--transformer-impl transformer_engine --dtype bf16 --num-layers 1"
    command = [sys.executable, *launcher.split(), *layers.split(), *flags.split()]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(done.stdout[done.stdout.index("{") :])["rows"]
    assert any(row["model"] == "end to end" for row in rows)
    assert all(row["passed"] for row in rows)
    if flags == FUSED and importlib.util.find_spec("quack"):
        assert "does not use QuACK" not in done.stderr
