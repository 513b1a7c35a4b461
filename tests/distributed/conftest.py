"""The trainer is built on `megatron.training` (0.17 and later) and reads rollouts with pyarrow:
else its files are left out.
"""

from importlib.util import find_spec

import pytest

from megatron_pg.config.versions import has_megatron_training

if not (has_megatron_training() and find_spec("pyarrow")):
    collect_ignore = [
        *("test_hugging_face.py", "test_kill_runs.py", "test_launch_scripts.py"),
        *("test_quickstart.py", "test_report.py", "test_stock_training.py", "test_trainer.py"),
        *(f"test_trainer_{part}.py" for part in "files flags models sampler sharding".split()),
    ]

LONGEST = (
    "quickstart check breakages trainer_sampler trainer matrix hugging_face routing_replay".split()
)
"""Files of minutes. They begin first: one that begins last runs beside nothing."""
OLDEST = (
    "test_auxiliary_loss.py::test_the_bias_of_experts_counts_no_padding",
    "test_data_parallel.py::test_the_gradient_of_the_step",
    "test_fused_output.py::test_gradients_and_metrics_equal_the_unsharded_reference[TP2+SP CP2-one "
    "pass]",
    "test_fused_output.py::test_gradients_and_metrics_equal_the_unsharded_reference[PP2 VPP2 tied",
    "test_value_step.py::test_the_right_step_passes",
)
"""The beginnings of the names of tests that ci/test.sh runs with the oldest supported megatron-core
too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = [f"test_{name}.py" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else 99)
    for item in items:
        if item.nodeid.rpartition("/")[2].startswith(OLDEST):
            item.add_marker(pytest.mark.oldest)
