"""Settings that all tests share."""

import torch
from hypothesis import HealthCheck, settings

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
