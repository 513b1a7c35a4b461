"""What the process that ranks of the training script are forked from imports; nothing here may start a thread."""

import sys
from pathlib import Path

import tests.distributed.preload  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_grpo  # noqa: E402, F401
