"""Runs of the training script from a small rollout file, and what they leave."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120
VOCABULARY = 32
FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type learned_absolute --attention-dropout 0 --hidden-dropout 0 --seed 1 --lr 1e-2 "
    f"--vocab-size {VOCABULARY} --max-tokens-per-microbatch 64 --loss-aggregation prompt_mean "
    "--docs-per-step 10 --docs-per-step-mode exact --keep-prompt-groups --on-bad-row skip"
)
EXECUTABLE = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def write_rollouts(path: Path, num_groups: int) -> Path:
    """Prompt groups of two to four answers of different lengths, one row in twenty bad, a reward each."""
    generator = random.Random(1)
    with path.open("w") as file:
        for group in range(num_groups):
            prompt = [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 4))]
            for _ in range(generator.randint(2, 4)):
                file.write(json.dumps(_row(generator, group, prompt)) + "\n")
    return path


def _row(generator: random.Random, group: int, prompt: list[int]) -> dict[str, Any]:
    length = generator.randint(1, 12)
    highest = 2 * VOCABULARY if generator.random() < 0.05 else VOCABULARY
    return {
        "prompt_ids": prompt,
        "response_ids": [generator.randrange(highest) for _ in range(length)],
        "log_probs": [-3.5 + 0.1 * generator.random() for _ in range(length)],
        "reward": float(generator.randint(0, 2)),
        "group_index": group,
    }


def start(
    rollouts: Path,
    run_dir: Path,
    *flags: str,
    world_size: int = 2,
    drop: str = "",
    script: Path = ROOT / "examples/train_grpo.py",
) -> subprocess.Popen[bytes]:
    """A run in its own process group; its output goes to a file beside its folder."""
    with open(output_of(run_dir), "ab") as output:
        return subprocess.Popen(
            [
                *EXECUTABLE,
                f"--nproc-per-node={world_size}",
                str(script),
                *(flag for flag in FLAGS.split() if flag != drop),
                *("--rollout-files", str(rollouts), "--run-dir", str(run_dir)),
                *flags,
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples"))),
                "OMP_NUM_THREADS": "1",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "PYTHONWARNINGS": "ignore",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def output_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def finish(process: subprocess.Popen[bytes], run_dir: Path) -> str:
    """The output of a run that must succeed."""
    code = process.wait(timeout=TIMEOUT_SECONDS)
    output = output_of(run_dir).read_text()
    assert code == 0, output
    return output


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": None} for line in lines]
