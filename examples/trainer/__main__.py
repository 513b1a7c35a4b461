"""`torchrun --nproc-per-node 8 examples/trainer ...`: the program of this folder."""

import sys
from pathlib import Path

# The folder is run as a script; its modules are a package.
sys.path[0] = str(Path(__file__).parents[1])

from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402

from trainer.train import main  # noqa: E402

record(main)()
