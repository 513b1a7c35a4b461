"""Settings that all tests share."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from megatron_pg.loss.resolved import resolve

# Small tensors: threads only get in each other's way.
torch.set_num_threads(1)

# Derandomized: a failure on one machine is a failure on every machine.
settings.register_profile(
    "project",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Resolve settings anew in every test, as some exchange rows of the tables."""
    resolve.cache_clear()
    yield
    resolve.cache_clear()
