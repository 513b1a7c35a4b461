"""Triton's interpreter, in which the kernels run on a CPU: `test_log_probs_triton` starts a process
that has it.
"""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MARKS = [
    pytest.mark.skipif(not INTERPRETED, reason="run by test_log_probs_triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
