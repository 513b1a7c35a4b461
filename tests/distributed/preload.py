"""What the process that ranks are forked from imports; nothing here may start a thread."""

import logging
import warnings

warnings.simplefilter("ignore")  # absent Transformer Engine and Apex, deprecated collectives
logging.getLogger("megatron").setLevel(logging.ERROR)

from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime  # noqa: E402

enable_cpu_runtime()

import megatron.core.distributed  # noqa: E402, F401
import megatron.core.models.gpt  # noqa: E402, F401
import megatron.core.pipeline_parallel  # noqa: E402, F401

import megatron_pg.megatron.cpu.layer_spec  # noqa: E402, F401
