"""What the process that ranks are forked from imports; nothing here may start a thread."""

import functools
import gc
import logging
import warnings
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from torch.distributed import distributed_c10d

warnings.simplefilter("ignore")  # absent Transformer Engine and Apex, deprecated collectives
logging.getLogger("megatron").setLevel(logging.ERROR)

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime  # noqa: E402

enable_cpu_runtime()

import pytest  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401  (of a rank's first optimizer)

import megatron_pg.check.step  # noqa: E402, F401
import tests.distributed.reference  # noqa: E402, F401
from megatron_pg.config.versions import has_megatron_training  # noqa: E402

if has_megatron_training():
    import train  # noqa: F401
    import trainer.hugging_face
    import trainer.tasks  # noqa: F401

    if find_spec("transformers"):  # 5 seconds of each rank that loads a model or a tokenizer
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

GLOO = distributed_c10d.ProcessGroupGloo


class OneDevice(type):
    """Make a rank's groups on one gloo device, whose thread wakes up a hundred times a second;
    torch makes one a group.

    24 groups on each of 4 idle ranks take 0.13 of a core, on one device none that shows.
    """

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = GLOO._Options()
        options._devices, options._timeout = [_device()], timeout
        return GLOO(store, rank, size, options)

    def __instancecheck__(cls, group: Any) -> bool:
        return isinstance(group, GLOO)


@functools.cache
def _device() -> Any:
    return GLOO.create_device(hostname="127.0.0.1")


distributed_c10d.ProcessGroupGloo = OneDevice("ProcessGroupGloo", (), {})  # type: ignore[misc]

# megatron.training gives the root logger a handler of its own, to standard output.
logging.basicConfig(force=True, level=logging.WARNING, handlers=[logging.lastResort])

gc.freeze()  # a collection in a rank would copy every page that the ranks share
