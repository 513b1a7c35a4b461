"""The trainer is built on `megatron.training` (0.17 and later) and reads rollouts with pyarrow: else its files are left out."""

from importlib.util import find_spec

from megatron_pg.config.versions import has_megatron_training

if not (has_megatron_training() and find_spec("pyarrow")):
    collect_ignore = [
        *("test_memory_estimate.py", "test_stock_training.py", "test_trainer.py"),
        *(f"test_trainer_{part}.py" for part in "files flags models sampler sharding".split()),
    ]
