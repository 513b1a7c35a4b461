"""The trainer is built on `megatron.training` (0.17 and later) and reads rollouts with pyarrow: else its files are left out."""

from importlib.util import find_spec

import pytest

from megatron_pg.config.versions import has_megatron_training

if not (has_megatron_training() and find_spec("pyarrow")):
    collect_ignore = [
        *("test_memory_estimate.py", "test_stock_training.py", "test_trainer.py"),
        *(f"test_trainer_{part}.py" for part in "files flags models sampler sharding".split()),
    ]

LONGEST = "quickstart check breakages trainer_sampler trainer matrix hugging_face routing_replay torchrun".split()
"""Files of minutes. They begin first: one that begins last runs beside nothing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = [f"test_{name}.py" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else 99)
