"""examples/launch/torchrun.py, on ranks that end in each way: what is said, and with which status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import in_one_lane
from tests.progress import communicate, wait_until

pytestmark = in_one_lane
LAUNCHER = Path(__file__).parents[2] / "examples/launch/torchrun.py"
RANK = """
import os, signal, sys, time
from pathlib import Path

def main():
    how, rank = sys.argv[1], os.environ["RANK"]
    if how.startswith("refused"):
        from megatron_pg.config.program import exit_refused
        if how == f"refused, rank {rank} late":  # it has not imported all of its packages
            time.sleep(600)
        exit_refused("error: --flag")
    if how == "fault" and rank == "1":
        raise ValueError("a fault")
    if how == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    Path(f"started_{rank}").touch()
    while not received:
        time.sleep(0.05)
    time.sleep({"stopped": 1, "stopped for long": 600}.get(how, 0))  # a long round
    Path(f"saved_{rank}").write_text(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])

if sys.argv[1] == "fault":  # the others need no torch, which takes seconds to import
    from torch.distributed.elastic.multiprocessing.errors import record
    main = record(main)
main()
"""


def start(folder: Path, how: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK)
    return subprocess.Popen(
        [sys.executable, LAUNCHER, "--standalone", "--nproc-per-node", "2", "rank.py", how],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = communicate(process)
    return process.returncode, said


@pytest.mark.parametrize("late", [None, 0, 1])
def test_a_refusal_is_said_whichever_rank_is_late(tmp_path, late) -> None:
    """One line from the rank that is in time; two where ranks come seconds apart and both are in time."""
    status, said = end(start(tmp_path, "refused" if late is None else f"refused, rank {late} late"))
    lines = [line for line in said.splitlines() if "cpp_extension" not in line]
    assert status == 1 and set(lines) == {"error: --flag"}
    assert len(lines) == 1 or (late is None and len(lines) == 2)


def test_a_fault_is_traced_once(tmp_path) -> None:
    status, said = end(start(tmp_path, "fault"))
    assert status == 1 and said.count("Traceback") == 1
    assert said.endswith("ValueError: a fault\nrank 1 failed first\n")


def test_a_rank_that_is_killed_is_named(tmp_path) -> None:
    status, said = end(start(tmp_path, "killed"))
    assert status == 1
    assert said.startswith("rank 1: Signal 9 (SIGKILL) received") and len(said.splitlines()) == 1


@pytest.mark.parametrize("seconds", [None, "1"])
def test_a_round_that_is_longer_than_torchrun_waits(tmp_path, seconds) -> None:
    """SIGTERM to the launcher: a round that is longer than the time that ranks have is lost; they have ten minutes."""
    environment = {} if seconds is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds}
    process = start(tmp_path, "stopped for long" if seconds else "stopped", **environment)
    wait_until(lambda: len(list(tmp_path.glob("started_*"))) == 2, [process.pid])
    process.send_signal(signal.SIGTERM)
    status, said = end(process)
    assert status == 128 + signal.SIGTERM and "Traceback" not in said
    saved = [path.read_text() for path in tmp_path.glob("saved_*")]
    assert saved == (["600", "600"] if seconds is None else [])
    assert ("forcefully" in said) == (seconds is not None)
