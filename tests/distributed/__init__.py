"""Real Megatron-Core on gloo processes; every test here is compared with one unsharded process."""

import os
import sys
from pathlib import Path

# The training script and what it consists of are imported as where it lies.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_pg.megatron.cpu.runtime import compile_nothing  # noqa: E402

compile_nothing()  # tests import Megatron before a rank enables the whole runtime
