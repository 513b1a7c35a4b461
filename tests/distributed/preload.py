"""What the process that ranks are forked from imports; nothing here may start a thread."""

import gc
import logging
import warnings

warnings.simplefilter("ignore")  # absent Transformer Engine and Apex, deprecated collectives
logging.getLogger("megatron").setLevel(logging.ERROR)

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime  # noqa: E402

enable_cpu_runtime()

import pytest  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401  (of a rank's first optimizer)
import train_grpo  # noqa: E402, F401

import megatron_pg.check.step  # noqa: E402, F401
import tests.distributed.reference  # noqa: E402, F401
from megatron_pg.config.versions import has_megatron_training  # noqa: E402

if has_megatron_training():
    import trainer.train  # noqa: F401

# megatron.training gives the root logger a handler of its own, to standard output.
logging.basicConfig(force=True, level=logging.WARNING, handlers=[logging.lastResort])

gc.freeze()  # a collection in a rank would copy every page that the ranks share
