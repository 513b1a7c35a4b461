"""The end of a wait: processes that hang are told from processes that are slow."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import progress

if not Path("/proc/self/schedstat").exists():
    pytest.skip("Linux counts the progress of a thread", allow_module_level=True)

WORK = "import time\nwhile time.process_time() < 0.5: pass\n"
WORK_OF_A_CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}])\n"
HANGS = {
    "in a sleep": "import time; time.sleep(600)",
    "for a pipe": "import os; os.read(os.pipe()[0], 1)",
    "while it looks ten times a second": "import time\nwhile True: time.sleep(0.1)",
    "for a child": "import subprocess; subprocess.run(['sleep', '600'])",
}


def test_work_on_a_crowded_machine_is_no_hang() -> None:
    """The work has less than a fourth of a core where nine processes share two, and takes longer
    than the patience.
    """
    busy = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(4 * (os.cpu_count() or 1)):
            stack.callback(stack.enter_context(subprocess.Popen(busy)).kill)
        done = progress.run([sys.executable, "-c", WORK_OF_A_CHILD], patience=1.0)
    assert done.returncode == 0


@pytest.mark.parametrize("waits", HANGS)
def test_a_hang_ends_with_what_was_said(waits: str) -> None:
    code = f"print('before', flush=True)\n{HANGS[waits]}"
    said = r"hang: 0\.\d seconds of progress in the last 1; .*before"
    with pytest.raises(TimeoutError, match=said):
        progress.run([sys.executable, "-c", code], patience=1.0)
